"""The instances, which of them may serve one request together, and which is chosen. Pure: the coordinator passes
events and loads in.

A request is bound to instances whose unit revisions stand together in one pipeline revision, and that declare the
edges which it has there. Only groups with stages that it may meet are needed (`reachability`); where no revision has
them all, only those that it certainly meets (`partial_binding`). New requests are shared among revisions in proportion
to their complete sets of ready instances. Inside a group the least loaded of a few gets it (`balancing`): of those that
are partners of the instances before it (`subsets`). A group of up to `subsets.SUBSET` instances is one subset. A
binding costs the same for any number of instances.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules import balancing, edges, kvpairs, partial_binding, reachability, subsets
from stage_runtime.rules.absences import UnitKind
from stage_runtime.rules.balancing import GroupLoad
from stage_runtime.rules.instances import GroupChoice, Instance, Needs, Partners, Sets, Unbindable, Wanted, host_of
from stage_runtime.rules.pools import Endpoints, Pool, Pools
from stage_runtime.wire.parts import Member

CHOICES_KEPT: Final = 256  # sets of terminals whose complete sets are remembered; an author's hook chooses them
OFFSETS: Final = 1 << 20  # far more than a group has instances
#: The share of an instance's bindings in which all partners are compared, and links count for nothing. So those that
#: joined later get their share, and a binding costs hardly more than without it.
COMPARED: Final = 1 / 16
NO_REVISION: Final = "(no pipeline revision known)"
WELL_LINKED: Final = 0.75  # of the partners: with so many links, requests are spread well enough without a comparison
LINKS_KEPT: Final = 16 * subsets.SUBSET  # of one instance, to instances that load or a change made its partners


class MembershipState:
    """All instances, by incarnation."""

    def __init__(self, revisions: Sequence[PipelineRevision], *, chance: Callable[[], float] = random.random) -> None:
        """chance: a number in [0, 1), at random: where the few instances that are compared begin."""
        self.revisions: tuple[PipelineRevision, ...] = ()  #: Newest last.
        self.instances: dict[str, Instance] = {}
        self._aside: frozenset[str] = frozenset()  #: Hosts.
        self._schemas: dict[str, dict[str, str]] = {}  #: pipeline revision -> group -> edge schema
        self._chance = chance
        self._offset = int(chance() * OFFSETS)  #: Where the turns of an entry group begin: not at one for all.
        self._eligible: Pools[UnitKind, Instance] = (
            Pools()
        )  #: By incarnation; `_place` keeps it equal to ``instances``.
        self._loads: dict[str, GroupLoad] = {}  #: By group.
        self._changes = 0  #: Of the pools.
        self._endpoints = Endpoints()
        self._complete: dict[Wanted, list[Sets]] = {}
        self._needs: dict[tuple[str, Wanted], Needs] = {}  #: By pipeline revision; of ``revisions``.
        self.update(revisions)

    def update(self, revisions: Sequence[PipelineRevision]) -> None:
        self.revisions = tuple(revisions)
        self._schemas = {one.revision: edges.of_revision(one) for one in revisions}
        self._complete.clear()
        self._needs.clear()

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
    ) -> tuple[PipelineRevision, dict[str, str]]:
        """Choose a revision and one instance of each group that the request may meet and that has any.

        avoid: incarnations not to use when another one is there (those that failed an earlier attempt).
        exclude: incarnations not to use at all.
        terminals: those that the request waits for; None: all. Stages that lead to none of them are left out.
        required: stages that a route of the request has led to.
        prefer: incarnations that served the session of the request before: they are used again while they are ready,
        and no other one has far less load.
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
        picked: list[Instance] = []
        shunned = frozenset(avoid)
        for choice in sets.choices:
            everyone = choice.pool.items
            if exclude:
                left = [one for one in everyone if one.incarnation not in exclude]
                instance = balancing.least(_without(left, shunned))
            elif len(everyone) <= subsets.SUBSET:
                instance = balancing.least(_without(everyone, shunned) if shunned else everyone)
            else:
                instance = self._choose(sets.choices, choice, picked, shunned)
            if prefer:
                instance = _kept(choice.pool, prefer - shunned - exclude, instance)
            choice.load.bind(instance)
            picked.append(instance)
        chosen = {choice.group: one.incarnation for choice, one in zip(sets.choices, picked, strict=True)}
        bindings = {stage: chosen[group] for stage, group in sets.stages.items()}
        for stage, group in sets.prefills.items():
            prefill = self._prefill(sets.revision, group, shunned | exclude)
            if prefill is not None:
                bindings[stage] = prefill.incarnation
        return sets.revision, bindings

    def _prefill(self, revision: PipelineRevision, group: str, without: Collection[str]) -> Instance | None:
        """The least loaded instance of a prefill group. None: there is none, and decode computes the prompt itself."""
        among = [one for one in self.serving(revision, group) if one.incarnation not in without]
        if not among:
            return None
        if len(among) > subsets.SUBSET:
            among = list(subsets.places(among, (int(self._chance() * len(among)), subsets.SUBSET)))
        instance = balancing.least(among)
        self._load(instance).bind(instance)
        return instance

    def unbind(self, bindings: Mapping[str, str]) -> None:
        """A request is over (or rebinds): its instances carry one less."""
        for incarnation in set(bindings.values()):
            instance = self.instances.get(incarnation)
            if instance is not None:
                balancing.unbind(instance)

    def beat(self, incarnation: str, waiting: int, running: int) -> None:
        instance = self.instances.get(incarnation)
        if instance is not None:
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
        self._changes += 1
        if self._eligible.put(member.incarnation, instance, kind):
            self._complete.clear()

    def _take_out(self, instance: Instance) -> None:
        self._changes += 1
        if self._eligible.put(instance.incarnation, instance, None):
            self._complete.clear()

    def _load(self, instance: Instance) -> GroupLoad:
        return self._loads.setdefault(instance.member.group, GroupLoad())

    def _choose(
        self, choices: Sequence[GroupChoice], choice: GroupChoice, picked: Sequence[Instance], shunned: Collection[str]
    ) -> Instance:
        """One of a large group: of the partners of the instances before it, unless load requires another."""
        everyone, chance = choice.pool.items, self._chance
        if not choice.sources:
            following = everyone[(choice.load.turn + self._offset) % len(everyone)]
            if not shunned and balancing.is_idle(following):
                return following
            few = subsets.places(everyone, (int(chance() * len(everyone)), subsets.SUBSET))
            return balancing.least(_without(few, shunned, everyone))
        source = picked[choice.sources[0]]
        partners = source.partners.get(choice.group) if len(choice.sources) == 1 else None
        if partners is None or partners.changes != self._changes or partners.pool is not choice.pool:
            partners = self._partners(choices, choice, picked)
        open_link = chance() < COMPARED
        if not open_link and not shunned:
            idle = balancing.idle(partners.linked, chance)
            if idle is not None:
                if partners.well_linked or not choice.load.early(idle, len(everyone)):
                    return idle
                open_link = True
        among = _without(partners.all, shunned, everyone) if shunned else partners.all
        chosen = balancing.least(among)
        if not open_link and chosen.incarnation not in source.linked:
            chosen = balancing.with_link(chosen, among, source.linked)
        anywhere = everyone[int(chance() * len(everyone))]
        if balancing.overloaded(chosen, anywhere) and anywhere.incarnation not in shunned:
            chosen = anywhere
        if chosen.incarnation not in source.linked:
            if len(source.linked) >= LINKS_KEPT:
                source.linked.clear()  # most are of instances that are gone
            source.linked.add(chosen.incarnation)
            source.partners.pop(choice.group, None)
        return chosen

    def _partners(self, choices: Sequence[GroupChoice], choice: GroupChoice, picked: Sequence[Instance]) -> Partners:
        """The partners of the instances that send to one of ``choice``."""
        targets = len(choice.pool)
        arcs = []
        for index in choice.sources:
            its = choices[index].pool
            arcs.append(subsets.arc(its.position(picked[index].incarnation), len(its), targets))
        everyone = subsets.places(choice.pool.items, arcs[0] if len(arcs) == 1 else subsets.common(arcs, targets))
        source = picked[choice.sources[0]]
        if len(arcs) == 1:
            self._forget_links(source, choice.pool, {one.incarnation for one in everyone})
        linked = [one for one in everyone if one.incarnation in source.linked]
        well_linked = len(linked) >= WELL_LINKED * len(everyone)
        partners = Partners(choice.pool, self._changes, everyone, linked, well_linked)
        if len(arcs) == 1:
            source.partners[choice.group] = partners
        return partners

    def _forget_links(self, source: Instance, pool: Pool[Instance], partners: Collection[str]) -> None:
        """Those of ``source`` to instances of ``pool`` that are not partners now, and to instances that are gone."""
        for name in source.linked.difference(partners):
            if name in pool or name not in self.instances:
                source.linked.discard(name)

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
        for sets in complete:
            sets.weight += sets.count
        chosen = max(complete, key=lambda sets: sets.weight)
        chosen.weight -= sum(sets.count for sets in complete)
        return chosen


