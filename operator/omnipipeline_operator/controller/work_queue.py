"""The work queue: which pipelines to reconcile, and when. Each pipeline is in it once and in one reconcile at a time.

Here: the keyed queue with its back-off, and its two priorities: an edit of a spec is reconciled before other events (a
pod's change, a repeated list). Not here: a reconcile (`reconciling`). Called by `handlers.watching` (adds) and
`handlers.lifecycle` (takes).
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import time
from collections.abc import Callable
from typing import Final

from omnipipeline_operator.cluster.store import PipelineKey

MIN_RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 60.0
COOL_DOWN_S: Final = 0.1  # between two reconciles of one pipeline, edits apart: watch events come in bursts
MAX_COOL_DOWNS: Final = 1000  # above this size, expired cool-downs are pruned
MAX_CHANGED_DELAY_S: Final = 5.0
MAX_URGENT_IN_A_ROW: Final = 8  # after so many urgent keys in a row another one is taken: neither starves
MOST_DOUBLINGS: Final = 20  # beyond any delay here; beyond 1,023 a float would overflow
CHANGED_RETRY_S: Final = 1.0  # not at once: the failing reconcile may have made the change itself


class WorkQueue:
    """Waiting keys. A key that is added during its reconcile is reconciled again afterwards."""

    def __init__(
        self, jitter: Callable[[], float] = random.random, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._jitter = jitter
        self._now = clock
        self._due: dict[PipelineKey, float] = {}  #: When each waiting key may be taken.
        self._heap: list[tuple[float, PipelineKey]] = []  #: An entry for each of ``_due``, and stale ones.
        self._urgent: dict[PipelineKey, None] = {}  #: Keys to take first once they are due, in order.
        self._urgent_in_a_row = 0  #: Urgent keys taken since the last other one.
        self._in_progress: dict[PipelineKey, bool] = {}  #: Key -> whether it was added again.
        self._failures: dict[PipelineKey, int] = {}
        self._failing_since: dict[PipelineKey, float] = {}  #: The first of these failures.
        self._cool_down_until: dict[PipelineKey, float] = {}
        self._changed_in_a_row: dict[PipelineKey, int] = {}  #: Reconciles in a row during which something has changed.
        self._wake = asyncio.Event()

    def add(self, key: PipelineKey, after_s: float = 0.0, *, urgent: bool = False) -> None:
        """Reconcile ``key`` in ``after_s`` seconds, or earlier if it is queued so. ``urgent``: before others."""
        if urgent:
            self._urgent[key] = None
        if key in self._in_progress and after_s <= 0:
            self._in_progress[key] = True
            return
        at = self._now() + after_s
        if not urgent:
            at = max(at, self._cool_down_until.get(key, 0.0))
        if key not in self._due or at < self._due[key]:
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))
            self._wake.set()

    async def take(self) -> PipelineKey:
        """The next key that is due and not being reconciled; waits for one."""
        while True:
            key = self._next()
            if key is not None:
                del self._due[key]
                if key in self._in_progress:
                    self._in_progress[key] = True
                    continue
                self._urgent.pop(key, None)
                self._in_progress[key] = False
                return key
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), self.next_in_s())
            except TimeoutError:
                continue

    def done(self, key: PipelineKey, *, again_s: float | None = None, changed: bool = False) -> None:
        """A reconcile has succeeded: its back-off is reset.

        changed: something has changed meanwhile, perhaps by the reconcile itself: reconcile once more, later each time,
        because another controller may keep undoing the writes.
        """
        self._failures.pop(key, None)
        self._failing_since.pop(key, None)
        self._start_cool_down(key)
        if changed:
            count = self._changed_in_a_row[key] = self._changed_in_a_row.get(key, 0) + 1
            again_s = min(_doubled(COOL_DOWN_S, count - 1), MAX_CHANGED_DELAY_S, again_s or math.inf)
        else:
            self._changed_in_a_row.pop(key, None)
        if self._in_progress.pop(key):
            self.add(key, urgent=key in self._urgent)
        elif again_s is not None:
            self.add(key, again_s)

    def failed(self, key: PipelineKey, *, least_s: float = 0.0) -> float:
        """A reconcile has failed: retry with exponential back-off. Returns the delay in seconds."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        self._failing_since.setdefault(key, self._now())
        wait: float = min(_doubled(MIN_RETRY_S, count), MAX_RETRY_S) * (1 + 0.2 * self._jitter())
        if self._in_progress.pop(key):  # a change arrived, which may resolve the failure
            wait = min(wait, CHANGED_RETRY_S)
        self.add(key, max(wait, least_s))
        return max(wait, least_s)

    def oldest_wait_s(self) -> float:
        """How long the longest waiting key has been due."""
        return max(0.0, max((self._now() - at for at in self._due.values()), default=0.0))

    def longest_failing_s(self) -> float:
        """How long the key that fails longest has not succeeded."""
        return max((self._now() - since for since in self._failing_since.values()), default=0.0)

    def __len__(self) -> int:
        return len(self._due) + len(self._in_progress)

    def _start_cool_down(self, key: PipelineKey) -> None:
        now = self._now()
        if len(self._cool_down_until) >= MAX_COOL_DOWNS:
            self._cool_down_until = {each: until for each, until in self._cool_down_until.items() if until > now}
        self._cool_down_until[key] = now + COOL_DOWN_S

    def _next(self) -> PipelineKey | None:
        """The key to take now; None: none is due."""
        now, wait = self._now(), self.next_in_s()
        if wait is None or wait > 0:
            return None
        if self._urgent_in_a_row < MAX_URGENT_IN_A_ROW:
            for key in self._urgent:
                if self._due.get(key, math.inf) <= now:
                    self._urgent_in_a_row += 1
                    return key
        self._urgent_in_a_row = 0
        return self._heap[0][1]

    def next_in_s(self) -> float | None:
        """Seconds until a key is due; None: the queue is empty."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] - self._now() if self._heap else None


def _doubled(first_s: float, times: int) -> float:
    return first_s * 2.0 ** min(times, MOST_DOUBLINGS)
