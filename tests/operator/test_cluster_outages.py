"""A real API server has outages: only one operator writes at any time, and reconciles go on afterwards."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster_kit import Cluster, kit
from tests.operator import running
from tests.operator.blackhole_proxy import Proxy
from tests.operator.running import Audit, Election, Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import SETTLE_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

HOLE_S = 30.0


def through(proxy: Proxy, cluster: Cluster, base: dict[str, str], config: Path) -> dict[str, str]:
    """The same environment through the proxy, with another token, by which the audit log identifies the process."""
    view = json.loads(Path(base["KUBECONFIG"]).read_text())
    view["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    view["users"][0]["user"]["token"] = running.token(cluster)
    config.write_text(json.dumps(view))
    return base | {"KUBECONFIG": str(config)}


def api_address(base: dict[str, str]) -> tuple[str, int]:
    url = urlsplit(json.loads(Path(base["KUBECONFIG"]).read_text())["clusters"][0]["cluster"]["server"])
    assert url.hostname is not None
    return url.hostname, url.port or 443


def kill_api_server(cluster: Cluster) -> list[str]:
    """SIGKILL; its command line. Its port is free afterwards: a successor that finds it taken ends at once."""
    state = cluster.kubeconfig.parent / "run" / "apiserver.pid"
    if kit() is None or not state.is_file():
        pytest.skip("only the kit's API server can be restarted")
    number = int(state.read_text())
    command = Path(f"/proc/{number}/cmdline").read_bytes().decode().split("\0")[:-1]
    watched = os.pidfd_open(number)  # readable when its last thread has closed its files, whoever its parent is
    try:
        signal.pidfd_send_signal(watched, signal.SIGKILL)
        assert select.select([watched], [], [], 60)[0], "the API server outlives SIGKILL"
    finally:
        os.close(watched)
    state.unlink()  # its number may be there until somebody reaps it
    return command


def start_api_server(cluster: Cluster) -> None:
    """Start it again with the kit."""
    program = kit()
    assert program is not None
    subprocess.run([program, "up", "--no-node"], env=cluster.environment, capture_output=True, timeout=240, check=True)


def replicas(count: int) -> dict[str, object]:
    return pipeline(processGroups=[{"name": "first", "replicas": count}])


def test_one_writes_while_the_api_server_restarts_and_while_its_holder_is_in_a_black_hole(
    kube: Kube, prepared: tuple[Cluster, Path], tmp_path: Path, election: Election, audit: Audit
) -> None:
    cluster, folder = prepared
    base = running.environment(cluster, folder, namespaces=kube.namespace, lease=True)
    with Proxy(api_address(base)).running() as first, Proxy(api_address(base)).running() as second:
        proxies = {"one": first, "other": second}
        operators = {
            name: OperatorProcess(
                environment=through(proxy, cluster, base, tmp_path / f"{name}.config")
                | {"OMNI_OPERATOR_POD_NAME": name},
                log=tmp_path / f"{name}.log",
            )
            for name, proxy in proxies.items()
        }

        def kept_alive() -> None:
            """Do as a kubelet: an operator that ended because it could not renew its Lease is started again."""
            for each in operators.values():
                if each.process is not None and each.process.poll() is not None:
                    assert each.process.returncode == 1
                    each.start()

        def has(count: int) -> bool:
            kept_alive()
            return len(kube.all("pods")) == count

        try:
            operators["one"].start()
            eventually(lambda: election.holder() == "one")
            operators["other"].start()
            kube.apply(pipeline())
            kube.wait_ready("duo")
            kill_api_server(cluster)
            start_api_server(cluster)
            kube.apply(replicas(2))
            eventually(lambda: has(4), within_s=120, what="the edit after the restart")
            pods = {each["metadata"]["uid"] for each in kube.all("pods")}

            holder = eventually(election.holder)
            (standby,) = set(operators) - {holder}
            eventually(lambda: "holding" in operators[holder].log.read_text())
            began = time.time()
            proxies[holder].swallow.set()
            kube.apply(replicas(3))
            process = operators[holder].process
            assert process is not None
            assert process.wait(timeout=120) == 1, "a holder that cannot renew ends"
            eventually(lambda: election.holder() == standby, within_s=120, what="the standby takes over")
            eventually(lambda: len(kube.all("pods")) == 5, within_s=60, what="the standby writes")
            assert pods < {each["metadata"]["uid"] for each in kube.all("pods")}
            time.sleep(max(0.0, HOLE_S - (time.time() - began)))
            proxies[holder].swallow.clear()
            operators[holder].start()
            time.sleep(SETTLE_S)
            kube.apply(replicas(2))
            eventually(lambda: len(kube.all("pods")) == 4, within_s=60, what="the standby goes on")

            writers = audit.writers()
            changes = sum(one != following for one, following in itertools.pairwise(writers))
            assert len(set(writers)) == 2
            assert changes <= election.transitions(), writers
        finally:
            for each in operators.values():
                each.close()
                print(each.log.read_text() if each.log.exists() else "")


def test_watches_work_again_after_a_network_black_hole(
    kube: Kube, prepared: tuple[Cluster, Path], tmp_path: Path
) -> None:
    cluster, folder = prepared
    base = running.environment(cluster, folder, namespaces=kube.namespace)
    with Proxy(api_address(base)).running() as proxy:
        environment = through(proxy, cluster, base, tmp_path / "proxied.config")
        operator = OperatorProcess(environment=environment, log=tmp_path / "operator.log")
        try:
            operator.start()
            kube.apply(pipeline())
            kube.wait_ready("duo")
            pods = {each["metadata"]["uid"] for each in kube.all("pods")}
            proxy.swallow.set()
            kube.apply(replicas(2))
            time.sleep(HOLE_S)
            assert operator.process is not None and operator.process.poll() is None
            proxy.swallow.clear()
            eventually(lambda: len(kube.all("pods")) == 4, within_s=120, what="the edit was heard")
            assert pods < {each["metadata"]["uid"] for each in kube.all("pods")}
        finally:
            operator.close()
            print(operator.log.read_text())
