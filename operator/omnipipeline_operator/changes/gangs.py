"""Pipelines that each hold a part of the GPUs that they need, and wait for the others': who lets go, and until when.

Here: one rule. Not here: which pods a pipeline has (`workloads`), carrying the verdict out. Pure. The scheduler places
pod by pod, so that of two pipelines each may get a half. They are in an order: whoever has failed less often, then the
older one. Of those that wait only the first keeps what it holds:

- One that holds GPUs, does not serve, and has had pods without a node for ``patience_s`` lets go when one before it
  waits. It may come back when there is room, or when a while has passed, twice as long each time; it does when none
  before it has pods without a node, or may come back.
- The first one lets go, too, and is behind the others then, when no other holds anything and it still has too few.
- One that has come back and finds too few lets go again, whether another one waits or not. One that never let go keeps
  what it holds while no other waits: a node may be on its way.

The order is total, and each acts on itself alone, so no two wait for each other and no two let go for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

REASON: Final = "GPUsYielded"
MOST_DOUBLINGS: Final = 6  # of the time until it comes back though no room is known


class Yielded(msgspec.Struct, frozen=True, kw_only=True):
    """That a pipeline has let go of its GPUs since it served last; kept in its status."""

    since: float | None  #: When it let go; None: it has come back.
    to: str = ""  #: The pipeline that waited for them; empty: none did.
    gpus: int = 0  #: How many all together held then: the cluster has no less.
    tries: int = 0  #: How often it has let go.
    failed: int = 0  #: How often of these nobody else was in its way.


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """The known facts of one pipeline."""

    name: str  #: With its namespace.
    created_at: float
    serves: bool = False
    needs: int = 0  #: GPUs of all its pods.
    held: int = 0  #: GPUs of its pods that have a node, those that end included.
    stuck_since: float | None = None  #: Since when a pod that wants GPUs has no node; None: each has one.
    yielded: Yielded | None = None

    @property
    def rank(self) -> tuple[int, float, str]:
        return (self.yielded.failed if self.yielded else 0, self.created_at, self.name)

    @property
    def is_away(self) -> bool:
        """Whether it has let go and not come back yet."""
        return self.yielded is not None and self.yielded.since is not None

    @property
    def waits(self) -> bool:
        return not self.serves and (self.is_away or self.stuck_since is not None)


def decide(own: Gang, others: Sequence[Gang], *, now: float, patience_s: float) -> Yielded | None:
    """The part of ``own`` to keep; with a ``since`` its pods that want GPUs get no node.

    others: those that want GPUs of the same kind.
    """
    if own.serves or not own.needs:
        return None
    rivals = sorted((one for one in others if one.waits), key=lambda one: one.rank)
    if own.yielded is not None and own.yielded.since is not None:
        ahead = [
            one
            for one in rivals
            if one.rank < own.rank and (not one.is_away or _may_return(one, others, now, patience_s))
        ]
        comes = not ahead and _may_return(own, others, now, patience_s)
        return msgspec.structs.replace(own.yielded, since=None) if comes else own.yielded
    if own.stuck_since is None or not own.held or now - own.stuck_since < patience_s:
        return own.yielded
    before = [one for one in rivals if one.rank < own.rank and not one.is_away]
    if before:
        return _yield(own, others, to=before[0].name, failed=False, now=now)
    alone = not any(one.held for one in rivals)
    if rivals and alone and now - own.stuck_since >= 2 * patience_s:
        return _yield(own, others, to=rivals[0].name, failed=True, now=now)
    if own.yielded is not None and alone:
        return _yield(own, others, to="", failed=True, now=now)
    return own.yielded


def next_at(own: Gang, *, now: float, patience_s: float) -> float | None:
    """When `decide` may decide otherwise though nothing happens to the pipeline itself; None: never."""
    if own.serves or not own.needs or not own.waits:
        return None
    due = now + patience_s / 10
    return due if own.is_away or own.stuck_since is None else max(due, own.stuck_since + patience_s)


def back_after_s(yielded: Yielded, patience_s: float) -> float:
    """How long it stays away where no room is known for it."""
    return float(patience_s * 2 ** min(yielded.tries, MOST_DOUBLINGS))


def _may_return(one: Gang, others: Sequence[Gang], now: float, patience_s: float) -> bool:
    """Whether one that is away has room, or may try whether it has."""
    assert one.yielded is not None and one.yielded.since is not None
    if one.held:
        return False
    kept = sum(each.held for each in others if not each.waits)  # those that wait let go of theirs
    room = one.yielded.gpus - kept
    return one.needs <= room or now - one.yielded.since >= back_after_s(one.yielded, patience_s)


def _yield(own: Gang, others: Sequence[Gang], *, to: str, failed: bool, now: float) -> Yielded:
    was = own.yielded or Yielded(since=None)
    return Yielded(
        since=now,
        to=to,
        gpus=own.held + sum(one.held for one in others),
        tries=was.tries + 1,
        failed=was.failed + failed,
    )
