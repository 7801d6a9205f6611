"""Which stages a request may meet: those on a path from the entry to one of the terminals that it waits for. Pure.

A hook may route a request past any of them, so all paths count. From the other stages none of these terminals can be
reached: whatever they made of the request would be thrown away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from omnipipeline_spec.types.plan import PipelineRevision


def stages(revision: PipelineRevision, terminals: Collection[str]) -> frozenset[str]:
    """The stages of ``revision`` that a request for ``terminals`` may meet; stream edges count as the others do."""
    targets: dict[str, set[str]] = {}
    sources: dict[str, set[str]] = {}
    for source, target, _ in revision.edges:
        targets.setdefault(source, set()).add(target)
        sources.setdefault(target, set()).add(source)
    return frozenset(_closure([revision.entry], targets) & _closure(terminals, sources) | {revision.entry})


def _closure(start: Iterable[str], following: Mapping[str, set[str]]) -> set[str]:
    found = set(start)
    new = list(found)
    while new:
        fresh = following.get(new.pop(), set()) - found
        found |= fresh
        new += fresh
    return found
