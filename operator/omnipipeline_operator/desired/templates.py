"""The author's ``podTemplate`` laid over a generated pod template.

Here: the merge (containers, their env, ports and mounts, and volumes by name; all else as a JSON merge patch) and what
may not be asked for. Not here: the generated template (`pods`). Called by `pods`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omnipipeline_operator.errors import Refused

#: Lists whose items have a key; the others are replaced as a whole, as a JSON merge patch does.
_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ports": "containerPort",
}
_HOST_FIELDS: Final = ("hostNetwork", "hostPID", "hostIPC")


def merge(template: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``patch`` over ``template``; null removes. Neither is changed."""
    merged = dict(template)
    for key, value in patch.items():
        held = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = merge(held if isinstance(held, Mapping) else {}, value)
        elif key in _KEYS and isinstance(held, list) and _all_keyed(value, _KEYS[key]):
            merged[key] = _merge_items(held, value, _KEYS[key])
        else:
            merged[key] = value
    return merged


def refuse_privileges(patch: Mapping[str, Any], path: str) -> None:
    """Raises: Refused: the patch would let the pod out of its sandbox; the first place is named."""
    spec = patch.get("spec")
    if not isinstance(spec, Mapping):
        return
    for field in _HOST_FIELDS:
        if spec.get(field):
            raise Refused(f"{path}.spec.{field}", "is not allowed by this operator (allowPrivileged)")
    for place in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(place) or ()):
            context = container.get("securityContext") if isinstance(container, Mapping) else None
            if isinstance(context, Mapping) and context.get("privileged"):
                where = f"{path}.spec.{place}[{index}].securityContext.privileged"
                raise Refused(where, "is not allowed by this operator (allowPrivileged)")
    for index, volume in enumerate(spec.get("volumes") or ()):
        if isinstance(volume, Mapping) and volume.get("hostPath"):
            raise Refused(f"{path}.spec.volumes[{index}].hostPath", "is not allowed by this operator (allowPrivileged)")


def _all_keyed(items: Any, key: str) -> bool:
    return isinstance(items, list) and all(isinstance(item, Mapping) and key in item for item in items)


def _merge_items(held: Sequence[Mapping[str, Any]], patch: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    by_key = {item[key]: item for item in patch}
    merged = [merge(item, by_key.pop(item[key])) if item[key] in by_key else dict(item) for item in held]
    return [*merged, *(merge({}, item) for item in patch if item[key] in by_key)]
