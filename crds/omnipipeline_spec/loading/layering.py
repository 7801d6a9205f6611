"""Merging of documents, with the source of each part of the result.

Here: merging a file over the defaults of a class, and the record of sources. Not here: reading either (`reading`),
``--set`` (`overrides`). Lists whose items all have a name are merged by name, as in the resource; any other list, also
an empty one, replaces the one below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from omnipipeline_spec.types.canonical import join

MAX_PLACE: Final = 256  # characters of a path; what lies below a longer one has no source of its own
#: Path in the merged document -> source of the value, as text.
Sources = dict[str, str]


def merge(base: Any, over: Any, sources: Sources, source_of: Callable[[str], str], place: str = "") -> Any:
    """``over`` merged over ``base``; records ``source_of(path)`` for each leaf that comes from ``over``."""
    return _merge(base, over, sources, source_of, place, place)


def record(value: Any, sources: Sources, source_of: Callable[[str], str], place: str, origin: str) -> None:
    """Record the source of all leaves of ``value``, which is at ``place`` and was at ``origin``."""
    children = list(_children(value)) if len(place) <= MAX_PLACE else []
    for step, child in children:
        record(child, sources, source_of, _step(place, step), _step(origin, step))
    if not children:
        sources[place] = source_of(origin)


def _merge(base: Any, over: Any, sources: Sources, source_of: Callable[[str], str], place: str, origin: str) -> Any:
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        merged = dict(base)
        for key, value in over.items():
            if value is None and key in base:
                continue  # a null entry counts as absent
            merged[key] = _merge(base.get(key), value, sources, source_of, join(place, key), join(origin, key))
        return merged
    if _is_named(base) and _is_named(over):
        items = list(base)
        index_of = {item["name"]: index for index, item in enumerate(items)}
        for index, item in enumerate(over):
            at = index_of.get(item["name"], len(items))
            if at == len(items):
                items.append({})
            items[at] = _merge(items[at], item, sources, source_of, f"{place}[{at}]", f"{origin}[{index}]")
        return items
    record(over, sources, source_of, place, origin)
    return over


def _is_named(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, Mapping) and isinstance(item.get("name"), str) for item in value)


def _children(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _step(place: str, step: str | int) -> str:
    return f"{place}[{step}]" if isinstance(step, int) else join(place, step)
