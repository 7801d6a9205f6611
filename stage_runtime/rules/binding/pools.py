"""Eligible instances in pools that change one at a time: a join, a departure or a mark costs the same at any size.

Here: which instance is in which pool and where, and which incarnations share an endpoint. Not here: which one is
chosen (`membership_state`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Kind = TypeVar("Kind", bound=Hashable)


class Pool(Generic[Item]):
    """Items in the order of their names, which is the same at every coordinator."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.items: list[Item] = []  #: Items in the same order.

    def add(self, name: str, item: Item) -> None:
        place = self.position(name)
        if self._is_at(place, name):
            self.items[place] = item
        else:
            self.names.insert(place, name)
            self.items.insert(place, item)

    def discard(self, name: str) -> None:
        place = self.position(name)
        if self._is_at(place, name):
            del self.names[place], self.items[place]

    def position(self, name: str) -> int:
        """Its position, or where it would be inserted."""
        return bisect_left(self.names, name)

    def __contains__(self, name: str) -> bool:
        return self._is_at(self.position(name), name)

    def __len__(self) -> int:
        return len(self.items)

    def _is_at(self, place: int, name: str) -> bool:
        return place < len(self.names) and self.names[place] == name


class Pools(Generic[Kind, Item]):
    """Each item is in one pool at most. A pool object stays the same while it is not empty."""

    def __init__(self) -> None:
        self._pools: dict[Kind, Pool[Item]] = {}
        self._kinds: dict[str, Kind] = {}

    def put(self, name: str, item: Item, kind: Kind | None) -> bool:
        """Move the item to the pool of ``kind``; None: to no pool. True when a pool began or ended."""
        before = self._kinds.get(name)
        if before == kind:
            return False
        changed = False
        if before is not None:
            pool = self._pools[before]
            pool.discard(name)
            del self._kinds[name]
            if not pool:
                del self._pools[before]
                changed = True
        if kind is not None:
            changed = changed or kind not in self._pools
            self._pools.setdefault(kind, Pool()).add(name, item)
            self._kinds[name] = kind
        return changed

    def get(self, kind: Kind) -> Pool[Item] | None:
        """The pool of ``kind``; None when it is empty."""
        return self._pools.get(kind)


class Endpoints:
    """The known incarnations at each endpoint."""

    def __init__(self) -> None:
        self._at: dict[str, list[str]] = {}

    def add(self, incarnation: str, endpoint: str) -> None:
        known = self._at.setdefault(endpoint, [])
        if incarnation not in known:
            known.append(incarnation)

    def discard(self, incarnation: str, endpoint: str) -> None:
        known = self._at.get(endpoint)
        if known is None or incarnation not in known:
            return
        known.remove(incarnation)
        if not known:
            del self._at[endpoint]

    def others(self, incarnation: str, endpoint: str) -> list[str]:
        return [one for one in self._at.get(endpoint, ()) if one != incarnation]
