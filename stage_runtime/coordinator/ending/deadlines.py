"""All deadlines of a coordinator under one timer: a timer per request would cost more than admitting it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

CHECK_EVERY_S: Final = 0.02  # deadlines within it are passed in one turn of the loop
STALE_KEPT: Final = 10_000  # deadlines of requests that are over, before they are thrown out


class Deadlines:
    """A heap of (deadline, request id). Ids may be reused, so callbacks compare the deadline too.

    passed: called with (id, deadline) on the loop, once, within `CHECK_EVERY_S`. wanted: (id, deadline) still matters.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        passed: Callable[[str, float], None],
        wanted: Callable[[str, float], bool],
    ) -> None:
        self._loop = loop
        self._passed = passed
        self._wanted = wanted
        self._heap: list[tuple[float, str]] = []
        self._live = 0  #: Deadlines that the last cleanup has left.
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0  #: The deadline that the timer is for.

    def add(self, request_id: str, deadline: float) -> None:
        """deadline: on the loop's clock."""
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * self._live + STALE_KEPT:
            self._heap = [(deadline, one) for deadline, one in self._heap if self._wanted(one, deadline)]
            heapq.heapify(self._heap)
            self._live = len(self._heap)
        if self._timer is None or deadline < self._next:  # rarely: most requests have the same time
            self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        """Look again soon after the first deadline, at all that pass until then."""
        self.close()
        self._timer = None
        if self._heap:
            self._next = self._heap[0][0]
            self._timer = self._loop.call_at(max(self._next, self._loop.time()) + CHECK_EVERY_S, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        try:
            while self._heap and self._heap[0][0] <= now:
                deadline, request_id = heapq.heappop(self._heap)
                self._passed(request_id, deadline)
        finally:  # one that raises does not stop the later ones
            self._arm()