def _needed(revision: PipelineRevision, terminals: Collection[str] | None) -> dict[str, str]:
    """stage -> group, of the stages that a request for ``terminals`` may meet."""
    if terminals is None:
        return kvpairs.served(revision)
    met = reachability.stages(revision, terminals)
    return {stage: group for stage, group in revision.stages.items() if stage in met}


def _known(complete: Iterable[Sets], prefer: AbstractSet[str]) -> Sets | None:
    """The first one with an instance that is preferred: a session stays with its revision while that stands."""
    if not prefer:
        return None
    return next((sets for sets in complete if any(name in one.pool for one in sets.choices for name in prefer)), None)


def _kept(pool: Pool[Instance], prefer: AbstractSet[str], chosen: Instance) -> Instance:
    """An instance of ``pool`` that is preferred, unless its load requires that the request goes to ``chosen``."""
    found = next((pool.items[pool.position(name)] for name in sorted(prefer) if name in pool), chosen)
    return chosen if balancing.overloaded(found, chosen) else found


def _left_by(exclude: AbstractSet[str], complete: Iterable[Sets]) -> tuple[list[Sets], dict[str, None]]:
    """Those that are complete without these instances, and the groups that the others lack."""
    left, lacking = [], dict[str, None]()
    for sets in complete:
        without = [one.group for one in sets.choices if all(each.incarnation in exclude for each in one.pool.items)]
        lacking.update(dict.fromkeys(without))
        if not without:
            left.append(sets)
    return left, lacking


def _without(instances: Sequence[Instance], shunned: Collection[str], *more: Sequence[Instance]) -> Sequence[Instance]:
    """Those of ``instances`` that are not shunned; else those of the first of ``more`` that has any; else all."""
    for some in (instances, *more) if shunned else ():
        left = [one for one in some if one.incarnation not in shunned]
        if left:
            return left
    return instances
