"""The conversion webhook as the chart installs it: in pods, behind its Service, through rolls, kills and renewals.

A second version of the resource (`tests.contract.next_version`), an operator image that converts it, and clients that
read and write both versions all the while. Then the webhook goes, by a switch and with the release: the API server
answers as before.
"""

from __future__ import annotations

import base64
import json
import shutil
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kubernetes import config

from omnipipeline_operator.conversion import certificates
from omnipipeline_spec.generating import schema
from tests import cluster_images
from tests.cluster.conftest import CRD
from tests.cluster.installing import CHART, RELEASE, SYSTEM, Installed, helm, image_values, pipeline, wait_for
from tests.cluster_kit import REPOSITORY, Cluster
from tests.contract import next_version
from tests.contract.next_version import HUB, NAME

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(1200, func_only=True)]

WEBHOOK = f"{RELEASE}-conversion"
DEPLOYMENT = f"deployment/{RELEASE}"
IMAGE = "localhost/omnipipeline-operator:e2e-next"
PORT = 8443  # of the chart's pods
SELECTOR = "app.kubernetes.io/name=omnipipeline-operator"
DOCKERFILE = """
FROM {operator}
COPY tests /opt/next/tests
ENV PYTHONPATH=/opt/next
ENTRYPOINT ["python", "-m", "tests.operator.next_version_operator"]
"""
STAGES: list[dict[str, object]] = [
    {"name": "only", "process": "only", "factory": "made:only", "terminal": True, "tpSize": 1}
]


#: The object that is edited in each version, and read in the other. An edit in the version that is not stored is
#: converted anew after each conflict: on an object that others edit all the time it loses until its request times out.
EDITED = {HUB: "both", NAME: "other"}


class Clients:
    """Threads that read an object in each version, and edit another one in each; the outcome of each request."""

    def __init__(self, installed: Installed) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._installed = installed
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(version, edits))
            for version in (HUB, NAME)
            for edits in (False, False, True)
        ]

    def __enter__(self) -> Clients:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for each in self._threads:
            each.join()

    @property
    def failures(self) -> dict[str, int]:
        return {outcome: count for outcome, count in self.outcomes.items() if outcome != "ok"}

    def some(self, count: int) -> None:
        """Wait until ``count`` more requests have ended."""
        goal = self.outcomes.total() + count
        wait_for(f"{count} more requests", lambda: self.outcomes.total() >= goal, timeout_s=120)

    def _ask(self, version: str, edits: bool) -> None:
        api: Any = config.new_client_from_config(str(self._installed.cluster.kubeconfig))
        name = EDITED[version if edits else {HUB: NAME, NAME: HUB}[version]]
        path = f"/apis/omnipipeline.dev/{version}/namespaces/{self._installed.namespace}/omnipipelines/{name}"
        method, number = "PATCH" if edits else "GET", 0
        while not self._stopping.wait(0.02):
            number += 1
            began = time.monotonic()
            body = {"metadata": {"annotations": {f"edits-{version}": str(number)}}} if edits else None
            header = {"Content-Type": "application/merge-patch+json"}
            request = api.param_serialize(method, path, header_params=header, body=body, auth_settings=["BearerToken"])
            answer = api.call_api(*request, _request_timeout=60)
            found = json.loads(answer.read())
            field = "modelPath" if version == HUB else "model"
            if answer.status == 200:
                outcome = "ok" if found["spec"].get(field) == "/models/a" else f"wrong: {found['spec']}"
            else:
                outcome = f"{method} of {version}: {answer.status} {found.get('message')}"
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.outcomes[outcome] += 1


def two_versions(folder: Path, *, storage: str = HUB) -> Path:
    """The chart of a release whose CRD serves a second version."""
    chart = folder / f"chart-{storage}"
    shutil.copytree(CHART, chart)
    (chart / "crds.yaml").write_text(json.dumps(schema.crd([next_version.served()], storage=storage)))
    return chart


