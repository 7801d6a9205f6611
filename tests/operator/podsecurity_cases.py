"""Pod templates that the restricted pod security standard refuses, each with its place, and some that it accepts.

Compared with the operator's own rule (`test_children`) and with the API server's admission (`test_cluster_admission`).
"""

from __future__ import annotations

from typing import Any

CONTEXT = "spec.containers[stage].securityContext"


def _pod(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def _stage(**fields: Any) -> dict[str, Any]:
    return _pod(containers=[{"name": "stage", **fields}])


def _context(**fields: Any) -> dict[str, Any]:
    return _stage(securityContext=fields)


#: (podTemplate, place of what is refused)
REFUSED: list[tuple[dict[str, Any], str]] = [
    (_pod(hostNetwork=True), "spec.hostNetwork"),
    (_pod(hostPID=True), "spec.hostPID"),
    (_pod(hostIPC=True), "spec.hostIPC"),
    (_pod(volumes=[{"name": "root", "hostPath": {"path": "/"}}]), "spec.volumes[root].hostPath"),
    (_pod(volumes=[{"name": "disk", "nfs": {"server": "a", "path": "/"}}]), "spec.volumes[disk].nfs"),
    (_pod(securityContext={"runAsUser": 0}), "spec.securityContext.runAsUser"),
    (_pod(securityContext={"runAsNonRoot": False}), "spec.securityContext.runAsNonRoot"),
    (_pod(securityContext={"seccompProfile": {"type": "Unconfined"}}), "spec.securityContext.seccompProfile"),
    (_pod(securityContext={"appArmorProfile": {"type": "Unconfined"}}), "spec.securityContext.appArmorProfile"),
    (_pod(securityContext={"seLinuxOptions": {"user": "root"}}), "spec.securityContext.seLinuxOptions"),
    (_pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}), "spec.securityContext.sysctls[0]"),
    (_context(privileged=True), f"{CONTEXT}.privileged"),
    (_context(allowPrivilegeEscalation=True), f"{CONTEXT}.allowPrivilegeEscalation"),
    (_context(runAsUser=0), f"{CONTEXT}.runAsUser"),
    (_context(runAsNonRoot=False), f"{CONTEXT}.runAsNonRoot"),
    (_context(seccompProfile={"type": "Unconfined"}), f"{CONTEXT}.seccompProfile"),
    (_context(capabilities={"add": ["SYS_ADMIN"]}), f"{CONTEXT}.capabilities.add"),
    (_context(capabilities={"drop": ["NET_RAW"]}), f"{CONTEXT}.capabilities.drop"),
    (_stage(ports=[{"containerPort": 9, "hostPort": 9}]), "spec.containers[stage].ports[2].hostPort"),
    (
        _stage(livenessProbe={"httpGet": {"host": "10.0.0.1"}}),
        "spec.containers[stage].livenessProbe.httpGet.host",
    ),
    (
        _pod(initContainers=[{"name": "first", "image": "x:1", "securityContext": {"runAsUser": 0}}]),
        "spec.initContainers[first].securityContext.runAsUser",
    ),
    (
        _pod(containers=[{"name": "more", "image": "x:1", "securityContext": {"capabilities": {"add": ["NET_RAW"]}}}]),
        "spec.containers[more].securityContext.capabilities.add",
    ),
    (_context(readOnlyRootFilesystem=False), f"{CONTEXT}.readOnlyRootFilesystem"),
]

#: Fields that the operator refuses beyond the standard.
OURS_ALONE = (f"{CONTEXT}.readOnlyRootFilesystem",)

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"metadata": {"annotations": {"team": "voice"}}},
    _pod(containers=[{"name": "more", "image": "x:1"}]),
    _pod(initContainers=[{"name": "first", "image": "x:1", "command": ["true"]}]),
    _pod(volumes=[{"name": "weights", "image": {"reference": "localhost/weights:1"}}]),
    _pod(volumes=[{"name": "scratch", "emptyDir": {}}, {"name": "c", "configMap": {"name": "c"}}]),
    _pod(securityContext={"fsGroup": 1000, "runAsUser": 1000}),
    _pod(securityContext={"sysctls": [{"name": "net.ipv4.tcp_keepalive_time", "value": "60"}]}),
    _context(capabilities={"add": ["NET_BIND_SERVICE"]}),
    _context(seccompProfile={"type": "Localhost", "localhostProfile": "p.json"}),
]
