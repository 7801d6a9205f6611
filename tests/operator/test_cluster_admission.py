"""The operator's rights are enough for its owners on a real API server with OwnerReferencesPermissionEnforcement."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_kit import Cluster
from tests.operator.running import Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_outages import kill_api_server, start_api_server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PLUGIN = "OwnerReferencesPermissionEnforcement"
FLAG = "--enable-admission-plugins="
STRANGER = "somebody"


@pytest.fixture
def enforcing(prepared: tuple[Cluster, Path], kube: Kube) -> Iterator[None]:
    """The same API server, started with the plugin; afterwards as it was."""
    cluster, folder = prepared
    command = [f"{part},{PLUGIN}" if part.startswith(FLAG) else part for part in kill_api_server(cluster)]
    assert any(PLUGIN in part for part in command), command
    log_file = folder / "apiserver.log"
    with log_file.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def answers() -> bool:
        assert process.poll() is None, log_file.read_text()[-2000:]
        return cluster.kubectl("get", "--raw", "/readyz", check=False).returncode == 0

    try:
        eventually(answers, what="the API server with the plugin")
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
        start_api_server(cluster)


def owned(name: str, owner: dict[str, str]) -> str:
    """A ConfigMap that says that its owner may not go before it."""
    reference = {
        "apiVersion": "omnipipeline.dev/v1alpha1",
        "kind": "OmniPipeline",
        "name": owner["name"],
        "uid": owner["uid"],
        "blockOwnerDeletion": True,
    }
    return json.dumps(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "ownerReferences": [reference]}}
    )


def test_the_operators_rights_are_enough_where_owners_are_enforced(
    kube: Kube, enforcing: None, operator: OperatorProcess
) -> None:
    operator.start()
    kube.apply(pipeline(networkPolicy={}, disruption={"podDisruptionBudget": {}}))
    made = kube.wait_ready("duo")["metadata"]
    for kind in ("deployments", "configmaps", "services", "secrets", "networkpolicies", "poddisruptionbudgets"):
        children = kube.all(kind, "omnipipeline.dev/pipeline")
        assert children
        assert {child["metadata"]["ownerReferences"][0]["uid"] for child in children} == {made["uid"]}, kind

    kube("create", "role", STRANGER, "--verb=create", "--resource=configmaps")
    kube("create", "rolebinding", STRANGER, f"--role={STRANGER}", f"--user={STRANGER}")

    def refused() -> bool:
        stranger = kube.cluster.kubectl(
            *("-n", kube.namespace, f"--as={STRANGER}", "create", "-f", "-"), stdin=owned("theirs", made), check=False
        )
        return "cannot set blockOwnerDeletion" in stranger.stderr

    eventually(refused, within_s=20, what="the plugin is on: who may not touch the pipeline may not hold it")

    kube.apply(pipeline(processGroups=[{"name": "first", "replicas": 2}]))
    eventually(lambda: len(kube.all("pods")) == 4, what="it scales")
    kube("delete", "omnipipeline", "duo", "--cascade=foreground", "--timeout=60s")
    eventually(lambda: not kube.names("deployments") and not kube.names("secrets"), what="nothing is left")