@pytest.fixture(scope="module")
def operator(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The operator of the next release."""
    folder = tmp_path_factory.mktemp("next")
    for name in ("contract/next_version.py", "operator/next_version_operator.py"):
        (folder / "tests" / name).parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / "tests" / name, folder / "tests" / name)
    (folder / "Dockerfile").write_text(DOCKERFILE.format(operator=installed.images.operator))
    return cluster_images.build(IMAGE, "-f", "Dockerfile", folder=folder)


@pytest.fixture
def released(installed: Installed) -> Iterator[Installed]:
    """Afterwards this release is installed again, with one version, as the other files' tests need it."""
    for name in EDITED.values():
        installed.apply(pipeline(name, STAGES, code="", suspend=True, modelPath="/models/a", restartedAt="once"))
    yield installed
    helm(installed.cluster, "uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--ignore-not-found")
    crd(installed.cluster, {"spec": {"conversion": {"strategy": "None", "webhook": None}}})
    options = ["--namespace", SYSTEM, *image_values(installed.images), "--force-conflicts", "--wait", "--timeout=300s"]
    helm(installed.cluster, "install", RELEASE, str(CHART), *options)
    installed.kubectl("delete", f"omnipipelines.{HUB}.omnipipeline.dev", *EDITED.values(), "--timeout=50s")


def upgrade(installed: Installed, chart: Path, image: str, *more: str) -> None:
    images = type(installed.images)(operator=image, stage=installed.images.stage)
    options = ["--namespace", SYSTEM, *image_values(images), *more, "--wait", "--timeout", "240s"]
    helm(installed.cluster, "upgrade", "--install", RELEASE, str(chart), *options)


def crd(cluster: Cluster, patch: dict[str, Any] | None = None) -> Any:
    """The definition, after a patch if there is one."""
    if patch is not None:
        cluster.kubectl("patch", "crd", CRD, "--type=merge", "-p", json.dumps(patch))
    return json.loads(cluster.kubectl("get", "crd", CRD, "-o", "json").stdout)


def authorities(installed: Installed) -> bytes:
    """Those that the API server trusts; empty while it knows none."""
    webhook = crd(installed.cluster)["spec"]["conversion"].get("webhook") or {}
    return base64.b64decode(webhook.get("clientConfig", {}).get("caBundle", ""))


def secret(installed: Installed, held: certificates.Held | None = None) -> certificates.Held:
    """The contents of the Secret, written first where they are given."""
    system = ("-n", SYSTEM)
    if held is not None:
        data = {name: base64.b64encode(value).decode() for name, value in held.data().items()}
        patch = json.dumps({"data": data})
        installed.cluster.kubectl(*system, "patch", "secret", WEBHOOK, "--type=merge", "-p", patch)
    found = json.loads(installed.cluster.kubectl(*system, "get", "secret", WEBHOOK, "-o", "json").stdout)
    read = certificates.of({name: base64.b64decode(text) for name, text in found["data"].items()})
    assert read is not None
    return read


def aged() -> certificates.Held:
    """A certificate that is due in half a minute, of an authority that is due a minute later."""
    host = f"{WEBHOOK}.{SYSTEM}.svc"
    now = datetime.now(UTC)
    old = certificates.renewed(None, host, now + timedelta(seconds=90) - certificates.AUTHORITY_LIFE * 2 / 3)
    return certificates.renewed(old, host, now + timedelta(seconds=30) - certificates.LIFE * 2 / 3)


def read(installed: Installed, version: str) -> Any:
    return json.loads(installed.kubectl("get", f"omnipipelines.{version}.omnipipeline.dev", "both", "-o", "json"))


def pods(installed: Installed) -> list[str]:
    found = installed.cluster.kubectl("-n", SYSTEM, "get", "pods", "-l", SELECTOR, "-o", "name").stdout.split()
    return [each.removeprefix("pod/") for each in found]


def is_shown(installed: Installed) -> bool:
    """Whether each pod shows the certificate of the Secret to new connections."""
    found = installed.cluster.kubectl("-n", SYSTEM, "get", "pods", "-l", SELECTOR, "-o", "json").stdout
    addresses = [(str(each["status"]["podIP"]), PORT) for each in json.loads(found)["items"]]
    seen = {ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(each, timeout=10)) for each in addresses}
    return seen == {ssl.PEM_cert_to_DER_cert(secret(installed).certificate.decode())}


def rolled(installed: Installed) -> None:
    installed.cluster.kubectl("-n", SYSTEM, "rollout", "restart", DEPLOYMENT)
    wait = ("-n", SYSTEM, "rollout", "status", DEPLOYMENT, "--timeout=55s")
    wait_for("the roll", lambda: installed.cluster.kubectl(*wait, check=False).returncode == 0, timeout_s=200)
    wait_for("two pods", lambda: len(pods(installed)) == 2, timeout_s=60)


