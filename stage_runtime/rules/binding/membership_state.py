"""The instances, which of them may serve one request together, and which is chosen. Pure: the coordinator passes
events and loads in.

A request is bound to instances whose unit revisions stand together in one pipeline revision, and that declare the
edges which it has there. Only groups with stages that it may meet are needed (`reachability`); where no revision has
them all, only those that it certainly meets (`partial_binding`). New requests are shared among revisions in proportion
to their complete sets of ready instances, unless one of them is tried (`canaries`). The least loaded of a few instances
in a group gets it (`picking`, `balancing`): of those that are partners of the instances before it (`subsets`). A group
of up to `subsets.SUBSET` instances is one subset. A binding costs the same for any number of instances.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from omnipipeline_spec.types.plan import CanaryShare, PipelineRevision
from stage_runtime.rules.binding import balancing, canaries, prefixes, subsets
from stage_runtime.rules.binding.balancing import GroupLoad
from stage_runtime.rules.binding.instances import GroupChoice, Instance, Needs, Sets, Unbindable, Wanted, host_of
from stage_runtime.rules.binding.picking import Picker
from stage_runtime.rules.binding.pools import Endpoints, Pools
from stage_runtime.rules.binding.prefixes import Hints
from stage_runtime.rules.graph import edges, kvpairs, partial_binding, reachability
from stage_runtime.rules.members.absences import UnitKind
from stage_runtime.wire.parts import Member

NO_HINTS: Final[Hints] = {}
CHOICES_KEPT: Final = 256  # sets of terminals whose complete sets are remembered; an author's hook chooses them
NO_REVISION: Final = "(no pipeline revision known)"


class MembershipState:
    """All instances, by incarnation."""

    def __init__(self, revisions: Sequence[PipelineRevision], *, chance: Callable[[], float] = random.random) -> None:
        """chance: a number in [0, 1), at random: where the few instances that are compared begin."""
        self.revisions: tuple[PipelineRevision, ...] = ()  #: Newest last.
        self.instances: dict[str, Instance] = {}
        self._aside: frozenset[str] = frozenset()  #: Hosts.
        self._canary: CanaryShare | None = None
        self._schemas: dict[str, dict[str, str]] = {}  #: pipeline revision -> group -> edge schema
        self._chance = chance
        self._picker = Picker(self.instances, chance)
        self._eligible: Pools[UnitKind, Instance] = (
            Pools()
        )  #: Instances by incarnation; `_place` keeps it equal to ``instances``.
        self._loads: dict[str, GroupLoad] = {}  #: Loads by group.
        self._caches_apart = False
        self._endpoints = Endpoints()
        self._complete: dict[Wanted, list[Sets]] = {}
        self._needs: dict[tuple[str, Wanted], Needs] = {}  #: Needs by pipeline revision, of ``revisions``.
        self.update(revisions)

    def update(self, revisions: Sequence[PipelineRevision]) -> None:
        self.revisions = tuple(revisions)
        self._schemas = {one.revision: edges.of_revision(one) for one in revisions}
        self._complete.clear()
        self._needs.clear()

    def share(self, canary: CanaryShare | None) -> None:
        """One revision gets this share of the requests; None: shares follow the complete sets of instances."""
        self._canary = canary
        self._complete.clear()

    def join(self, member: Member, schema: str) -> list[str]:
        """Add or replace a member, which declares these edges.

        Returns: incarnations that this proves gone: another life at the same endpoint.
        """
        known = self.instances.get(member.incarnation)
        if known is None:
            aside = host_of(member.endpoint) in self._aside
            known = Instance(
                incarnation=member.incarnation, member=member, edges=schema, ready=member.ready, aside=aside
            )
            self.instances[member.incarnation] = known
        else:
            self._endpoints.discard(member.incarnation, known.member.endpoint)
            known.member, known.edges = member, schema
        self._endpoints.add(member.incarnation, member.endpoint)
        self._place(known)
        return self._endpoints.others(member.incarnation, member.endpoint)

    @property
    def caches_apart(self) -> bool:
        """Whether two instances of one group keep prefixes: else it is the same where a prompt goes."""
        return self._caches_apart

    def caching(self, incarnation: str) -> bool:
        """Whether a prefix that it has met may be found there again."""
        instance = self.instances.get(incarnation)
        return instance is not None and instance.kv_blocks > 0

    def ineligible_reason(self, instance: Instance) -> str | None:
        """Why nothing is ever bound to it, as things are; None: it may serve."""
        member = instance.member
        its_own = [one for one in self.revisions if one.units.get(member.unit) == member.revision]
        if not its_own:
            return f"unit revision {member.revision} of {member.unit!r} is in no pipeline revision that is served"
        if any(self._schemas[one.revision].get(member.group) == instance.edges for one in its_own):
            return None
        names = ", ".join(one.revision for one in its_own)
        return f"declares other edges than {member.group!r} has in pipeline revision {names}"

    def leave(self, incarnation: str) -> Instance | None:
        instance = self.instances.pop(incarnation, None)
        if instance is not None:
            self._endpoints.discard(incarnation, instance.member.endpoint)
            self._take_out(instance)
            self._load(instance).leave(instance)
            if instance.kv_blocks > 0:
                self._note_caches()
        return instance

    def mark(self, incarnation: str, *, ready: bool | None = None, draining: bool | None = None) -> bool:
        """Note what an instance reports of itself. False when it is not a member."""
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
        self,
        *,
        avoid: Iterable[str] = (),
        exclude: AbstractSet[str] = frozenset(),
        terminals: Collection[str] | None = None,
        required: AbstractSet[str] = frozenset(),
        prefer: AbstractSet[str] = frozenset(),
        hints: Hints = NO_HINTS,
    ) -> tuple[PipelineRevision, dict[str, str]]:
        """Choose a revision and one instance of each group that the request may meet and that has any.

        avoid: incarnations not to use when another one is there (those that failed an earlier attempt).
        exclude: incarnations not to use at all.
        terminals: those that the request waits for; None: all. Stages that lead to none of them are left out.
        required: stages that a route of the request has led to.
        prefer: incarnations that served the session of the request before: they are used again while they are ready,
        and no other one has far less load.
        hints: incarnations that have met the beginning of its prompt, see `prefixes`. A preference goes before.
        Returns: the revision and stage -> incarnation; see `away`.
        Raises:  Unbindable: no revision has a complete set; names what the newest lacks.
        """
        wanted = Wanted(None if terminals is None else frozenset(terminals), frozenset(required))
        complete = self._complete.get(wanted)
        if complete is None:
            if len(self._complete) >= CHOICES_KEPT:
                self._complete.clear()
            complete = self._complete[wanted] = self._complete_sets(wanted)
        excluded: dict[str, None] = {}  #: Groups of which no other instance is there.
        if exclude:
            complete, excluded = _left_by(exclude, complete)
        sets = _known(complete, prefer) or self._next_sets(complete)
        if sets is None:
            raise Unbindable(self.lacking(terminals=terminals, required=required) or list(excluded))
        shunned = frozenset(avoid)
        picked = self._picker.pick(sets.choices, shunned=shunned, exclude=exclude, prefer=prefer, hints=hints)
        chosen = {choice.group: one.incarnation for choice, one in zip(sets.choices, picked, strict=True)}
        bindings = {stage: chosen[group] for stage, group in sets.stages.items()}
        for stage, group in sets.prefills.items():
            prefill = self._prefill(sets.revision, group, shunned | exclude, hints)
            if prefill is not None:
                bindings[stage] = prefill.incarnation
        return sets.revision, bindings

    def _prefill(
        self, revision: PipelineRevision, group: str, without: Collection[str], hints: Hints
    ) -> Instance | None:
        """The least loaded instance of a prefill group, or one that has the prefix. None: the group has no instance."""
        pool = self._eligible.get(self._kind(revision, group))
        if pool is None:
            return None
        among = [one for one in pool.items if one.incarnation not in without]
        if not among:
            return None
        if len(among) > subsets.SUBSET:
            among = list(subsets.places(among, (int(self._chance() * len(among)), subsets.SUBSET)))
        instance = prefixes.kept(pool, hints, without, balancing.least(among))
        self._load(instance).bind(instance)
        return instance

    def unbind(self, bindings: Mapping[str, str]) -> None:
        """A request is over (or rebinds): its instances carry one less."""
        for incarnation in set(bindings.values()):
            instance = self.instances.get(incarnation)
            if instance is not None:
                balancing.unbind(instance)

    def beat(
        self, incarnation: str, waiting: int, running: int, kv_blocks: float = 0.0, kv_blocks_used: float = 0.0
    ) -> None:
        """kv_blocks: of all its caches; kv_blocks_used: those that requests use."""
        instance = self.instances.get(incarnation)
        if instance is not None:
            if (kv_blocks > 0) != (instance.kv_blocks > 0):
                instance.kv_blocks = kv_blocks
                self._note_caches()
            instance.kv_blocks = kv_blocks
            instance.kv_used = kv_blocks_used / kv_blocks if kv_blocks > 0 else 0.0
            self._load(instance).beat(instance, waiting, running)

    def away(
        self, revision: PipelineRevision, bindings: Mapping[str, str], terminals: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """The stages that a request with these bindings may meet and has no instance of."""
        if len(bindings) == len(revision.stages):
            return ()
        wanted = Wanted(None if terminals is None else frozenset(terminals), frozenset())
        return tuple(stage for stage in self._needs_of(revision, wanted).met if stage not in bindings)

    def complete(self, *, terminals: Collection[str] | None = None) -> bool:
        """Whether any revision has an instance of all that a request for ``terminals`` may meet."""
        return any(not self.missing_of(one, _needed(one, terminals)) for one in self.having(terminals))

    def missing_groups(self) -> list[str]:
        """Groups without a ready instance, of the revision that has the fewest."""
        found = [self.missing_of(one, _needed(one, None)) for one in self.revisions]
        return [kind[0] for kind in min(found, key=len, default=[])] if found else [NO_REVISION]

    def lacking(
        self, *, terminals: Collection[str] | None = None, required: AbstractSet[str] = frozenset()
    ) -> list[str]:
        """Groups without a ready instance that such a request needs, of the newest revision that has the terminals."""
        missing = self.lacks(terminals, required)
        return [kind[0] for kind in missing[-1]] if missing else [NO_REVISION]

    def lacks(
        self, terminals: Collection[str] | None, required: AbstractSet[str] = frozenset()
    ) -> list[list[UnitKind]]:
        """The groups that a request needs and that have no instance: of each revision that has these terminals, newest
        last.
        """
        wanted = Wanted(None if terminals is None else frozenset(terminals), frozenset(required))
        return [self._lacks_of(one, wanted) for one in self.having(terminals)]

    def _lacks_of(self, revision: PipelineRevision, wanted: Wanted) -> list[UnitKind]:
        needs = self._needs_of(revision, wanted)
        certainly = self.missing_of(revision, needs.certain)
        if certainly or self._bindable(revision, needs, wanted) is not None:
            return certainly
        return self.missing_of(revision, needs.met)  # one of several is needed, and all are away

    def _bindable(self, revision: PipelineRevision, needs: Needs, wanted: Wanted) -> dict[str, str] | None:
        """stage -> group, of the stages that such a request can be bound to now; None: it cannot."""
        away = [stage for stage, group in needs.met.items() if self._is_missing(self._kind(revision, group))]
        if not away:
            return needs.met
        terminals = revision.terminals if wanted.terminals is None else wanted.terminals
        bound = partial_binding.stages(revision, terminals, missing=away, required=wanted.required)
        return None if bound is None else {stage: group for stage, group in needs.met.items() if stage in bound}

    def _needs_of(self, revision: PipelineRevision, wanted: Wanted) -> Needs:
        needs = self._needs.get((revision.revision, wanted))
        if needs is None:
            if len(self._needs) >= CHOICES_KEPT:
                self._needs.clear()
            terminals = revision.terminals if wanted.terminals is None else wanted.terminals
            certain = partial_binding.certain(revision, terminals, wanted.required)
            needs = Needs(_needed(revision, wanted.terminals), [stage for stage in revision.stages if stage in certain])
            self._needs[revision.revision, wanted] = needs
        return needs

    def missing_of(self, revision: PipelineRevision, stages: Iterable[str]) -> list[UnitKind]:
        """The groups of these stages that have no instance that takes requests."""
        kinds = (self._kind(revision, group) for group in dict.fromkeys(revision.stages[stage] for stage in stages))
        return [kind for kind in kinds if self._is_missing(kind)]

    def serving(self, revision: PipelineRevision, group: str) -> Sequence[Instance]:
        """The instances that take requests for ``group`` in ``revision``."""
        pool = self._eligible.get(self._kind(revision, group))
        return pool.items if pool is not None else ()

    def missing(self) -> set[UnitKind]:
        """The groups that have no instance that takes requests, of all revisions."""
        kinds = (self._kind(one, group) for one in self.revisions for group in set(kvpairs.served(one).values()))
        return {kind for kind in kinds if self._is_missing(kind)}

    def loading(self, kind: UnitKind) -> bool:
        """Whether an instance of this kind is registered, and not ready yet."""
        group, unit, revision, _ = kind
        return any(
            (one.member.group, one.member.unit, one.member.revision) == (group, unit, revision)
            for one in self.instances.values()
            if not one.ready and not one.draining
        )

    def having(self, terminals: Collection[str] | None) -> list[PipelineRevision]:
        """The revisions that have these terminals, newest last."""
        return [one for one in self.revisions if terminals is None or set(terminals) <= set(one.terminals)]

    def met(self, terminals: Collection[str] | None) -> dict[str, str]:
        """stage -> group, of what a request for these terminals may meet, in the newest revision that has them."""
        revision = next(reversed(self.having(terminals)), None)
        if revision is None:
            return {}
        met = self._needs_of(revision, Wanted(None if terminals is None else frozenset(terminals), frozenset())).met
        apart = kvpairs.prefills(revision)
        return met | {one: revision.stages[one] for one, peer in apart.items() if peer in met} if apart else met

    def _is_missing(self, kind: UnitKind) -> bool:
        return self._eligible.get(kind) is None

    def _kind(self, revision: PipelineRevision, group: str) -> UnitKind:
        """The kind of instance that may serve ``group`` in ``revision``."""
        unit = revision.groups[group]
        return group, unit, revision.units[unit], self._schemas[revision.revision][group]

    def _place(self, instance: Instance) -> None:
        """Put the instance into the pool that it may serve from; nowhere while it is not eligible."""
        member = instance.member
        kind = (member.group, member.unit, member.revision, instance.edges) if instance.eligible else None
        self._picker.note_change()
        if self._eligible.put(member.incarnation, instance, kind):
            self._complete.clear()

    def _take_out(self, instance: Instance) -> None:
        self._picker.note_change()
        if self._eligible.put(instance.incarnation, instance, None):
            self._complete.clear()

    def _note_caches(self) -> None:
        groups = [one.member.group for one in self.instances.values() if one.kv_blocks > 0]
        self._caches_apart = len(set(groups)) < len(groups)

    def _load(self, instance: Instance) -> GroupLoad:
        return self._loads.setdefault(instance.member.group, GroupLoad())

    def _complete_sets(self, wanted: Wanted) -> list[Sets]:
        """The revisions that can serve; one with stages that are away only where none has all."""
        whole = list[Sets]()
        partial = list[Sets]()
        for revision in self.having(wanted.terminals):
            needs = self._needs_of(revision, wanted)
            stages = self._bindable(revision, needs, wanted)
            if stages is None:
                continue
            choices: list[GroupChoice] = []
            order = reachability.groups(revision, stages)
            for group, senders in order.items():
                pool = self._eligible.get(self._kind(revision, group))
                if pool is not None:
                    load = self._loads.setdefault(group, GroupLoad())
                    sources = tuple(index for index, earlier in enumerate(order) if earlier in senders)
                    choices.append(GroupChoice(group, pool, load, sources))
            if choices and len(choices) == len(order):
                apart = {
                    one: revision.stages[one] for one, peer in kvpairs.prefills(revision).items() if peer in stages
                }
                found = whole if len(stages) == len(needs.met) else partial
                found.append(Sets(revision, stages, choices, apart))
        return whole or partial

    def _next_sets(self, complete: Sequence[Sets]) -> Sets | None:
        """Smooth weighted round robin, so that a share of 1 in 3 is every third request, not a burst."""
        if len(complete) < 2:
            return complete[0] if complete else None
        parts = canaries.shares([(sets.revision.revision, sets.count) for sets in complete], self._canary)
        taking = [(sets, share) for sets, share in zip(complete, parts, strict=True) if share]
        for sets, share in taking:
            sets.weight += share
        chosen = max((sets for sets, _ in taking), key=lambda sets: sets.weight)
        chosen.weight -= sum(parts)
        return chosen


def _needed(revision: PipelineRevision, terminals: Collection[str] | None) -> dict[str, str]:
    """stage -> group, of the stages that a request for ``terminals`` may meet."""
    if terminals is None:
        return kvpairs.served(revision)
    met = reachability.stages(revision, terminals)
    return {stage: group for stage, group in revision.stages.items() if stage in met}


def _known(complete: Iterable[Sets], prefer: AbstractSet[str]) -> Sets | None:
    """The first revision with a preferred instance: a session stays with its revision while that can serve."""
    if not prefer:
        return None
    return next((sets for sets in complete if any(name in one.pool for one in sets.choices for name in prefer)), None)


def _left_by(exclude: AbstractSet[str], complete: Iterable[Sets]) -> tuple[list[Sets], dict[str, None]]:
    """The revisions that are complete without these instances, and the groups that the other revisions lack."""
    left, lacking = [], dict[str, None]()
    for sets in complete:
        without = [one.group for one in sets.choices if all(each.incarnation in exclude for each in one.pool.items)]
        lacking.update(dict.fromkeys(without))
        if not without:
            left.append(sets)
    return left, lacking
