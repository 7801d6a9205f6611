"""How loaded an instance is, as one of several coordinators knows it, and which of some instances is bound. Pure.

A coordinator knows its own bindings at once, and those of other coordinators only from the beats of the instances. If
it took a beat's numbers for the load, every coordinator would see the same idle instance and fill it until the next
beat. So

- a coordinator balances its *own* bindings: as many coordinators as do that put equally much on each instance;
- what an instance has beyond them is corrected by this coordinator's part of all requests, averaged over a few beats:
  four coordinators that see 8 requests too many each take 2 away, not 8.

`benchmarks/scale.py` and `tests/rules/test_balancing_rules.py` simulate it. Called by `rules.binding.membership_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Final, TypeVar

import msgspec

CROWDED: Final = 0.9  # of the blocks of a KV cache: beyond it, requests wait for room, or are computed again
CROWDED_WORTH: Final = 4.0  # requests: what an instance without a free block counts beside those that it has
WAITING_WEIGHT: Final = 1.0  # what waits counts so much more than what runs: it means that the instance is full
SMOOTHING: Final = 0.3  # of a beat in the average: long enough that a correction is seen before it is repeated
NEGLIGIBLE: Final = 0.01  # requests: what an average leaves long after the last one
PARTS_MOST: Final = 16.0  # a coordinator with hardly a request of its own still sees who is overloaded
SPILL_FACTOR: Final = 1.25  # how much more loaded a partner may be than another instance of its group ...
SPILL_REQUESTS: Final = 2.0  # ... and so many requests more
EARLY: Final = 0.75  # of the bindings of a group after which each of its instances has had one, were they taken in turn
LINK_WORTH: Final = 0.5  # requests: a partner with a link is preferred to one that is idler by no more than this


class Load(msgspec.Struct, kw_only=True):
    """The load of one instance."""

    incarnation: str
    waiting: int = 0  #: Requests that wait, by its last beat.
    running: int = 0
    bound: int = 0  #: Requests of this coordinator that are bound to it now.
    bound_total: int = 0  #: Bound to it in all.
    bound_at_beat: int = 0  #: ``bound`` at its last beat.
    others: float = 0.0  #: Correction for other coordinators' requests, in requests.
    score: float = 0.0  #: ``bound + others``: the lowest is bound.
    kv_blocks: float = 0.0  #: Blocks of its caches, by its last beat; 0: it has none.
    kv_used: float = 0.0  #: The part of them that requests use.
    turn: int = 0  #: When it was bound last; among equals, the one that waited longest is bound.

    @property
    def at_rest(self) -> bool:
        """Whether nothing changes when it reports the same as before: it has nothing, and had nothing then."""
        return not (self.bound or self.others or self.waiting or self.running or self.bound_at_beat or self.crowding)

    @property
    def crowding(self) -> float:
        """The requests that its lack of free blocks counts for: 0 to `CROWDED_WORTH`."""
        return CROWDED_WORTH * max(0.0, min(self.kv_used, 1.0) - CROWDED) / (1 - CROWDED)


class GroupLoad(msgspec.Struct):
    """Sums over the instances of one group."""

    reported: int = 0  #: Requests of all coordinators, by the last beats.
    bound_at_beat: int = 0  #: Requests of this coordinator, when these beats came.
    turn: int = 0  #: Bindings so far.

    @property
    def parts(self) -> float:
        """All requests divided by those of this coordinator: with four that are used evenly, 4."""
        return min(PARTS_MOST, max(1.0, self.reported / max(1, self.bound_at_beat)))

    def bind(self, load: Load) -> None:
        self.turn += 1
        load.turn = self.turn
        load.bound += 1
        load.bound_total += 1
        load.score += 1.0

    def early(self, load: Load, count: int) -> bool:
        """Whether it was bound so recently that it gets more than its share, of a group with ``count`` instances."""
        return self.turn - load.turn < EARLY * count

    def beat(self, load: Load, waiting: int, running: int) -> None:
        """An instance reports its requests, those of all coordinators."""
        self.reported += waiting + running - load.waiting - load.running
        self.bound_at_beat += load.bound - load.bound_at_beat
        load.waiting, load.running, load.bound_at_beat = waiting, running, load.bound
        beyond = max(0, waiting + running - load.bound) + WAITING_WEIGHT * waiting + load.crowding
        correction = beyond / self.parts
        load.others += SMOOTHING * (correction - load.others)
        if load.others < NEGLIGIBLE:
            load.others = 0.0
        load.score = load.bound + load.others

    def leave(self, load: Load) -> None:
        """The instance is gone."""
        self.reported -= load.waiting + load.running
        self.bound_at_beat -= load.bound_at_beat


def unbind(load: Load) -> None:
    """A request of this coordinator is over."""
    load.bound -= 1
    load.score -= 1.0


L = TypeVar("L", bound=Load)
_order = attrgetter("score", "turn")


def least(among: Sequence[L]) -> L:
    """The least loaded of these; among equals, the one that was bound least recently."""
    return among[0] if len(among) == 1 else min(among, key=_order)


def with_link(chosen: L, among: Sequence[L], linked: Collection[str]) -> L:
    """``chosen``, or one of ``among`` that has a link and is hardly more loaded."""
    most = chosen.score + LINK_WORTH
    return min((one for one in among if one.score <= most and one.incarnation in linked), key=_order, default=chosen)


def idle(among: Sequence[L], chance: Callable[[], float]) -> L | None:
    """One of these that is idle, so that no other is preferred: the better of two at random.

    None: all must be compared. chance: a number in [0, 1), at random.
    """
    count = len(among)
    if not count:
        return None
    one = among[int(chance() * count)]
    if count > 1:
        other = among[int(chance() * count)]
        if one.score > other.score or (one.score == other.score and one.turn > other.turn):
            one = other
    return one if is_idle(one) else None


def is_idle(one: Load) -> bool:
    """Whether no other is preferred to it."""
    return one.score <= LINK_WORTH


def overloaded(partner: Load, other: Load) -> bool:
    """Whether load requires that a request goes to ``other``, which is not a partner."""
    return partner.score > SPILL_FACTOR * other.score + SPILL_REQUESTS
