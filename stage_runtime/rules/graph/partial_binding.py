"""The stages that a request is bound to while some have no ready instance. Pure.

A stage whose `routeFn` chooses may never send to one that is away, so the request is bound without it: it fails, or
waits for that stage, only when its route leads there. Everything else that a stage declares is used by every request
that reaches it: all its streams, all of ``next`` without a `routeFn`, all sources of a fan-in without a `waitForFn`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules.graph import kvpairs, reachability


def stages(
    revision: PipelineRevision,
    terminals: Collection[str],
    *,
    missing: Collection[str],
    required: Collection[str] = (),
) -> frozenset[str] | None:
    """The stages to bind a request for ``terminals`` to; None: it cannot do without one that is missing.

    missing:  stages that have no ready instance.
    required: stages that a route of the request has led to.
    """
    return _Graph(revision, terminals).without(frozenset(missing), required)


def certain(revision: PipelineRevision, terminals: Collection[str], required: Collection[str] = ()) -> frozenset[str]:
    """The stages without which a request for ``terminals`` cannot be bound, one by one."""
    graph = _Graph(revision, terminals)
    if not graph.met.intersection(revision.routing):
        return graph.met
    return frozenset(stage for stage in graph.met if graph.without(frozenset([stage]), required) is None)


def of_every_request(revision: PipelineRevision, *, chosen: bool) -> frozenset[str]:
    """The stages that every request needs. chosen: a request may wait for any of the terminals, not for all."""
    return frozenset.intersection(*(certain(revision, wanted) for wanted in choices(revision, chosen=chosen)))


def choices(revision: PipelineRevision, *, chosen: bool) -> Iterator[tuple[str, ...]]:
    """The smallest sets of terminals that a request may wait for."""
    if chosen:
        yield from ((terminal,) for terminal in revision.terminals)
    else:
        yield revision.terminals


class _Graph:
    """The stages that a request for some terminals may meet, and their edges."""

    def __init__(self, revision: PipelineRevision, terminals: Collection[str]) -> None:
        self.met = reachability.stages(revision, terminals)
        self._revision = revision
        self._needed = {revision.entry, *terminals}
        self._sources: dict[str, set[str]] = {stage: set() for stage in self.met}  #: Sources of payloads.
        self._targets: dict[str, set[str]] = {stage: set() for stage in self.met}  #: The same edges.
        self._streams: dict[str, set[str]] = {stage: set() for stage in self.met}  #: Targets of streams.
        for source, target, kind in kvpairs.without(revision.edges):
            if source in self.met and target in self.met:
                if kind == "stream":
                    self._streams[source].add(target)
                else:
                    self._targets[source].add(target)
                    self._sources[target].add(source)

    def without(self, missing: AbstractSet[str], required: Collection[str]) -> frozenset[str] | None:
        """The stages that remain without the ``missing`` ones; None: one of them is needed. See `stages`."""
        left: AbstractSet[str] = self.met - missing
        while True:
            reached = self._reached(left)
            fewer = {stage for stage in reached if self._does_without(stage, reached)}
            if len(fewer) == len(left):
                break
            left = fewer
        return frozenset(left) if left >= self._needed.union(self.met.intersection(required)) else None

    def _does_without(self, stage: str, there: AbstractSet[str]) -> bool:
        """Whether the stage needs none of its neighbours that are not ``there``."""
        targets = self._targets[stage]
        if not there >= self._streams[stage] or (stage in self._revision.joining and not there >= self._sources[stage]):
            return False
        if stage in self._revision.routing:
            return not targets or not targets.isdisjoint(there)
        return there >= targets

    def _reached(self, among: AbstractSet[str]) -> set[str]:
        found = {self._revision.entry} & among
        new = list(found)
        while new:
            stage = new.pop()
            fresh = {one for one in self._targets[stage] | self._streams[stage] if one in among} - found
            found |= fresh
            new += fresh
        return found
