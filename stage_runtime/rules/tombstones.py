"""Remembering the dead: requests that ended here, so that what still arrives of them is drained and dropped."""

from __future__ import annotations

from collections import OrderedDict


class Tombstones:
    """(request, attempt) pairs that are over; each forgotten after ``keep_s``, the oldest first beyond ``limit``.

    A payload may overtake the abort that was sent by another process, never by more than the network delays.
    """

    def __init__(self, *, keep_s: float = 120.0, limit: int = 100_000) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._dead: OrderedDict[str, tuple[int, float]] = OrderedDict()  #: id -> (attempt, when); oldest first.

    def add(self, request_id: str, attempt: int, now: float) -> None:
        """``attempt`` and every one before it are over."""
        known = self._dead.pop(request_id, (attempt, now))[0]
        self._dead[request_id] = (max(known, attempt), now)
        while self._dead:
            oldest = next(iter(self._dead))
            if len(self._dead) <= self._limit and now - self._dead[oldest][1] < self._keep_s:
                break
            del self._dead[oldest]

    def has(self, request_id: str, attempt: int) -> bool:
        found = self._dead.get(request_id)
        return found is not None and attempt <= found[0]

    def __len__(self) -> int:
        return len(self._dead)
