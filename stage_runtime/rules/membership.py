"""The instances, which of them may serve one request together, and which is chosen. Pure: the coordinator passes
events and loads in.

A request is bound to instances whose unit revisions stand together in one pipeline revision, and that declare the
edges which it has there. Only groups with stages that it may meet are needed (`reachability`). New requests are shared
among revisions in proportion to their complete sets of ready instances. Inside a group the least loaded instance gets
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules import edges, reachability
from stage_runtime.rules.pools import Endpoints, Pool, Pools
from stage_runtime.wire.messages import Member

CHOICES_KEPT: Final = 256  # sets of terminals whose complete sets are remembered; an author's hook chooses them


class Instance(msgspec.Struct):
    """One member as the coordinator sees it."""

    member: Member
    edges: str = ""  #: The schema of the edges that it declares (`rules.edges`).
    ready: bool = False
    draining: bool = False
    aside: bool = False  #: Somebody took its pod out of the unit, to look at it: it gets nothing new.
    waiting: int = 0  #: As its last beat said.
    running: int = 0
    bound: int = 0  #: Requests of this coordinator that are bound to it now.
    since_beat: int = 0  #: Bound since the last beat, which cannot know them.
    bound_total: int = 0  #: Bound to it in all.

    @property
    def eligible(self) -> bool:
        return self.ready and not self.draining and not self.aside

    @property
    def load(self) -> int:
        """Lower is better: what waits counts four times what is being computed."""
        return (self.waiting + self.since_beat) * 4 + self.running


class Sets(msgspec.Struct):
    """The complete sets of one revision, as long as none of its pools becomes empty."""

    revision: PipelineRevision
    stages: dict[str, str]  #: stage -> group, of those that the request may meet
    candidates: dict[str, Pool[str]]  #: group -> its eligible instances, by incarnation; only groups of these stages
    weight: float = 0.0  #: Of the smooth weighted round robin.

    @property
    def count(self) -> int:
        """Complete sets: the minimum over its groups."""
        return min(len(pool) for pool in self.candidates.values())


Kind: TypeAlias = tuple[str, str, str, str]  #: group, unit, unit revision, edge schema: what one may stand in for


class Unbindable(Exception):
    """No complete set of instances: ``groups`` have none that is ready."""

    def __init__(self, groups: Sequence[str]) -> None:
        super().__init__(f"no ready instance of {', '.join(groups)}")
        self.groups = tuple(groups)


def host_of(endpoint: str) -> str:
    """``tcp://10.0.0.7:5550`` → ``10.0.0.7``; a Unix socket has none."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0] if endpoint.startswith("tcp://") else ""
    return host.strip("[]")


