"""A loop whose time passes only when a test lets it pass: what waits a second needs no second of the test."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any


class SetClock:
    """The running loop with another time and other timers. Stands for an `asyncio.AbstractEventLoop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.call_soon, self.call_soon_threadsafe = self._loop.call_soon, self._loop.call_soon_threadsafe
        self.create_task, self.create_future = self._loop.create_task, self._loop.create_future
        self._now = self._loop.time()
        self._timers: list[asyncio.TimerHandle] = []  #: A heap.

    def time(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay_s, callback, *args)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self._loop)
        heapq.heappush(self._timers, timer)
        return timer

    def stop(self, seconds: float) -> None:
        """The process is stopped for so long: timers of that time run late, at the next `advance`."""
        self._now += seconds

    def advance(self, seconds: float) -> None:
        """Let so much time pass. The timers of that time run in their order, those that they start with them."""
        end = self._now + seconds
        while self._timers and self._timers[0].when() <= end:
            timer = heapq.heappop(self._timers)
            self._now = max(self._now, timer.when())
            if not timer.cancelled():
                timer._run()
        self._now = end
