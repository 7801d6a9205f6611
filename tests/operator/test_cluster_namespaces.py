"""An operator has two namespaces of a real API server, one of which takes its role back and gives it again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_kit import REPOSITORY, Cluster
from tests.operator.running import Kube, OperatorProcess, environment, eventually, pipeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

RELIST_S = 1


@pytest.fixture
def other(kube: Kube) -> Iterator[Kube]:
    """A second namespace."""
    found = Kube(cluster=kube.cluster, namespace=f"{kube.namespace}-other")
    kube.cluster.kubectl("delete", "namespace", found.namespace, "--ignore-not-found", "--timeout=50s")
    kube.cluster.kubectl("create", "namespace", found.namespace)
    yield found
    kube.cluster.kubectl("delete", "namespace", found.namespace, "--wait=false", "--ignore-not-found")


@pytest.fixture
def of_two(prepared: tuple[Cluster, Path], kube: Kube, other: Kube, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator with a role in each of the two namespaces and no rights elsewhere."""
    cluster, _ = prepared
    watched = f"{kube.namespace},{other.namespace}"
    chosen = ["--set", f"watchNamespaces={{{watched}}}", "--set", "rbac.aggregate=false"]
    chosen += ["--show-only", "templates/rbac.yaml", "--show-only", "templates/serviceaccount.yaml"]
    rendered = subprocess.run(
        ["helm", "template", "two", str(REPOSITORY / "charts" / "omnipipeline"), "-n", kube.namespace, *chosen],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    cluster.kubectl("apply", "-f", "-", stdin=rendered.stdout)  # of both namespaces
    [account] = [each for each in kube.names("serviceaccounts", "app.kubernetes.io/instance=two")]
    variables = environment(cluster, tmp_path, namespaces=watched)
    config = Path(variables["KUBECONFIG"])
    view = json.loads(config.read_text())
    view["users"][0]["user"]["token"] = kube("create", "token", account).strip()
    config.write_text(json.dumps(view))
    variables["OMNI_OPERATOR_RELIST_SECONDS"] = str(RELIST_S)
    process = OperatorProcess(environment=variables, log=tmp_path / "operator.log")
    try:
        yield process
    finally:
        process.close()
        print(process.log.read_text() if process.log.exists() else "the operator never started")


def ended(operator: OperatorProcess) -> bool:
    return operator.process is not None and operator.process.poll() is not None


@pytest.mark.proves("unreadable-namespace")
def test_a_namespace_that_takes_its_role_back_stops_no_pipeline_of_another(
    kube: Kube, other: Kube, of_two: OperatorProcess
) -> None:
    of_two.start().managing()
    for each in (kube, other):
        each.apply(pipeline())
        each.wait_ready("duo")
    [role] = other.names("rolebindings", "app.kubernetes.io/instance=two")
    binding = other("get", "rolebinding", role, "-o", "json")
    other("delete", "rolebinding", role)
    eventually(lambda: ended(of_two), what="the operator ends: what it may read has changed")
    assert of_two.process is not None and of_two.process.returncode == 1
    of_two.start().managing()
    assert f"namespace {other.namespace} is not watched" in of_two.log.read_text()
    kube.apply(pipeline(processGroups=[{"name": "first", "replicas": 2}]))
    eventually(lambda: kube.wait_ready("duo")["status"]["units"][0]["ready"] == 2)
    assert other.names("pods"), "what runs there is left alone"
    kept = json.loads(binding)
    kept["metadata"] = {name: kept["metadata"][name] for name in ("name", "namespace", "labels")}
    other.apply(kept, pipeline(processGroups=[{"name": "first", "replicas": 3}]))
    eventually(lambda: ended(of_two), what="the operator ends: the namespace can be read again")
    of_two.start().managing()
    eventually(lambda: other.wait_ready("duo")["status"]["units"][0]["ready"] == 3)
    assert of_two.stop() == 0
