"""ConfigMaps and Secrets that a pod template refers to and that must exist before its containers can start.

Here: finding them, with the place in the spec that names them. Not here: whether they exist
(`controller.observing.missing`). Called by `controller`. Claims, service accounts, priority and runtime classes are
left out: the scheduler and the API server report those themselves, and retry when they appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

#: Generated volumes -> the field of the spec that names their source. The control plane's key is the operator's own.
_VOLUMES: Final = {
    "code": "code.configMapRef",
    "api-key": "coordinator.http.apiKeySecretRef",
    "tls": "coordinator.http.tls.secretName",
}
_OWN: Final = ("plan", "revisions", "control")


class Reference(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One object of the pipeline's namespace."""

    kind: Literal["ConfigMap", "Secret"]
    name: str
    place: str  #: The field that refers to it, for messages.

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.place})"


def required(template: Mapping[str, Any]) -> list[Reference]:
    """References without which the kubelet never starts a container."""
    spec = template["spec"]
    found = set(_of_volumes(_items(spec.get("volumes"))))
    for container in (*_items(spec.get("initContainers")), *_items(spec.get("containers"))):
        found |= set(_of_environment(container))
    return sorted(found)


def pull_secrets(template: Mapping[str, Any]) -> list[Reference]:
    """Image pull secrets; a missing one matters only if the image cannot be pulled without it."""
    named = [each.get("name") for each in _items(template["spec"].get("imagePullSecrets"))]
    return [Reference(kind="Secret", name=str(name), place="imagePullSecrets") for name in named if name]


def _of_volumes(volumes: Iterable[Mapping[str, Any]]) -> Iterator[Reference]:
    for volume in volumes:
        name = str(volume.get("name"))
        if name in _OWN:
            continue
        place = _VOLUMES.get(name, f"volume {name}")
        yield from _one(volume.get("configMap"), "ConfigMap", "name", place)
        yield from _one(volume.get("secret"), "Secret", "secretName", place)
        for source in _items(_mapping(volume.get("projected")).get("sources")):
            yield from _one(source.get("configMap"), "ConfigMap", "name", place)
            yield from _one(source.get("secret"), "Secret", "name", place)


def _of_environment(container: Mapping[str, Any]) -> Iterator[Reference]:
    for index, source in enumerate(_items(container.get("envFrom"))):
        yield from _one(source.get("configMapRef"), "ConfigMap", "name", f"envFrom[{index}]")
        yield from _one(source.get("secretRef"), "Secret", "name", f"envFrom[{index}]")
    for variable in _items(container.get("env")):
        source = _mapping(variable.get("valueFrom"))
        place = f"env {variable.get('name')}"
        yield from _one(source.get("configMapKeyRef"), "ConfigMap", "name", place)
        yield from _one(source.get("secretKeyRef"), "Secret", "name", place)


def _items(value: Any) -> list[Mapping[str, Any]]:
    """The maps of a list; a podTemplate may hold anything else, which the API server refuses."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list | tuple) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _one(source: Any, kind: Literal["ConfigMap", "Secret"], key: str, place: str) -> Iterator[Reference]:
    name = _mapping(source).get(key)
    if isinstance(name, str) and name and not source.get("optional"):
        yield Reference(kind=kind, name=name, place=place)
