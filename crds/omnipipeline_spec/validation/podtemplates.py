"""Faults of ``podTemplate``: keys by which its lists are merged over the generated ones.

Here: which lists are merged by a key of their items, and the type of each key. Not here: the merge, and what a pod
template must have after it (the operator's `desired.pod_templates.templates`); all else is checked by the API server.
Called by `deployment` and by the operator's merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.canonical import join
from omnipipeline_spec.types.errors import Fault

#: Lists that are merged by a key of their items, at any depth; other lists are replaced.
KEYS: Final[Mapping[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "resourceClaims": "name",
    "claims": "name",
}
_NUMBERS: Final = frozenset({"containerPort"})


def faults(spec: PipelineConfig) -> Iterator[Fault]:
    """A fault for every key of another type than Kubernetes gives it: items could not be compared by it."""
    templates = [(f"processGroups[{at}]", group.pod_template) for at, group in enumerate(spec.process_groups)]
    for path, template in [*templates, ("coordinator", spec.coordinator.pod_template)]:
        yield from _keys(template, f"{path}.podTemplate")


def _keys(given: Any, path: str) -> Iterator[Fault]:
    if isinstance(given, Mapping):
        for field, value in given.items():
            where = join(path, str(field))
            if field in KEYS and isinstance(value, list | tuple):
                yield from _items(value, KEYS[field], where)
            yield from _keys(value, where)
    elif isinstance(given, list | tuple):
        for index, value in enumerate(given):
            yield from _keys(value, f"{path}[{index}]")


def _items(items: list[Any] | tuple[Any, ...], key: str, path: str) -> Iterator[Fault]:
    kind, expected = (int, "a whole number") if key in _NUMBERS else (str, "a string")
    for index, item in enumerate(items):
        value = item.get(key) if isinstance(item, Mapping) else None
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            yield Fault(path=f"{path}[{index}].{key}", message=f"must be {expected}")
