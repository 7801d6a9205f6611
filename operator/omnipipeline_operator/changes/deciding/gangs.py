"""Pipelines that each hold a part of the GPUs that they need, and wait for the others': which lets go, and until when.

Here: one rule. Not here: which pods a pipeline has (`workloads`), carrying the verdict out. Pure. The scheduler places
pod by pod, so that of two pipelines each may get a half. They are in an order: those that failed less often first, then
older ones. The first of those that wait alone keeps what it holds:

- One that holds GPUs, does not serve, and has had pods without a node for ``patience_s`` lets go when one before it
  waits. It may come back when there is room, or when a while has passed, twice as long each time; it does when none
  before it has pods without a node, or may come back.
- The first one lets go, too, and is behind the others then, when no other holds anything and it still has too few.
- One that has come back and finds too few lets go again, whether another one waits or not. One that never let go keeps
  what it holds while no other waits: a node may be on its way.

The order is total, and each acts on itself alone, so no two wait for each other and no two let go for each other.

Priority is that of the pods, and comes before age. One of a higher priority that has no complete set of instances, and
has had a pod without a node for ``taking_s``, gets the GPUs of lower ones, of those that serve, too: of the lowest
first, then of those that do not serve, then of the youngest; of no more than it lacks, and of none where all that they
hold is too little. One that was given GPUs, and found them too few, fails: it is behind the others until it serves, so
that none lets go for it again. One that serves takes none.

Those that may sleep (all their units with GPUs have ``minReplicas: 0``) take turns. One that has served for
``patience_s`` lets go when another one, of no lower priority, has waited for so long and lacks no more than such ones
hold: the one that has served longest first, for the one that has waited longest. It waits again as soon as the other
one has the GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

REASON: Final = "GPUsYielded"
TAKEN: Final = "GPUsOnTheirWay"  # of the one for which others let go
MOST_DOUBLINGS: Final = 6  # of the time until it comes back though no room is known


class Yielded(msgspec.Struct, frozen=True, kw_only=True):
    """That a pipeline has let go of its GPUs since it served last; kept in its status."""

    since: float | None  #: When it let go; None: it has come back.
    to: str = ""  #: The pipeline that waited for them; empty: none did.
    gpus: int = 0  #: How many all together held then: the cluster has no less.
    tries: int = 0  #: How often it has let go.
    failed: int = 0  #: How often of these nobody else was in its way.
    given: int = 0  #: GPUs that it held when it let go for a pipeline of a higher priority; 0: for another one.
    priority: int = 0  #: Its own then: no pod has it while it is away.
    turn: bool = False  #: It let go because both may sleep and take turns; ``given`` is what it held.


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """The known facts of one pipeline."""

    name: str  #: The name with its namespace.
    created_at: float
    serves: bool = False
    needs: int = 0  #: GPUs of all its pods.
    held: int = 0  #: GPUs of its pods that have a node, those that end included.
    stuck_since: float | None = None  #: The time since which a pod that wants GPUs has no node; None: each has one.
    lacks: int = 0  #: GPUs of the units that have no pod with a node.
    priority: int = 0  #: The lowest of its pods that want GPUs.
    sleeps: bool = False  #: Whether each of its units that want GPUs may have none while no request needs it.
    serving_since: float | None = None  #: The time since which it has had its GPUs and served, if it does.
    yielded: Yielded | None = None

    @property
    def rank(self) -> tuple[int, int, float, str]:
        return (self.yielded.failed if self.yielded else 0, -self.priority, self.created_at, self.name)

    @property
    def is_away(self) -> bool:
        """Whether it has let go and not come back yet."""
        return self.yielded is not None and self.yielded.since is not None

    @property
    def waits(self) -> bool:
        return self.is_away or (not self.serves and self.stuck_since is not None)


def decide(own: Gang, others: Sequence[Gang], *, now: float, patience_s: float, taking_s: float) -> Yielded | None:
    """The part of ``own`` to keep; with a ``since`` its pods that want GPUs get no node.

    others:   those that want GPUs of the same kind.
    taking_s: how long a pipeline of a higher priority waits for GPUs before it is given others'.
    """
    if not own.needs or (own.serves and own.is_away and not own.held):
        return None
    if own.yielded is not None and own.yielded.since is not None and own.yielded.since > now:
        # The clock was set back: it would stay away until the clock is there again.
        own = msgspec.structs.replace(own, yielded=msgspec.structs.replace(own.yielded, since=now))
    rivals = sorted((one for one in others if one.waits), key=lambda one: one.rank)
    if own.yielded is not None and own.yielded.since is not None:
        ahead = [
            one
            for one in rivals
            if one.rank < own.rank and (not one.is_away or _may_return(one, others, now, patience_s))
        ]
        comes = (own.yielded.turn or not ahead) and _may_return(own, others, now, patience_s)
        return msgspec.structs.replace(own.yielded, since=None) if comes else own.yielded
    taker = _taker(own, others, now=now, patience_s=patience_s, taking_s=taking_s)
    if taker is not None:
        return _yield(own, others, to=taker.name, failed=False, now=now, given=own.held)
    if own.serves:
        after = _after(own, others, now=now, patience_s=patience_s)
        if after is None:
            return None
        return _yield(own, others, to=after.name, failed=False, now=now, given=own.held, turn=True)
    gifts = [one.yielded.since or now for one in givers(own.name, others) if one.yielded is not None]
    if own.stuck_since is None or not (own.held or gifts) or now - own.stuck_since < patience_s:
        return own.yielded
    before = [one for one in rivals if one.rank < own.rank and not one.is_away]
    if before and own.held:
        return _yield(own, others, to=before[0].name, failed=False, now=now)
    alone = not any(one.held for one in rivals)
    waited = now - max([own.stuck_since, *gifts])
    if rivals and alone and waited >= 2 * patience_s:
        return _yield(own, others, to=rivals[0].name, failed=True, now=now)
    # Another one comes after a turn, and pods of givers may still be ending.
    came_back = own.yielded is not None and not own.yielded.turn and not gifts
    if came_back and alone and own.held and waited >= patience_s:
        return _yield(own, others, to="", failed=True, now=now)
    return own.yielded


def givers(name: str, others: Sequence[Gang]) -> list[Gang]:
    """Those that have let go for this pipeline while they served, and have not come back."""
    return [one for one in others if one.yielded and one.is_away and one.yielded.given and one.yielded.to == name]


def takes(own: Gang) -> bool:
    """Whether it is to get GPUs of pipelines of a lower priority, where there are any."""
    return own.waits and not own.is_away and own.lacks > 0


def _taker(own: Gang, others: Sequence[Gang], *, now: float, patience_s: float, taking_s: float) -> Gang | None:
    """The pipeline of a higher priority that gets what ``own`` holds."""
    everyone = (own, *others)
    holding = sorted((one for one in everyone if one.held and not one.is_away), key=lambda one: one.rank, reverse=True)
    holding.sort(key=lambda one: (one.priority, one.serves))
    waiting = (one for one in others if takes(one) and now - (one.stuck_since or now) >= taking_s)
    spoken_for: set[str] = set()
    for taker in sorted(waiting, key=lambda one: one.rank):
        lacks = taker.lacks - sum(_promised(one, now, patience_s) for one in givers(taker.name, everyone))
        lower = [
            one
            for one in holding
            if one.priority < taker.priority and taker.rank < one.rank and one.name not in spoken_for
        ]
        chosen = _fewest(lower, lacks)
        if own in chosen:
            return taker
        spoken_for |= {one.name for one in chosen}
    return None


def _after(own: Gang, others: Sequence[Gang], *, now: float, patience_s: float) -> Gang | None:
    """The pipeline whose turn it is, where it needs the GPUs of ``own``, which has had its own turn."""
    everyone = (own, *others)

    def patience_of(one: Gang) -> float:
        """Longer where it has failed: it may find no place again."""
        failed = one.yielded.failed if one.yielded is not None else 0
        return float(patience_s * 2 ** min(failed, MOST_DOUBLINGS))

    had = [
        one
        for one in everyone
        if one.sleeps and one.serves and one.held and now - (one.serving_since or now) >= patience_s
    ]
    waiting = (
        one for one in others if one.sleeps and takes(one) and now - (one.stuck_since or now) >= patience_of(one)
    )
    spoken_for: set[str] = set()
    for after in sorted(waiting, key=lambda one: (one.stuck_since or now, one.name)):
        lacks = after.lacks - sum(_promised(one, now, patience_s) for one in givers(after.name, everyone))
        if after.yielded is not None:  # what is free of those that were held when it let go itself
            lacks -= max(after.yielded.gpus - sum(one.held for one in everyone), 0)
        lower = [one for one in had if one.priority <= after.priority and one.name not in spoken_for]
        lower.sort(key=lambda one: (one.priority, one.serving_since or now, one.name))
        chosen = _fewest(lower, lacks)
        if own in chosen:
            return after
        spoken_for |= {one.name for one in chosen}
    return None


def _fewest(lower: Sequence[Gang], lacks: int) -> list[Gang]:
    """The first of them that hold so many GPUs together, without those that are not needed; none: all hold less."""
    chosen: list[Gang] = []
    held = 0
    for one in lower:
        if held >= lacks:
            break
        chosen.append(one)
        held += one.held
    if held < lacks:
        return []
    for one in tuple(chosen):
        if held - one.held >= lacks:
            chosen.remove(one)
            held -= one.held
    return chosen


def _promised(giver: Gang, now: float, patience_s: float) -> int:
    """GPUs that are on their way from one that has let go; after a while the scheduler has placed them."""
    yielded = giver.yielded
    if yielded is None or yielded.since is None:
        return 0
    return yielded.given if giver.held or now - yielded.since < patience_s else 0


def next_at(own: Gang, *, now: float, patience_s: float, taking_s: float) -> float | None:
    """When `decide` may decide otherwise though nothing happens to the pipeline itself; None: never."""
    if not own.needs or not own.waits:
        return None
    due = now + patience_s / 10
    if own.is_away or own.stuck_since is None:
        return due
    due = max(due, own.stuck_since + patience_s)
    return min(due, max(now + taking_s / 4, own.stuck_since + taking_s)) if takes(own) else due


def back_after_s(yielded: Yielded, patience_s: float) -> float:
    """How long it stays away where no room is known for it."""
    return float(patience_s * 2 ** min(yielded.tries, MOST_DOUBLINGS))


def _may_return(one: Gang, others: Sequence[Gang], now: float, patience_s: float) -> bool:
    """Whether one that is away has room, or may try whether it has."""
    assert one.yielded is not None and one.yielded.since is not None
    if one.held:
        return False
    if one.yielded.turn:
        return not any(takes(each) for each in others if each.name == one.yielded.to)
    kept = sum(each.held for each in others if not each.waits)  # those that wait let go of theirs
    room = one.yielded.gpus - kept
    return one.needs <= room or now - one.yielded.since >= back_after_s(one.yielded, patience_s)


def _yield(
    own: Gang, others: Sequence[Gang], *, to: str, failed: bool, now: float, given: int = 0, turn: bool = False
) -> Yielded:
    was = own.yielded or Yielded(since=None)
    return Yielded(
        since=now,
        to=to,
        gpus=own.held + sum(one.held for one in others),
        tries=was.tries + 1,
        failed=was.failed + failed,
        given=given,
        priority=own.priority,
        turn=turn,
    )
