"""Merges the author's ``podTemplate`` over a generated pod template.

Here: the merge (containers, their env, ports and mounts, and volumes by name; all else as a JSON merge patch) and the
form of its result. Not here: the generated template (`pods`), what is not allowed (`podsecurity`). Called by
`pods`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omnipipeline_operator.errors import NotAllowed
from omnipipeline_spec.validation.podtemplates import KEYS

_HANDLERS: Final = frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"})


def merge(template: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``patch`` merged over ``template``; null removes a field. Neither argument is changed.

    Lists of `KEYS` are merged by a key of their items; other lists are replaced, as in a JSON merge patch. A probe and
    a lifecycle hook have one handler: another kind replaces ours.
    """
    replaced = _HANDLERS if _HANDLERS & patch.keys() else frozenset()
    merged = {key: value for key, value in template.items() if key not in replaced or key in patch}
    for key, value in patch.items():
        held = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = merge(held if isinstance(held, Mapping) else {}, value)
        elif key in KEYS and isinstance(held, list) and _all_keyed(value, KEYS[key]):
            merged[key] = _merge_items(held, value, KEYS[key])
        else:
            merged[key] = value
    return merged


def check_form(template: Mapping[str, Any], path: str, *, generated: str) -> None:
    """Refuse a value that is not a pod template, as far as the operator reads it; the API server checks the rest.

    generated: name of the operator's own container, which must be kept.
    Raises:    NotAllowed: names the first place.
    """
    metadata, spec = template.get("metadata"), template.get("spec")
    for place, given in (("metadata", metadata), ("spec", spec)):
        if not isinstance(given, Mapping):
            raise NotAllowed(f"{path}.{place}", "must be a map")
    assert isinstance(metadata, Mapping) and isinstance(spec, Mapping)
    for field in ("labels", "annotations"):
        if not isinstance(metadata.get(field, {}), Mapping):
            raise NotAllowed(f"{path}.metadata.{field}", "must be a map")
    for kind in ("initContainers", "containers"):
        _check_containers(spec.get(kind, []), f"{path}.spec.{kind}")
    if generated not in [container["name"] for container in spec.get("containers", [])]:
        raise NotAllowed(f"{path}.spec.containers", f"removes the container {generated!r}, which runs the pipeline")


def _check_containers(containers: Any, path: str) -> None:
    if not isinstance(containers, list):
        raise NotAllowed(path, "must be a list")
    for index, container in enumerate(containers):
        if not isinstance(container, Mapping) or not isinstance(container.get("name"), str):
            raise NotAllowed(f"{path}[{index}]", "must be a map with a name")
        resources = container.get("resources", {})
        if not isinstance(resources, Mapping) or not isinstance(resources.get("limits", {}), Mapping):
            raise NotAllowed(f"{path}[{container['name']}].resources", "must be a map of maps")
        if not isinstance(container.get("securityContext", {}), Mapping):
            raise NotAllowed(f"{path}[{container['name']}].securityContext", "must be a map")


def _all_keyed(items: Any, key: str) -> bool:
    return isinstance(items, list) and all(
        isinstance(item, Mapping) and isinstance(item.get(key), str | int) for item in items
    )


def _merge_items(held: Sequence[Mapping[str, Any]], patch: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    by_key = {item[key]: item for item in patch}
    merged = [merge(item, by_key.pop(item[key])) if item[key] in by_key else dict(item) for item in held]
    return [*merged, *(merge({}, item) for item in patch if item[key] in by_key)]