def test_the_webhook_in_pods_outlives_rolls_kills_and_renewals_and_leaves_nothing_behind(
    released: Installed, operator: str, tmp_path: Path
) -> None:
    installed, cluster = released, released.cluster

    def converts() -> bool:
        other = ("-n", installed.namespace, "get", f"omnipipelines.{NAME}.omnipipeline.dev", "both")
        return cluster.kubectl(*other, check=False).returncode == 0

    def is_served() -> bool:
        # kubectl keeps its list of versions for hours, and would ask for the one that has gone: it reads the list anew.
        cluster.kubectl("api-resources", "--api-group=omnipipeline.dev")
        return cluster.kubectl("-n", installed.namespace, "get", "omnipipelines", check=False).returncode == 0

    converting = ("--set", "conversion.enabled=true,replicas=2,logFormat=text")

    # One release earlier: the webhook without a second version. Switched off, the CRD forgets it.
    upgrade(installed, CHART, installed.images.operator, *converting)
    wait_for("the API server knows the webhook", lambda: authorities(installed), timeout_s=60)
    upgrade(installed, CHART, installed.images.operator)
    assert crd(cluster)["spec"]["conversion"] == {"strategy": "None"}
    assert read(installed, HUB)["spec"]["restartedAt"] == "once"

    # The release with two versions; its certificates are due soon.
    chart = two_versions(tmp_path)
    upgrade(installed, chart, operator, *converting)
    cluster.kubectl("-n", SYSTEM, "scale", DEPLOYMENT, "--replicas=0")
    wait_for("no pod", lambda: not pods(installed), timeout_s=60)
    first = secret(installed, aged())
    cluster.kubectl("-n", SYSTEM, "scale", DEPLOYMENT, "--replicas=2")
    wait_for("this authority is trusted", lambda: authorities(installed) == first.authorities, timeout_s=90)
    cluster.kubectl("-n", SYSTEM, "rollout", "status", DEPLOYMENT, "--timeout=55s")
    wait_for("a read in the other version", converts, timeout_s=60)
    shown = read(installed, NAME)["spec"]
    assert (shown["model"], "restartedAt" in shown) == ("/models/a", False)

    with Clients(installed) as clients:
        clients.some(200)
        rolled(installed)
        clients.some(200)
        assert clients.failures == {}, "while both pods are replaced"

        # A pod is killed by force: what was being asked, and what finds its address before the endpoint goes, may fail.
        cluster.kubectl("-n", SYSTEM, "delete", "pod", pods(installed)[0], "--grace-period=0", "--force")
        clients.some(200)
        wait_for("another pod", lambda: len(pods(installed)) == 2, timeout_s=60)
        cluster.kubectl("-n", SYSTEM, "rollout", "status", DEPLOYMENT, "--timeout=55s")
        killed = clients.failures
        print("killed by force:", killed, f"slowest {clients.slowest_s:.1f} s")
        assert sum(killed.values()) <= 20 and all("conversion webhook" in each for each in killed)
        clients.outcomes.clear()

        wait_for("another certificate", lambda: secret(installed).certificate != first.certificate, timeout_s=200)
        wait_for("all pods show it", lambda: is_shown(installed), timeout_s=200)
        wait_for("another authority", lambda: authorities(installed) != first.authorities, timeout_s=300)
        assert authorities(installed).endswith(first.authorities), "the one before is trusted, too"
        clients.some(1000)
        assert clients.failures == {}, "while certificate and authority are renewed"
    log = cluster.kubectl("-n", SYSTEM, "logs", "-l", SELECTOR, "--tail=-1").stdout
    assert "Traceback" not in log
    assert read(installed, HUB)["spec"]["restartedAt"] == "once"

    # The release goes; the CRD and the pipeline stay, and are read as they are stored.
    helm(cluster, "uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "240s")
    definition = crd(cluster)["spec"]
    assert definition["conversion"] == {"strategy": "None"}
    assert {each["name"]: each["served"] for each in definition["versions"]} == {HUB: True, NAME: False}
    wait_for("kubectl reads what is served", is_served, timeout_s=60)
    assert read(installed, HUB)["spec"]["restartedAt"] == "once"
    cluster.kubectl("create", "namespace", "omni-e2e-gone")
    cluster.kubectl("delete", "namespace", "omni-e2e-gone", "--timeout=55s")

    # It comes back: helm takes over the CRD without a conflict, and both versions are served.
    upgrade(installed, chart, operator, *converting)
    wait_for("both versions", lambda: crd(cluster)["spec"]["versions"][1]["served"], timeout_s=30)
    wait_for("the API server knows the webhook", lambda: authorities(installed), timeout_s=60)

    wait_for("a read in the other version", converts, timeout_s=60)

    # The release stays while objects may be stored in both, until they are migrated.
    cluster.kubectl(
        "patch", "crd", CRD, "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": {"storedVersions": [HUB, NAME]}}),
    )  # fmt: skip
    refused = helm(cluster, "uninstall", RELEASE, "--namespace", SYSTEM, "--timeout", "240s", check=False)
    assert refused.returncode != 0 and f"{RELEASE}-withdrawal" in refused.stderr
    reason = cluster.kubectl("-n", SYSTEM, "logs", f"job/{RELEASE}-withdrawal", "--tail=5").stdout
    assert f"stored as {HUB} and {NAME}" in reason
    assert read(installed, NAME)["spec"]["model"] == "/models/a"
    cluster.kubectl(
        "patch", "crd", CRD, "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": {"storedVersions": [HUB]}}),
    )  # fmt: skip
    helm(cluster, "uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "240s")
    wait_for("all pods have ended", lambda: not pods(installed), timeout_s=60)  # helm waits for the Deployment alone
    left = cluster.kubectl("-n", SYSTEM, "get", "jobs,secrets,services,pods,rolebindings", "-o", "name").stdout
    assert not left, left
