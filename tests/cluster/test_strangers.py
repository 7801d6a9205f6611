"""A foreign pod and a pipeline's ports: with the NetworkPolicy only HTTP answers, without it all ports do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest

from tests.cluster.installing import Installed, wait_for, wait_ready
from tests.cluster_kit import REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

HELLO = (REPOSITORY / "examples" / "hello" / "pipeline.yaml").read_text()
ELSEWHERE = "omni-e2e-strangers"
HTTP, ADMIN, PROBES, PUBLISHER, CONTROL = 8000, 8001, 8081, 5549, 5550
LISTENING = """
import json

found = set()
for path in ("/proc/net/tcp", "/proc/net/tcp6"):
    with open(path) as table:
        for row in list(table)[1:]:
            _, local, _, state, *_ = row.split()
            address, port = local.split(":")
            if state == "0A" and address != "0100007F":  # listens, and not on the loopback
                found.add(int(port, 16))
print(json.dumps(sorted(found)))
"""
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
def doors(installed: Installed) -> Iterator[dict[str, list[tuple[str, int]]]]:
    """The ports of a pipeline, pod by pod, and the admin port. A foreign namespace is made, too."""
    cluster = installed.cluster
    cluster.kubectl("delete", "namespace", ELSEWHERE, "--ignore-not-found", "--timeout=60s")
    cluster.kubectl("create", "namespace", ELSEWHERE)
    try:
        installed.kubectl("apply", "-f", "-", stdin=HELLO.replace("hello}", "guarded}"))
        wait_ready(cluster, installed.namespace, "guarded")
        yield {
            pod["metadata"]["labels"]["omnipipeline.dev/unit"]: [
                (pod["status"]["podIP"], port) for port in {ADMIN, *_listening(installed, pod["metadata"]["name"])}
            ]
            for pod in installed.pods("guarded")
        }
    finally:
        installed.kubectl("delete", "omnipipeline", "guarded", "--ignore-not-found")
        cluster.kubectl("delete", "namespace", ELSEWHERE, "--timeout=60s")


def test_a_foreign_pod_reaches_only_http_unless_the_policy_is_switched_off(
    installed: Installed, doors: dict[str, list[tuple[str, int]]]
) -> None:
    everything = [door for each in doors.values() for door in each]
    namespaces = (installed.namespace, ELSEWHERE)
    http = [list(door) for door in doors["coordinator"] if door[1] == HTTP]
    listening = [list(door) for door in everything if door[1] != ADMIN]  # that one is on the loopback, if at all
    ports = {unit: {port for _, port in each} for unit, each in doors.items()}
    assert ports["coordinator"] >= {HTTP, PROBES, PUBLISHER, CONTROL}
    for unit in ("front", "voice"):  # the relay's port is any that was free
        assert ports[unit] >= {PROBES, CONTROL} and len(ports[unit] - {PROBES, CONTROL, ADMIN}) >= 1, ports
    assert _policies(installed) == 2, "the spec does not mention networkPolicy"
    for namespace in namespaces:
        assert _knock(installed, namespace, everything) == http
    installed.patch("guarded", {"networkPolicy": {"enabled": False}})
    wait_for("no policy", lambda: _policies(installed) == 0 or None, timeout_s=120)
    for namespace in namespaces:
        wait_for(
            "open",
            partial(lambda where: sorted(_knock(installed, where, everything)) == sorted(listening) or None, namespace),
            timeout_s=120,
        )
    installed.patch("guarded", {"networkPolicy": {"enabled": True, "ingressFrom": [{"podSelector": {}}]}})
    wait_for(
        "closed to other namespaces", lambda: _knock(installed, ELSEWHERE, everything) == [] or None, timeout_s=120
    )
    assert _knock(installed, installed.namespace, everything) == http


def _listening(installed: Installed, pod: str) -> list[int]:
    """Ports that a pod has open to others: known ones, and the relay's, which is any that was free."""
    found: list[int] = json.loads(installed.kubectl("exec", pod, "--", "python", "-c", LISTENING))
    return found


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


def _policies(installed: Installed) -> int:
    selector = "omnipipeline.dev/pipeline=guarded"
    return len(installed.all("networkpolicies", selector))
