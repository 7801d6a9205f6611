"""The "restricted" pod security standard of Kubernetes 1.36, checked by the operator itself.

Here: what the standard refuses in a pod template, with its place; one more rule for the generated containers: their
root file system stays read-only. Not here: the generated templates, which satisfy it (`pods`), and the author's merge
(`templates`). Called by `pods` on a merged template, unless the operator allows privileges. A test sends the same
templates to a real API server.

Source: kubernetes.io, "Pod Security Standards", the baseline and restricted profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Final, TypeAlias

from omnipipeline_operator.errors import NotAllowed

Violation: TypeAlias = tuple[str, str]  #: (place inside the pod template, what is wrong with it)

_HOST_FIELDS: Final = ("hostNetwork", "hostPID", "hostIPC")
_VOLUMES: Final = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
_CAPABILITIES: Final = frozenset({"NET_BIND_SERVICE"})
_PROFILES: Final = frozenset({"RuntimeDefault", "Localhost"})
_SELINUX_TYPES: Final = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})
_SYSCTLS: Final = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)
_APPARMOR: Final = "container.apparmor.security.beta.kubernetes.io/"
_PROBES: Final = ("startupProbe", "livenessProbe", "readinessProbe")
_HOOKS: Final = ("postStart", "preStop")

#: Containers that an author adds get what the standard asks of each container.
ADDED_CONTAINER: Final[Mapping[str, Any]] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def refuse(template: Mapping[str, Any], path: str, *, generated: str) -> None:
    """Refuse a merged pod template that violates the standard.

    path:      what the author calls the template, for the message.
    generated: name of the operator's own container.
    Raises:    NotAllowed: names the first place.
    """
    for place, why in violations(template, generated=generated):
        raise NotAllowed(f"{path}.{place}", f"{why}; this operator does not allow it (allowPrivileged)")


def violations(template: Mapping[str, Any], *, generated: str) -> Iterator[Violation]:
    """All violations, first of the pod, then of its containers."""
    spec = _map(template.get("spec"))
    yield from _annotations(_map(_map(template.get("metadata")).get("annotations")))
    yield from _pod(spec)
    pod_context = _map(spec.get("securityContext"))
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(_maps(spec.get(kind))):
            where = f"spec.{kind}[{container.get('name', index)}]"
            yield from _container(container, where, pod_context)
            if container.get("name") == generated and kind == "containers":
                context = _map(container.get("securityContext"))
                if context.get("readOnlyRootFilesystem") is not True:
                    place = f"{where}.securityContext.readOnlyRootFilesystem"
                    yield place, "must stay true: mount an emptyDir where the stage writes"


def _annotations(annotations: Mapping[str, Any]) -> Iterator[Violation]:
    for name, value in annotations.items():
        if name.startswith(_APPARMOR) and value != "runtime/default" and not str(value).startswith("localhost/"):
            yield f"metadata.annotations[{name}]", f"is {value!r}, not runtime/default"


def _pod(spec: Mapping[str, Any]) -> Iterator[Violation]:
    for field in _HOST_FIELDS:
        if spec.get(field):
            yield f"spec.{field}", "shares a namespace of the host"
    for index, volume in enumerate(_maps(spec.get("volumes"))):
        for kind in sorted(set(volume) - {"name"} - _VOLUMES):
            yield f"spec.volumes[{volume.get('name', index)}].{kind}", "is a kind of volume that the standard forbids"
    context = _map(spec.get("securityContext"))
    where = "spec.securityContext"
    for index, sysctl in enumerate(_maps(context.get("sysctls"))):
        if not _is_among(sysctl.get("name"), _SYSCTLS):
            yield f"{where}.sysctls[{index}]", f"sets {sysctl.get('name')!r}, which is not a safe sysctl"
    yield from _context(context, where)


def _container(container: Mapping[str, Any], where: str, pod: Mapping[str, Any]) -> Iterator[Violation]:
    context = _map(container.get("securityContext"))
    inside = f"{where}.securityContext"
    yield from _context(context, inside)
    if context.get("privileged"):
        yield f"{inside}.privileged", "removes the container's sandbox"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{inside}.allowPrivilegeEscalation", "must be false"
    if context.get("procMount") not in (None, "", "Default"):
        yield f"{inside}.procMount", f"is {context['procMount']!r}, not Default"
    yield from _capabilities(_map(context.get("capabilities")), f"{inside}.capabilities")
    if context.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield f"{inside}.runAsNonRoot", "must be true here or for the pod"
    if _profile(context) is None and _profile(pod) is None:
        yield f"{inside}.seccompProfile", "must be RuntimeDefault or Localhost here or for the pod"
    for index, port in enumerate(_maps(container.get("ports"))):
        if port.get("hostPort"):
            yield f"{where}.ports[{index}].hostPort", "takes a port of the host"
    yield from _handlers(container, where)


def _context(context: Mapping[str, Any], where: str) -> Iterator[Violation]:
    """Fields that a pod's and a container's security context share."""
    checks: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("runAsNonRoot", lambda value: value is False, "must be true"),
        ("runAsUser", lambda value: value == 0, "is root"),
        ("seccompProfile", lambda value: _kind(value) not in _PROFILES, "must be RuntimeDefault or Localhost"),
        ("appArmorProfile", lambda value: _kind(value) not in _PROFILES, "must be RuntimeDefault or Localhost"),
        ("windowsOptions", lambda value: bool(_map(value).get("hostProcess")), "runs in the host"),
        ("seLinuxOptions", _loose_selinux, "may set a container type only"),
    )
    for field, is_bad, why in checks:
        if context.get(field) is not None and is_bad(context[field]):
            yield f"{where}.{field}", why


def _loose_selinux(options: Any) -> bool:
    given = _map(options)
    return bool(given.get("user") or given.get("role")) or not _is_among(given.get("type") or "", _SELINUX_TYPES)


def _capabilities(given: Mapping[str, Any], where: str) -> Iterator[Violation]:
    dropped, added = given.get("drop"), given.get("add")
    if not isinstance(dropped, list | tuple) or "ALL" not in dropped:
        yield f"{where}.drop", "must hold ALL"
    if added is not None and not isinstance(added, list | tuple):
        yield f"{where}.add", "must be a list"
        return
    for name in added or ():
        if not _is_among(name, _CAPABILITIES):
            yield f"{where}.add", f"adds {name!r}"


def _handlers(container: Mapping[str, Any], where: str) -> Iterator[Violation]:
    lifecycle = _map(container.get("lifecycle"))
    handlers = [(name, container.get(name)) for name in _PROBES]
    handlers += [(f"lifecycle.{name}", lifecycle.get(name)) for name in _HOOKS]
    for name, handler in handlers:
        for kind in ("httpGet", "tcpSocket"):
            if _map(_map(handler).get(kind)).get("host"):
                yield f"{where}.{name}.{kind}.host", "makes the kubelet call another host"


def _is_among(value: Any, allowed: Container[str]) -> bool:
    """Whether a value of any type is one of the allowed names."""
    return isinstance(value, str) and value in allowed


def _profile(context: Mapping[str, Any]) -> str | None:
    profile = context.get("seccompProfile")
    return _kind(profile) if profile is not None else None


def _kind(profile: Any) -> str | None:
    kind = _map(profile).get("type")
    return str(kind) if kind is not None else None


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (one for one in value if isinstance(one, Mapping)) if isinstance(value, list | tuple) else ()
