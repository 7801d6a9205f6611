"""The places where an engine's workers wait for others: gates of full stream windows, and the inbox.

A worker that waits here is neither stuck nor computing: the watchdog must not count it (`processes.stages.watchdog`),
and when all of an engine's workers wait at gates, their consumers are notified (`stage.observing.stalling`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Lock, get_ident

from stage_runtime.errors import describe

log = logging.getLogger(__name__)


class Parking:
    """How many workers of one engine wait, and for what. Any thread may call this."""

    def __init__(self) -> None:
        self.at_gates = 0  #: Wait for a consumer that lags a whole window behind.
        self._idle: set[int] = set()  #: Threads that wait for the next event of the inbox. Changed without the lock.
        self.left = 0  #: How often a worker has left a gate.
        self.on_change: Callable[[], None] = lambda: None  #: Called when a worker comes to a gate or leaves one.
        self._lock = Lock()

    @property
    def idle(self) -> int:
        """Wait for the next event of the inbox."""
        return len(self._idle)

    @property
    def all(self) -> int:
        return self.at_gates + self.idle

    @contextmanager
    def at_gate(self) -> Iterator[None]:
        with self._lock:
            self.at_gates += 1
        self.on_change()
        try:
            yield
        finally:
            with self._lock:
                self.at_gates -= 1
                self.left += 1
            self.on_change()

    def rest(self) -> None:
        """This thread waits for work, until it calls `resume`."""
        self._idle.add(get_ident())

    def resume(self) -> None:
        self._idle.discard(get_ident())


class Gate(Future[None]):
    """Resolved when a stream's consumer has caught up, or the request is over. Only the runtime opens it.

    Authors' code waits for it, and may give up: `asyncio.wrap_future` passes the cancellation of a wait on to what is
    waited for, which is one gate for all chunks of a request, and is still needed when the request ends.
    """

    def __init__(self, parking: Parking | None = None) -> None:
        super().__init__()
        self._parking = parking or Parking()

    def open(self) -> None:
        """Resolve it. Never raises: what is called for it is the author's, and the caller must go on."""
        try:
            if not self.done():
                self.set_result(None)
        except BaseException as error:
            log.error("a callback of a full window's future raised: %s", describe(error))

    def cancel(self) -> bool:
        """No effect: only the runtime resolves it."""
        return False

    def result(self, timeout: float | None = None) -> None:
        """Wait for it; the worker counts as waiting meanwhile."""
        if self.done():
            return super().result()
        with self._parking.at_gate():
            return super().result(timeout)

    @contextmanager
    def waited(self) -> Iterator[None]:
        """The context of a coroutine's wait for it."""
        with self._parking.at_gate():
            yield
