"""The order in which the mooncake relay reads gets. A read has a thread until its bytes are here, or it is late by
seconds: so reads of peers from which nothing comes do not count against the others.

No threads and no clock here. Used by `reading`, on the loop.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

STALL_S: Final = 1.0  # a peer that is read from, and of which nothing came for so long, is stalled


class ReadRoute(Protocol):
    """The facts that are known of a peer. Compared by identity."""

    moved_at: float  #: When something last came from it.


W = TypeVar("W", bound=ReadRoute)
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

    def add(self, route: W, get: G) -> None:
        self._due.setdefault(route, collections.deque()).append(get)

    def begin(self, now: float) -> list[tuple[W, G]]:
        """Those whose turn it is; from now on they count as being read, each until `over`."""
        begun = []
        while (found := self._next(now)) is not None:
            route, _ = found
            if not self._reads[route]:
                route.moved_at = now  # it was not read from: until now nothing could come
            self._reads[route] += 1
            begun.append(found)
        return begun

    def over(self, route: W) -> None:
        """One of its gets is read no more."""
        self._reads[route] -= 1
        if not self._reads[route]:
            del self._reads[route]

    def withdraw(self, which: Callable[[W, G], bool]) -> list[tuple[W, G]]:
        """Those that wait no more for a turn."""
        found = [(route, get) for route, due in self._due.items() for get in due if which(route, get)]
        for route, get in found:
            self._due[route].remove(get)
            if not self._due[route]:
                del self._due[route]
        return found

    def reads(self, route: W) -> int:
        """How many of its gets are read. While that is 0, nothing is awaited from the peer."""
        return self._reads[route]

    def _next(self, now: float) -> tuple[W, G] | None:
        stalled = {route for route in self._reads if now - route.moved_at > STALL_S}
        moving = sum(count for route, count in self._reads.items() if route not in stalled)
        if moving >= self._most_moving or self._reads.total() >= self._most:
            return None
        route = min((route for route in self._due if route not in stalled), key=self.reads, default=None)
        if route is None:
            return None
        due = self._due.pop(route)
        get = due.popleft()
        if due:
            self._due[route] = due
        return route, get