class MembershipState:
    """All instances, by incarnation."""

    def __init__(self, revisions: Sequence[PipelineRevision]) -> None:
        self.revisions: tuple[PipelineRevision, ...] = ()  #: Newest last.
        self.instances: dict[str, Instance] = {}
        self._aside: frozenset[str] = frozenset()  #: Hosts.
        self._schemas: dict[str, dict[str, str]] = {}  #: pipeline revision -> group -> edge schema
        self._eligible: Pools[Kind, str] = Pools()  #: Incarnations; `_place` keeps it equal to ``instances``.
        self._endpoints = Endpoints()
        self._complete: dict[frozenset[str] | None, list[Sets]] = {}  #: By the terminals that are waited for.
        self.update(revisions)

    def update(self, revisions: Sequence[PipelineRevision]) -> None:
        self.revisions = tuple(revisions)
        self._schemas = {one.revision: edges.of_revision(one) for one in revisions}
        self._complete.clear()

    def join(self, member: Member, schema: str) -> list[str]:
        """Add or replace a member, which declares these edges.

        Returns: incarnations that this proves gone: another life at the same endpoint.
        """
        known = self.instances.get(member.incarnation)
        if known is None:
            aside = host_of(member.endpoint) in self._aside
            known = Instance(member, edges=schema, ready=member.ready, aside=aside)
            self.instances[member.incarnation] = known
        else:
            self._endpoints.discard(member.incarnation, known.member.endpoint)
            known.member, known.edges = member, schema
        self._endpoints.add(member.incarnation, member.endpoint)
        self._place(known)
        return self._endpoints.others(member.incarnation, member.endpoint)

    def ineligible_reason(self, instance: Instance) -> str | None:
        """Why nothing is ever bound to it, as things are; None: it may serve."""
        member = instance.member
        its_own = [one for one in self.revisions if one.units.get(member.unit) == member.revision]
        if not its_own:
            return f"unit revision {member.revision} of {member.unit!r} stands in no pipeline revision that is served"
        if any(self._schemas[one.revision].get(member.group) == instance.edges for one in its_own):
            return None
        names = ", ".join(one.revision for one in its_own)
        return f"declares other edges than {member.group!r} has in pipeline revision {names}"

    def leave(self, incarnation: str) -> Instance | None:
        instance = self.instances.pop(incarnation, None)
        if instance is not None:
            self._endpoints.discard(incarnation, instance.member.endpoint)
            self._take_out(incarnation)
        return instance

    def mark(self, incarnation: str, *, ready: bool | None = None, draining: bool | None = None) -> bool:
        """Note what an instance says of itself. False when it is not a member."""
        instance = self.instances.get(incarnation)
        if instance is None:
            return False
        instance.ready = instance.ready if ready is None else ready
        instance.draining = instance.draining if draining is None else draining
        self._place(instance)
        return True

    def set_aside(self, hosts: Iterable[str]) -> list[str]:
        """Bind nothing to the instances on these hosts; the incarnations for which that is new, either way."""
        self._aside = frozenset(hosts) - {""}  # a Unix socket has no host
        changed = []
        for incarnation, instance in self.instances.items():
            aside = host_of(instance.member.endpoint) in self._aside
            if aside != instance.aside:
                instance.aside = aside
                changed.append(incarnation)
                self._place(instance)
        return changed

    def bind(
        self, *, avoid: Iterable[str] = (), terminals: Collection[str] | None = None
    ) -> tuple[PipelineRevision, dict[str, str]]:
        """Choose a revision and one instance of each group that the request may meet.

        avoid: incarnations not to use when another one is there (those that failed an earlier attempt).
        terminals: those that the request waits for; None: all. Stages that lead to none of them are left out.
        Returns: the revision and stage -> incarnation.
        Raises:  Unbindable: no revision has a complete set; names what the newest lacks.
        """
        wanted = None if terminals is None else frozenset(terminals)
        complete = self._complete.get(wanted)
        if complete is None:
            if len(self._complete) >= CHOICES_KEPT:
                self._complete.clear()
            complete = self._complete[wanted] = self._complete_sets(wanted)
        sets = self._next_sets(complete)
        if sets is None:
            raise Unbindable(self.lacking(terminals=wanted))
        picked: dict[str, str] = {}
        for group, candidates in sets.candidates.items():
            instance = self.instances[candidates.items[0]]
            if len(candidates) > 1:
                shunned = set(avoid)
                instance = min(
                    (self.instances[one] for one in candidates),
                    key=lambda one: (one.member.incarnation in shunned, one.load, one.bound, one.bound_total),
                )
            instance.bound += 1
            instance.since_beat += 1
            instance.bound_total += 1
            picked[group] = instance.member.incarnation
        return sets.revision, {stage: picked[group] for stage, group in sets.stages.items()}

    def unbind(self, bindings: Mapping[str, str]) -> None:
        """A request is over (or rebinds): its instances carry one less."""
        for incarnation in set(bindings.values()):
            instance = self.instances.get(incarnation)
            if instance is not None:
                instance.bound -= 1

    def beat(self, incarnation: str, waiting: int, running: int) -> None:
        instance = self.instances.get(incarnation)
        if instance is not None:
            instance.waiting, instance.running, instance.since_beat = waiting, running, 0

    def complete(self, *, terminals: Collection[str] | None = None) -> bool:
        """Whether any revision has a complete set of ready instances; for a request that waits for ``terminals``."""
        return bool(self.revisions) and not self.lacking(any_revision=True, terminals=terminals)

    def lacking(self, *, any_revision: bool = False, terminals: Collection[str] | None = None) -> list[str]:
        """Groups without a ready instance: of the newest revision, or of the one that lacks fewest.

        terminals: only groups that a request for these may meet, and revisions that have them.
        """
        missing = [
            [
                group
                for group in dict.fromkeys(_needed(one, terminals).values())
                if self._eligible.get(self._kind(one, group)) is None
            ]
            for one in self._having(terminals)
        ]
        if not missing:
            return ["(no pipeline revision known)"]
        return min(missing, key=len) if any_revision else missing[-1]

    def _kind(self, revision: PipelineRevision, group: str) -> Kind:
        """What may serve ``group`` in ``revision``."""
        unit = revision.groups[group]
        return group, unit, revision.units[unit], self._schemas[revision.revision][group]

    def _place(self, instance: Instance) -> None:
        """Put the instance into the pool that it may serve from; nowhere while it is not eligible."""
        member = instance.member
        kind = (member.group, member.unit, member.revision, instance.edges) if instance.eligible else None
        if self._eligible.put(member.incarnation, kind):
            self._complete.clear()

    def _take_out(self, incarnation: str) -> None:
        if self._eligible.put(incarnation, None):
            self._complete.clear()

    def _having(self, terminals: Collection[str] | None) -> list[PipelineRevision]:
        """The revisions that have these terminals."""
        return [one for one in self.revisions if terminals is None or set(terminals) <= set(one.terminals)]

    def _complete_sets(self, terminals: Collection[str] | None) -> list[Sets]:
        """The revisions that can serve."""
        found = []
        for revision in self._having(terminals):
            stages = _needed(revision, terminals)
            pools = {group: self._eligible.get(self._kind(revision, group)) for group in stages.values()}
            candidates = {group: pool for group, pool in pools.items() if pool is not None}
            if pools and len(candidates) == len(pools):
                found.append(Sets(revision, stages, candidates))
        return found

    def _next_sets(self, complete: Sequence[Sets]) -> Sets | None:
        """Smooth weighted round robin, so that a share of 1 in 3 is every third request, not a burst."""
        if len(complete) < 2:
            return complete[0] if complete else None
        for sets in complete:
            sets.weight += sets.count
        chosen = max(complete, key=lambda sets: sets.weight)
        chosen.weight -= sum(sets.count for sets in complete)
        return chosen


def _needed(revision: PipelineRevision, terminals: Collection[str] | None) -> dict[str, str]:
    """stage -> group, of the stages that a request for ``terminals`` may meet."""
    if terminals is None:
        return revision.stages
    met = reachability.stages(revision, terminals)
    return {stage: group for stage, group in revision.stages.items() if stage in met}
