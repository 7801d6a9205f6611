"""One instance of each group of a complete set: the least loaded of a few, with the prefix and the session in mind.

Here: one choice after the other, and the links that it prefers. Not here: which groups a request needs and which
instances may serve (`membership_state`, which calls it). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from stage_runtime.rules.binding import balancing, prefixes, subsets
from stage_runtime.rules.binding.instances import GroupChoice, Instance, Partners
from stage_runtime.rules.binding.pools import Pool
from stage_runtime.rules.binding.prefixes import Hints

OFFSETS: Final = 1 << 20  # far more than a group has instances
#: The share of an instance's bindings in which all partners are compared, and links count for nothing. So those that
#: joined later get their share, and a binding costs hardly more than without it.
COMPARED: Final = 1 / 16
WELL_LINKED: Final = 0.75  # of the partners: with so many links, requests are spread well enough without a comparison
LINKS_KEPT: Final = 16 * subsets.SUBSET  # of one instance, to instances that load or a change made its partners


class Picker:
    """Picks for one membership. Its links stand in the instances."""

    def __init__(self, instances: Mapping[str, Instance], chance: Callable[[], float]) -> None:
        """instances: all that are known, by incarnation. chance: a number in [0, 1), at random."""
        self._instances = instances
        self._chance = chance
        #: The offset at which the turns of an entry group begin: not at one for all.
        self._offset = int(chance() * OFFSETS)
        self._changes = 0  #: Changes of the pools.

    def note_change(self) -> None:
        """A pool has changed: partners that were computed before are computed again."""
        self._changes += 1

    def pick(
        self,
        choices: Sequence[GroupChoice],
        *,
        shunned: AbstractSet[str],
        exclude: AbstractSet[str],
        prefer: AbstractSet[str],
        hints: Hints,
    ) -> list[Instance]:
        """One instance of each choice, in their order, each with one request more. See `MembershipState.bind`."""
        picked: list[Instance] = []
        for choice in choices:
            everyone = choice.pool.items
            if exclude:
                left = [one for one in everyone if one.incarnation not in exclude]
                instance = balancing.least(_without(left, shunned))
            elif len(everyone) <= subsets.SUBSET:
                instance = balancing.least(_without(everyone, shunned) if shunned else everyone)
            else:
                instance = self._choose(choices, choice, picked, shunned)
            if hints:
                instance = prefixes.kept(choice.pool, hints, shunned | exclude, instance)
            if prefer:
                instance = _kept(choice.pool, prefer - shunned - exclude, instance)
            choice.load.bind(instance)
            picked.append(instance)
        return picked

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
        """Forget links of ``source`` to instances of ``pool`` that are not partners now, or that are gone."""
        for name in source.linked.difference(partners):
            if name in pool or name not in self._instances:
                source.linked.discard(name)


def _kept(pool: Pool[Instance], prefer: AbstractSet[str], chosen: Instance) -> Instance:
    """An instance of ``pool`` that is preferred, unless its load requires that the request goes to ``chosen``."""
    found = next((pool.items[pool.position(name)] for name in sorted(prefer) if name in pool), chosen)
    return chosen if balancing.overloaded(found, chosen) else found


def _without(instances: Sequence[Instance], shunned: Collection[str], *more: Sequence[Instance]) -> Sequence[Instance]:
    """Those of ``instances`` that are not shunned; else those of the first of ``more`` that has any; else all."""
    for some in (instances, *more) if shunned else ():
        left = [one for one in some if one.incarnation not in shunned]
        if left:
            return left
    return instances
