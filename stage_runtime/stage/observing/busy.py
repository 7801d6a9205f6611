"""How much of the time a stage computes something: at least one request, however many there are in a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from stage_runtime.metrics import planes


class Busy:
    """Counts the requests in a stage's function. Its callers hold a lock (`work`), but for `share`."""

    __slots__ = ("_busy_s", "_clock", "_running", "_seen_at", "_seen_s", "_since")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        self._running = 0
        self._since = 0.0  #: When the stage became busy, if it is.
        self._busy_s = 0.0  #: The sum of all earlier times.
        self._seen_at, self._seen_s = clock(), 0.0  #: The values of the last `share`.

    def began(self) -> None:
        if not self._running:
            self._since = self._clock()
        self._running += 1

    def ended(self) -> None:
        self._running -= 1
        if not self._running:
            self._busy_s += self._clock() - self._since

    def share(self) -> float:
        """The share of the time since the last call that the stage was busy: 0 to 1."""
        now = self._clock()
        busy_s = self._busy_s + (now - self._since if self._running else 0.0)
        passed_s, spent_s = now - self._seen_at, busy_s - self._seen_s
        self._seen_at, self._seen_s = now, busy_s
        return round(min(max(spent_s / passed_s, 0.0), 1.0), planes.BUSY_DIGITS) if passed_s > 0 else 0.0
