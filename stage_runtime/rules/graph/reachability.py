"""The stages that a request may meet: those on a path from the entry to one of the terminals that it waits for. Pure.

A hook may route a request past any of them, so all paths count. None of these terminals can be reached from the other
stages: whatever they made of the request would be thrown away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from graphlib import TopologicalSorter

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules.graph import kvpairs


def stages(revision: PipelineRevision, terminals: Collection[str]) -> frozenset[str]:
    """The stages of ``revision`` that a request for ``terminals`` may meet; stream edges count as the others do."""
    targets: dict[str, set[str]] = {}
    sources: dict[str, set[str]] = {}
    for source, target, _ in kvpairs.without(revision.edges):
        targets.setdefault(source, set()).add(target)
        sources.setdefault(target, set()).add(source)
    return frozenset(_closure([revision.entry], targets) & _closure(terminals, sources) | {revision.entry})


def groups(revision: PipelineRevision, stages: Mapping[str, str]) -> dict[str, list[str]]:
    """The groups of these stages, from the entry on, each with the groups before it that send to it.

    stages: stage -> group.
    """
    sources: dict[str, list[str]] = {stage: [] for stage in stages}
    for source, target, _ in kvpairs.without(revision.edges):
        if source in sources and target in sources:
            sources[target].append(source)
    order: dict[str, list[str]] = {}
    for stage in TopologicalSorter(sources).static_order():
        group = stages[stage]
        if group not in order:
            its_own = [one for one, its_group in stages.items() if its_group == group]
            senders = {stages[source] for one in its_own for source in sources[one]}
            order[group] = [one for one in order if one in senders]
    return order


def _closure(start: Iterable[str], following: Mapping[str, set[str]]) -> set[str]:
    found = set(start)
    new = list(found)
    while new:
        fresh = following.get(new.pop(), set()) - found
        found |= fresh
        new += fresh
    return found
