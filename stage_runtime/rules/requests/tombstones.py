"""Tombstones of requests that ended here, so that their late messages are drained and dropped.

Clients choose request ids and may reuse them. A coordinator numbers its attempts upwards across all requests, so a
later request with the same id has a higher attempt than the tombstone. Tombstones are kept per coordinator.
"""

from __future__ import annotations

import math
from collections import OrderedDict


class Tombstones:
    """Attempts of requests that are over; each forgotten after ``keep_s``, the oldest first beyond ``limit``.

    A payload may overtake the abort that was sent by another process, never by more than the network delays.
    """

    def __init__(self, *, keep_s: float = 120.0, limit: int = 100_000) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._due = -math.inf  #: The time before which none is old enough.
        #: (owner, request id) -> (attempt, when, served); oldest first.
        self._dead: OrderedDict[tuple[str, str], tuple[int, float, bool]] = OrderedDict()

    def add(self, owner: str, request_id: str, attempt: int, now: float, *, served: bool = False) -> None:
        """``attempt`` and every one before it are over. served: it gave its result."""
        key = (owner, request_id)
        dead = self._dead
        known = dead.pop(key, None)
        if known is not None and known[0] >= attempt:
            served = known[2] or (served and known[0] == attempt)
            attempt = known[0]
        dead[key] = (attempt, now, served)
        if now >= self._due or len(dead) > self._limit:
            self._prune(now)

    def has(self, owner: str, request_id: str, attempt: int) -> bool:
        found = self._dead.get((owner, request_id))
        return found is not None and attempt <= found[0]

    def served(self, owner: str, request_id: str, attempt: int) -> bool:
        """Whether this attempt, the highest that is over, gave its result."""
        found = self._dead.get((owner, request_id))
        return found is not None and found[0] == attempt and found[2]

    def _prune(self, now: float) -> None:
        while self._dead:
            oldest = next(iter(self._dead))
            since = self._dead[oldest][1]
            if len(self._dead) <= self._limit and now - since < self._keep_s:
                self._due = since + self._keep_s
                return
            del self._dead[oldest]

    def __len__(self) -> int:
        return len(self._dead)
