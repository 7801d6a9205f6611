"""Which pipelines to look at, and when: one place per pipeline, never two looks at one at a time.

Here: the keyed queue with its back-off. Not here: what a look does (`reconciling`). Called by `watching` (adds) and
`lifecycle` (takes).
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from typing import Final

Key = tuple[str, str]

FIRST_RETRY_S: Final = 0.2
LAST_RETRY_S: Final = 60.0
CHANGED_RETRY_S: Final = 1.0  # not at once: the change may be what the failing look itself has written


class Queue:
    """Keys that wait. A key that is added while it is looked at is looked at again afterwards."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._due: dict[Key, float] = {}  #: When each waiting key may be taken.
        self._heap: list[tuple[float, Key]] = []  #: Has an entry for each of ``_due``, and stale ones.
        self._taken: dict[Key, bool] = {}  #: Being looked at -> added again meanwhile.
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()

    def add(self, key: Key, after_s: float = 0.0) -> None:
        """Look at ``key`` in ``after_s`` seconds, or earlier if that was wanted already."""
        if key in self._taken and after_s <= 0:
            self._taken[key] = True
            return
        at = _now() + after_s
        if key not in self._due or at < self._due[key]:
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))
            self._wake.set()

    async def take(self) -> Key:
        """The next key that is due and is not being looked at."""
        while True:
            wait = self._until_next()
            if wait is not None and wait <= 0:
                at, key = heapq.heappop(self._heap)
                if self._due.get(key) != at:
                    continue
                if key in self._taken:
                    del self._due[key]
                    self._taken[key] = True
                    continue
                del self._due[key]
                self._taken[key] = False
                return key
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), wait)
            except TimeoutError:
                continue

    def done(self, key: Key, *, again_s: float | None = None) -> None:
        """The look went well: the next failure waits as briefly as a first one."""
        self._failures.pop(key, None)
        if self._taken.pop(key):
            self.add(key)
        elif again_s is not None:
            self.add(key, again_s)

    def failed(self, key: Key, *, least_s: float = 0.0) -> float:
        """The look did not go well: look again later, each time later. Returns when."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        wait: float = min(FIRST_RETRY_S * 2.0**count, LAST_RETRY_S) * (1 + 0.2 * self._jitter())
        if self._taken.pop(key):  # something has changed meanwhile: perhaps the cure
            wait = min(wait, CHANGED_RETRY_S)
        self.add(key, max(wait, least_s))
        return max(wait, least_s)

    def oldest_wait_s(self) -> float:
        """How long the key that waits longest has been due."""
        return max(0.0, max((_now() - at for at in self._due.values()), default=0.0))

    def __len__(self) -> int:
        return len(self._due) + len(self._taken)

    def _until_next(self) -> float | None:
        return self._heap[0][0] - _now() if self._heap else None


def _now() -> float:
    return asyncio.get_running_loop().time()
