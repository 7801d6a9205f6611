"""The instances that know each other's endpoint, and which are notified of a departure. Pure: the caller passes the
time.

Two instances are introduced when a request is bound to both and an edge connects its stages there. So an instance
is notified only of those that it shares requests with, and the cost of a join or a departure follows from the number of
its neighbours, not of all members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

#: So long after an introduction, requests bring it along: they may overtake it on another link.
FRESH_S: Final = 5.0


class News(msgspec.Struct, frozen=True):
    """The news that a binding makes known."""

    introduced: dict[str, list[str]]  #: Each instance -> those whose endpoints it must be sent now.
    along: set[str]  #: The instances whose facts the request brings along.


NOTHING: Final = News({}, set())


class Introductions:
    """All pairs that one coordinator has introduced."""

    def __init__(self) -> None:
        #: one -> other -> when they were introduced; None: to be introduced again. Symmetrical.
        self._known: dict[str, dict[str, float | None]] = {}

    def bind(self, edges: Iterable[tuple[str, str, str]], bindings: Mapping[str, str], now: float) -> News:
        """A request is bound. edges: of its revision; those of stages that are not bound are ignored."""
        introduced: dict[str, list[str]] = {}
        along: set[str] = set()
        for source, target, _ in edges:
            one, other = bindings.get(source), bindings.get(target)
            if one is None or other is None or one == other:
                continue
            known = self._known.get(one)
            at = known.get(other) if known is not None else None
            if at is None:
                self._known.setdefault(one, {})[other] = now
                self._known.setdefault(other, {})[one] = now
                introduced.setdefault(one, []).append(other)
                introduced.setdefault(other, []).append(one)
            elif now - at > FRESH_S:
                continue
            along.update((one, other))
        return News(introduced, along) if along else NOTHING

    def lost(self, one: str, other: str) -> None:
        """One of the two has no connection to the other: the next binding introduces them again.

        Both may have one another still, so either is notified when the other leaves.
        """
        if other in self._known.get(one, ()):
            self._known[one][other] = self._known[other][one] = None

    def adopt(self, one: str, other: str) -> None:
        """Another coordinator introduced the two and is gone: either is notified when the other leaves."""
        for first, second in ((one, other), (other, one)):
            self._known.setdefault(first, {}).setdefault(second, None)

    def leave(self, incarnation: str) -> list[str]:
        """The member is gone for good. Returns: the members that know it."""
        knew = self._known.pop(incarnation, None)
        if knew is None:
            return []
        for other in knew:
            self._known[other].pop(incarnation, None)
        return list(knew)

    def known(self, one: str, other: str) -> bool:
        """Whether the two were introduced: the next request between them opens no link."""
        return self._known.get(one, {}).get(other) is not None
