"""Who is there, who may be bound together, and who is bound next. Pure: the coordinator brings events and loads.

A request is bound to instances whose unit revisions stand together in one pipeline revision, and that declare the
edges which it has there; new requests are shared among revisions in proportion to their complete sets of ready
instances. Inside a group the least loaded instance gets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from omnipipeline_spec.plan import PipelineRevision
from stage_runtime.rules import edges
from stage_runtime.wire.messages import Member


class Instance(msgspec.Struct):
    """One member as the coordinator sees it."""

    member: Member
    edges: str = ""  #: The schema of the edges that it declares (`rules.edges`).
    ready: bool = False
    draining: bool = False
    waiting: int = 0  #: As its last beat said.
    running: int = 0
    bound: int = 0  #: Requests of this coordinator that are bound to it now.
    since_beat: int = 0  #: Bound since the last beat, which cannot know them.
    served: int = 0  #: Bound to it in all.

    @property
    def eligible(self) -> bool:
        return self.ready and not self.draining

    @property
    def load(self) -> int:
        """Lower is better: what waits counts four times what is being computed."""
        return (self.waiting + self.since_beat) * 4 + self.running


class Sets(msgspec.Struct):
    """The complete sets of one revision, as long as nobody comes or goes."""

    revision: PipelineRevision
    candidates: dict[str, list[Instance]]  #: group -> its eligible instances
    count: int  #: Complete sets: the minimum over its groups.
    weight: float = 0.0  #: Of the smooth weighted round robin.


Kind: TypeAlias = tuple[str, str, str, str]  #: group, unit, unit revision, edge schema: what one may stand in for


class Unbindable(Exception):
    """No complete set of instances: ``groups`` have none that is ready."""

    def __init__(self, groups: Sequence[str]) -> None:
        super().__init__(f"no ready instance of {', '.join(groups)}")
        self.groups = tuple(groups)


class Membership:
    """All instances, by incarnation."""

    def __init__(self, revisions: Sequence[PipelineRevision]) -> None:
        self.revisions: tuple[PipelineRevision, ...] = ()  #: Newest last.
        self.instances: dict[str, Instance] = {}
        self._schemas: dict[str, dict[str, str]] = {}  #: pipeline revision -> group -> edge schema
        self._eligible: dict[Kind, list[Instance]] | None = None
        self._complete: list[Sets] | None = None
        self.update(revisions)

    def update(self, revisions: Sequence[PipelineRevision]) -> None:
        self.revisions = tuple(revisions)
        self._schemas = {one.revision: edges.of_revision(one) for one in revisions}
        self._changed()

    def join(self, member: Member, schema: str) -> list[str]:
        """Add or replace a member, which declares these edges.

        Returns: incarnations that this proves gone: another life at the same endpoint.
        """
        gone = [
            known
            for known, instance in self.instances.items()
            if instance.member.endpoint == member.endpoint and known != member.incarnation
        ]
        self._changed()
        known = self.instances.get(member.incarnation)
        if known is None:
            self.instances[member.incarnation] = Instance(member, edges=schema, ready=member.ready)
        else:
            known.member, known.edges = member, schema
        return gone

    def misfit(self, instance: Instance) -> str | None:
        """Why nothing is ever bound to it, as things are; None: it may serve."""
        member = instance.member
        its_own = [one for one in self.revisions if one.units.get(member.unit) == member.revision]
        if not its_own:
            return f"unit revision {member.revision} of {member.unit!r} stands in no pipeline revision that is served"
        if any(self._schemas[one.revision].get(member.group) == instance.edges for one in its_own):
            return None
        told = ", ".join(one.revision for one in its_own)
        return f"declares other edges than {member.group!r} has in pipeline revision {told}"

    def leave(self, incarnation: str) -> Instance | None:
        self._changed()
        return self.instances.pop(incarnation, None)

    def mark(self, incarnation: str, *, ready: bool | None = None, draining: bool | None = None) -> bool:
        """Note what an instance says of itself. False when it is not a member."""
        instance = self.instances.get(incarnation)
        if instance is None:
            return False
        self._changed()
        instance.ready = instance.ready if ready is None else ready
        instance.draining = instance.draining if draining is None else draining
        return True

    def bind(self, *, avoid: Iterable[str] = ()) -> tuple[PipelineRevision, dict[str, str]]:
        """Choose a revision and one instance per group.

        avoid: incarnations not to use when another one is there (those that failed an earlier attempt).
        Returns: the revision and stage -> incarnation.
        Raises:  Unbindable: no revision has a complete set; names what the newest lacks.
        """
        if self._complete is None:
            self._complete = self._complete_sets()
        sets = self._next_sets(self._complete)
        if sets is None:
            raise Unbindable(self.lacking())
        picked: dict[str, str] = {}
        for group, candidates in sets.candidates.items():
            instance = candidates[0]
            if len(candidates) > 1:
                shunned = set(avoid)
                instance = min(
                    candidates, key=lambda one: (one.member.incarnation in shunned, one.load, one.bound, one.served)
                )
            instance.bound += 1
            instance.since_beat += 1
            instance.served += 1
            picked[group] = instance.member.incarnation
        return sets.revision, {stage: picked[group] for stage, group in sets.revision.stages.items()}

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

    def complete(self) -> bool:
        """Whether any revision has a complete set of ready instances."""
        return bool(self.revisions) and not self.lacking(any_revision=True)

    def lacking(self, *, any_revision: bool = False) -> list[str]:
        """Groups without a ready instance: of the newest revision, or of the one that lacks fewest."""
        by_group = self.eligible()
        missing = [
            [group for group in one.groups if not by_group.get(self._kind(one, group))] for one in self.revisions
        ]
        if not missing:
            return ["(no pipeline revision known)"]
        return min(missing, key=len) if any_revision else missing[-1]

    def eligible(self) -> dict[Kind, list[Instance]]:
        """Ready, not draining."""
        if self._eligible is not None:
            return self._eligible
        found = self._eligible = {}
        for instance in self.instances.values():
            if instance.eligible:
                member = instance.member
                kind = (member.group, member.unit, member.revision, instance.edges)
                found.setdefault(kind, []).append(instance)
        return found

    def _kind(self, revision: PipelineRevision, group: str) -> Kind:
        """What may serve ``group`` in ``revision``."""
        unit = revision.groups[group]
        return group, unit, revision.units[unit], self._schemas[revision.revision][group]

    def _changed(self) -> None:
        self._eligible = self._complete = None

    def _complete_sets(self) -> list[Sets]:
        """The revisions that can serve."""
        by_group = self.eligible()
        found = []
        for revision in self.revisions:
            candidates = {group: by_group.get(self._kind(revision, group), []) for group in revision.groups}
            count = min((len(instances) for instances in candidates.values()), default=0)
            if count:
                found.append(Sets(revision, candidates, count))
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
