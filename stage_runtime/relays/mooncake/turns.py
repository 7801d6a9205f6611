"""Which get the mooncake relay reads next. A read has a thread until its bytes are here, or it is late by seconds: so
reads of peers from which nothing comes do not count against the others.

No threads and no clock here. Used by `reading`, on the loop.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

STALL_S: Final = 1.0  # a peer that is read from, and of which nothing came for so long, is stalled


class Way(Protocol):
    """What is to be known of a peer. Compared by identity."""

    moved_at: float  #: When something last came from it.


W = TypeVar("W", bound=Way)
G = TypeVar("G")


class Turns(Generic[W, G]):
    """Gets that wait for a thread, by peer, and how many are read."""

    def __init__(self, *, moving: int, most: int) -> None:
        """moving: how many are read at once, without those of stalled peers. most: with them."""
        self._most_moving = moving
        self._most = most
        self._due: dict[W, collections.deque[G]] = {}  #: The peer that had a turn last is the last one.
        self._reads: collections.Counter[W] = collections.Counter()

    def __bool__(self) -> bool:
        """Whether a get waits."""
        return bool(self._due)

    def add(self, way: W, get: G) -> None:
        self._due.setdefault(way, collections.deque()).append(get)

    def begin(self, now: float) -> list[tuple[W, G]]:
        """Those whose turn it is; from now on they count as being read, each until `over`."""
        begun = []
        while (found := self._next(now)) is not None:
            way, _ = found
            if not self._reads[way]:
                way.moved_at = now  # it was not read from: until now nothing could come
            self._reads[way] += 1
            begun.append(found)
        return begun

    def over(self, way: W) -> None:
        """One of its gets is read no more."""
        self._reads[way] -= 1
        if not self._reads[way]:
            del self._reads[way]

    def withdraw(self, which: Callable[[W, G], bool]) -> list[tuple[W, G]]:
        """Those that wait no more for a turn."""
        found = [(way, get) for way, due in self._due.items() for get in due if which(way, get)]
        for way, get in found:
            self._due[way].remove(get)
            if not self._due[way]:
                del self._due[way]
        return found

    def reads(self, way: W) -> int:
        """How many of its gets are read. While that is 0, nothing is awaited from the peer."""
        return self._reads[way]

    def _next(self, now: float) -> tuple[W, G] | None:
        stalled = {way for way in self._reads if now - way.moved_at > STALL_S}
        moving = sum(count for way, count in self._reads.items() if way not in stalled)
        if moving >= self._most_moving or self._reads.total() >= self._most:
            return None
        way = min((way for way in self._due if way not in stalled), key=self.reads, default=None)
        if way is None:
            return None
        due = self._due.pop(way)
        get = due.popleft()
        if due:
            self._due[way] = due
        return way, get
