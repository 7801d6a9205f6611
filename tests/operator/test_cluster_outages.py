"""On a real API server that cannot be reached for a while: nobody writes twice, and work goes on afterwards."""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import running
from blackhole import Proxy
from cluster_kit import Cluster
from running import Kube, OperatorProcess, eventually, pipeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

HOLE_S = 30.0


def through(proxy: Proxy, told: dict[str, str], folder: Path) -> dict[str, str]:
    """The same environment, by way of the proxy."""
    view = json.loads(Path(told["KUBECONFIG"]).read_text())
    view["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    config = folder / "proxied.kubeconfig"
    config.write_text(json.dumps(view))
    return told | {"KUBECONFIG": str(config)}


def api_address(told: dict[str, str]) -> tuple[str, int]:
    url = urlsplit(json.loads(Path(told["KUBECONFIG"]).read_text())["clusters"][0]["cluster"]["server"])
    assert url.hostname is not None
    return url.hostname, url.port or 443


def test_a_holder_in_a_black_hole_ends_before_the_next_one_writes(
    kube: Kube, prepared: tuple[Cluster, Path], tmp_path: Path
) -> None:
    cluster, folder = prepared
    told = running.environment(cluster, folder, namespaces=kube.namespace, lease=True)
    system = Kube(cluster=cluster, namespace=running.SYSTEM)
    with Proxy(api_address(told)).running() as proxy:
        holed = OperatorProcess(
            environment=through(proxy, told, tmp_path) | {"OMNI_OPERATOR_POD_NAME": "holed"}, log=tmp_path / "holed.log"
        )
        other = OperatorProcess(environment=told | {"OMNI_OPERATOR_POD_NAME": "other"}, log=tmp_path / "other.log")
        try:
            holed.start()
            kube.apply(pipeline())
            kube.wait_ready("duo")
            other.start()
            time.sleep(3)
            proxy.swallow.set()
            began = time.monotonic()
            kube.apply(pipeline(processGroups=[{"name": "first", "replicas": 2}]))
            assert holed.process is not None
            assert holed.process.wait(timeout=15) == 1
            ended = time.monotonic()
            assert len(kube.all("deployments")) == 3
            assert not [each for each in kube.all("deployments") if each["spec"]["replicas"] == 2], "nobody has written"
            eventually(lambda: len(kube.all("pods")) == 4, within_s=20, what="the other writes")
            assert ended - began < 14 and time.monotonic() - began < 25
        finally:
            for process in (holed, other):
                process.close()
                print(process.log.read_text() if process.log.exists() else "")
            system("delete", "lease", running.ACCOUNT, "--ignore-not-found")


def test_after_a_black_hole_the_watches_hear_again(kube: Kube, prepared: tuple[Cluster, Path], tmp_path: Path) -> None:
    cluster, folder = prepared
    told = running.environment(cluster, folder, namespaces=kube.namespace)
    with Proxy(api_address(told)).running() as proxy:
        operator = OperatorProcess(environment=through(proxy, told, tmp_path), log=tmp_path / "operator.log")
        try:
            operator.start()
            kube.apply(pipeline())
            kube.wait_ready("duo")
            pods = {each["metadata"]["uid"] for each in kube.all("pods")}
            proxy.swallow.set()
            kube.apply(pipeline(processGroups=[{"name": "first", "replicas": 2}]))
            time.sleep(HOLE_S)
            assert operator.process is not None and operator.process.poll() is None
            proxy.swallow.clear()
            eventually(lambda: len(kube.all("pods")) == 4, within_s=60, what="the edit was heard")
            assert pods < {each["metadata"]["uid"] for each in kube.all("pods")}
        finally:
            operator.close()
            print(operator.log.read_text())
