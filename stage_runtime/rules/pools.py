"""Eligible instances in pools that change one at a time: a join, a departure or a mark costs the same at any size.

Here: which instance stands in which pool, and which incarnations share an endpoint. Not here: which one is chosen
(`membership`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Kind = TypeVar("Kind", bound=Hashable)


class Pool(Generic[Item]):
    """A set that can be indexed, for random choices. The order changes when an item is removed."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._places: dict[Item, int] = {}  #: item -> its index in ``items``.

    def add(self, item: Item) -> None:
        if item not in self._places:
            self._places[item] = len(self.items)
            self.items.append(item)

    def discard(self, item: Item) -> None:
        place = self._places.pop(item, None)
        if place is None:
            return
        last = self.items.pop()
        if last != item:
            self.items[place] = last
            self._places[last] = place

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __contains__(self, item: object) -> bool:
        return item in self._places


class Pools(Generic[Kind, Item]):
    """Each item stands in one pool at most. A pool object stays the same while it is not empty."""

    def __init__(self) -> None:
        self._pools: dict[Kind, Pool[Item]] = {}
        self._kinds: dict[Item, Kind] = {}

    def put(self, item: Item, kind: Kind | None) -> bool:
        """Move the item to the pool of ``kind``; None: to no pool. True when a pool began or ended."""
        before = self._kinds.get(item)
        if before == kind:
            return False
        changed = False
        if before is not None:
            pool = self._pools[before]
            pool.discard(item)
            del self._kinds[item]
            if not pool:
                del self._pools[before]
                changed = True
        if kind is not None:
            changed = changed or kind not in self._pools
            self._pools.setdefault(kind, Pool()).add(item)
            self._kinds[item] = kind
        return changed

    def get(self, kind: Kind) -> Pool[Item] | None:
        """The pool of ``kind``; None when it is empty."""
        return self._pools.get(kind)


class Endpoints:
    """Which incarnations are known at each endpoint."""

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
