"""A stranger's pod and a pipeline's ports: with the NetworkPolicy nothing but HTTP answers, without it all ports do."""

from __future__ import annotations

import json

import pytest
from cluster_kit import REPOSITORY
from installing import Installed, read, wait_for, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

HELLO = (REPOSITORY / "examples" / "hello" / "pipeline.yaml").read_text()
ELSEWHERE = "omni-e2e-strangers"
HTTP, ADMIN, PROBES, PUBLISHER, CONTROL = 8000, 8001, 8081, 5549, 5550
KNOCK = """
import concurrent.futures, json, socket, sys

def opens(door):
    try:
        socket.create_connection(door, 2).close()
        return True
    except OSError:
        return False

doors = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(len(doors)) as pool:
    print(json.dumps([door for door, opened in zip(doors, pool.map(opens, map(tuple, doors))) if opened]))
"""


@pytest.fixture
def doors(installed: Installed) -> dict[str, list[tuple[str, int]]]:
    """What a pipeline that asks for no policy listens on: pod by pod. Also a namespace of strangers."""
    cluster = installed.cluster
    cluster.kubectl("-n", installed.namespace, "apply", "-f", "-", stdin=HELLO.replace("hello}", "guarded}"))
    cluster.kubectl("create", "namespace", ELSEWHERE)
    wait_ready(cluster, installed.namespace, "guarded")
    pods = read(cluster, "-n", installed.namespace, "pods", "-l", "omnipipeline.dev/pipeline=guarded")["items"]
    ports = (HTTP, ADMIN, PROBES, PUBLISHER, CONTROL)
    return {
        pod["metadata"]["labels"]["omnipipeline.dev/unit"]: [(pod["status"]["podIP"], port) for port in ports]
        for pod in pods
    }


def test_a_stranger_gets_in_everywhere_without_a_policy_and_only_to_http_with_one(
    installed: Installed, doors: dict[str, list[tuple[str, int]]]
) -> None:
    cluster, everything = installed.cluster, [door for each in doors.values() for door in each]
    namespaces = (installed.namespace, ELSEWHERE)
    http = [list(door) for door in doors["coordinator"] if door[1] == HTTP]
    listening = [list(door) for door in doors["coordinator"] if door[1] != ADMIN]  # that one is on the loopback
    listening += [list(door) for unit in ("front", "voice") for door in doors[unit] if door[1] in (PROBES, CONTROL)]
    try:
        for namespace in namespaces:
            assert sorted(_knock(installed, namespace, everything)) == sorted(listening)
        _patch(installed, {"networkPolicy": {"enabled": True}})
        wait_for("the policies", lambda: _policies(installed) == 2 or None, timeout_s=30)
        for namespace in namespaces:
            assert wait_for(
                "closed", lambda where=namespace: _knock(installed, where, everything) == http or None, timeout_s=30
            )
        _patch(installed, {"networkPolicy": {"enabled": True, "ingressFrom": [{"podSelector": {}}]}})
        wait_for(
            "closed to other namespaces", lambda: _knock(installed, ELSEWHERE, everything) == [] or None, timeout_s=30
        )
        assert _knock(installed, installed.namespace, everything) == http
    finally:
        cluster.kubectl("-n", installed.namespace, "delete", "omnipipeline", "guarded")
        cluster.kubectl("delete", "namespace", ELSEWHERE, "--timeout=60s")


def _knock(installed: Installed, namespace: str, doors: list[tuple[str, int]]) -> list[list[object]]:
    """The doors that open to a pod without labels there."""
    cluster, name = installed.cluster, "stranger"
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": name,
        "image": installed.images.operator,
        "command": ["python", "-c", KNOCK, json.dumps(doors)],
        "securityContext": security,
    }
    user = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "securityContext": user, "containers": [container]},
    }
    cluster.kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(pod))
    try:
        cluster.kubectl(
            "-n", namespace, "wait", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=55s"
        )
        opened: list[list[object]] = json.loads(cluster.kubectl("-n", namespace, "logs", name).stdout)
        return opened
    finally:
        cluster.kubectl("-n", namespace, "delete", "pod", name, "--grace-period=0", "--force")


def _patch(installed: Installed, spec: dict[str, object]) -> None:
    patch = json.dumps({"spec": spec})
    arguments = ["patch", "omnipipeline", "guarded", "--type=merge", f"--patch={patch}"]
    installed.cluster.kubectl("-n", installed.namespace, *arguments)


def _policies(installed: Installed) -> int:
    selector = "omnipipeline.dev/pipeline=guarded"
    return len(read(installed.cluster, "-n", installed.namespace, "networkpolicies", "-l", selector)["items"])
