"""Who is there, who may be bound together, and who is bound next. Pure: the coordinator brings events and loads.

A request is bound to instances whose unit revisions stand together in one pipeline revision; new requests are
shared among revisions in proportion to their complete sets of ready instances. Inside a group the least loaded
instance gets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from omnipipeline_spec.plan import PipelineRevision
from stage_runtime.wire.messages import Member


class Instance(msgspec.Struct):
    """One member as the coordinator sees it."""

    member: Member
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


class Unbindable(Exception):
    """No complete set of instances: ``groups`` have none that is ready."""

    def __init__(self, groups: Sequence[str]) -> None:
        super().__init__(f"no ready instance of {', '.join(groups)}")
        self.groups = tuple(groups)


class Membership:
    """All instances, by incarnation."""

    def __init__(self, revisions: Sequence[PipelineRevision]) -> None:
        self.revisions: tuple[PipelineRevision, ...] = tuple(revisions)  #: Newest last.
        self.instances: dict[str, Instance] = {}
        self._weights: dict[str, float] = {}  #: revision -> smooth weighted round-robin state
        self._eligible: dict[tuple[str, str, str], list[Instance]] | None = None  #: By (group, unit, revision).

    def update(self, revisions: Sequence[PipelineRevision]) -> None:
        self.revisions = tuple(revisions)
        self._eligible = None

    def join(self, member: Member) -> list[str]:
        """Add or replace a member. Returns incarnations that this proves gone: another life at the same endpoint."""
        gone = [
            known
            for known, instance in self.instances.items()
            if instance.member.endpoint == member.endpoint and known != member.incarnation
        ]
        self._eligible = None
        known = self.instances.get(member.incarnation)
        if known is None:
            self.instances[member.incarnation] = Instance(member, ready=member.ready)
        else:
            known.member = member
        return gone

    def leave(self, incarnation: str) -> Instance | None:
        self._eligible = None
        return self.instances.pop(incarnation, None)

    def mark(self, incarnation: str, *, ready: bool | None = None, draining: bool | None = None) -> bool:
        """Note what an instance says of itself. False when it is not a member."""
        instance = self.instances.get(incarnation)
        if instance is None:
            return False
        self._eligible = None
        instance.ready = instance.ready if ready is None else ready
        instance.draining = instance.draining if draining is None else draining
        return True

    def bind(self, *, avoid: Iterable[str] = ()) -> tuple[PipelineRevision, dict[str, str]]:
        """Choose a revision and one instance per group.

        avoid: incarnations not to use when another one is there (those that failed an earlier attempt).
        Returns: the revision and stage -> incarnation.
        Raises:  Unbindable: no revision has a complete set; names what the newest lacks.
        """
        shunned = set(avoid)
        by_group = self.eligible()
        sets = {
            revision.revision: min(
                (len(by_group.get((group, unit, revision.units[unit]), ())) for group, unit in revision.groups.items()),
                default=0,
            )
            for revision in self.revisions
        }
        chosen = self._next_revision(sets)
        if chosen is None:
            raise Unbindable(self.lacking())
        picked = {
            group: min(
                by_group[group, unit, chosen.units[unit]],
                key=lambda one: (one.member.incarnation in shunned, one.load, one.bound, one.served),
            )
            for group, unit in chosen.groups.items()
        }
        for instance in picked.values():
            instance.bound += 1
            instance.since_beat += 1
            instance.served += 1
        return chosen, {stage: picked[group].member.incarnation for stage, group in chosen.stages.items()}

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
            [group for group, unit in one.groups.items() if not by_group.get((group, unit, one.units[unit]))]
            for one in self.revisions
        ]
        if not missing:
            return ["(no pipeline revision known)"]
        return min(missing, key=len) if any_revision else missing[-1]

    def eligible(self) -> dict[tuple[str, str, str], list[Instance]]:
        """Ready, not draining; by (group, unit, unit revision)."""
        if self._eligible is not None:
            return self._eligible
        found = self._eligible = {}
        for instance in self.instances.values():
            if instance.eligible:
                member = instance.member
                found.setdefault((member.group, member.unit, member.revision), []).append(instance)
        return found

    def _next_revision(self, sets: Mapping[str, int]) -> PipelineRevision | None:
        """Smooth weighted round robin, so that a share of 1 in 3 is every third request, not a burst."""
        total = sum(sets.values())
        if total == 0:
            return None
        self._weights = {name: self._weights.get(name, 0.0) + count for name, count in sets.items() if count}
        name = max(self._weights, key=lambda one: self._weights[one])
        self._weights[name] -= total
        return next(one for one in self.revisions if one.revision == name)
