"""The two ends between which every engine runs: an inbox that it reads, an outbox that it fills; any thread.

What is put into the inbox is opened (decoded, its tensors restored) by the thread that takes it out, inside the
request's error boundary: the I/O thread stays free, and a payload that cannot be read fails its request alone.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any, Final, Protocol

from stage_runtime.engines import events

Gate = Future[None]  #: Resolved when a stream's consumer has caught up, or the request is over.


class Work(Protocol):
    """One request at one stage."""

    @property
    def request_id(self) -> str: ...
    @property
    def cancelled(self) -> bool:
        """Nobody waits for it: stop if you can."""

    @property
    def over(self) -> bool:
        """Done or failed here: whatever still comes of it is late."""


class Arrival(Protocol):
    """Something that waits in an inbox, not opened yet."""

    @property
    def work(self) -> Work: ...

    def open(self) -> events.Incoming:
        """Decode it. Whatever it raises fails the request."""

    def discard(self) -> None:
        """Nobody wants it: free what it holds."""


class Outbox(Protocol):
    """Where results go. Every call is safe from any thread, and a no-op for a request that is over."""

    def emit(self, work: Work, chunk: Any) -> Gate | None:
        """Send a chunk. A gate: its consumer lags behind; wait for it before the next one."""

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None: ...

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None: ...

    def began(self, work: Work) -> None:
        """Its computation begins now: time in the queue ends."""

    def consumed(self, work: Work, source: str, count: int) -> None:
        """Chunks of ``source`` were taken by the stage's function; the producer may send as many again."""


class Engine(Protocol):
    """What a factory's return value is made into."""

    takes_chunks: bool  #: Whether stream chunks may be sent to it.
    takes_admin: bool  #: Whether it answers operations of its own.
    ticks: int  #: Grows while an event loop of its own turns; 0 for ever without one.
    concurrency: int  #: Requests at once. The ranks of a TP stage need 1: they must see the same order.

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        """Work until the inbox closes. On the stage's scheduler thread."""


_CLOSED: Final = object()


class Inbox:
    """What waits for a stage's engine, in order of arrival. `tensor_parallel` has a leader's and a follower's."""

    def __init__(self, fail: Callable[[Work, BaseException], None]) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._fail = fail
        self._wake: Callable[[], None] | None = None
        self._closing = False
        self.taken = 0  #: Events handed to the engine: its sign of progress.

    def put(self, arrival: Arrival | events.Incoming) -> None:
        self._queue.put(arrival)
        if self._wake is not None:
            self._wake()

    def close(self) -> None:
        """Every reader finds the end, once what waits before it is taken."""
        self._closing = True
        self._queue.put(_CLOSED)
        if self._wake is not None:
            self._wake()

    def on_arrival(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, in any thread, whenever something is put: for engines that wait in an event loop."""
        self._wake = wake
        wake()

    def get(self, timeout: float | None = None) -> events.Incoming | None:
        """The next event; None when the inbox is closed or ``timeout`` seconds have passed without one."""
        while True:
            try:
                item = self._queue.get(timeout=timeout)
            except queue.Empty:
                return None
            if item is _CLOSED:
                self._queue.put(_CLOSED)
                return None
            event = self._open(item)
            if event is not None:
                return event

    def get_nowait(self) -> events.Incoming | None:
        """The next event, or None when there is none now."""
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return None
            if item is _CLOSED:
                self._queue.put(_CLOSED)
                return None
            event = self._open(item)
            if event is not None:
                return event

    @property
    def closed(self) -> bool:
        """Closed, and nothing waits any more."""
        return self._closing and self._queue.qsize() <= 1  # the mark of the end; never taken out to look: order is kept

    def __len__(self) -> int:
        return self._queue.qsize()

    def _open(self, item: Any) -> events.Incoming | None:
        self.taken += 1
        if isinstance(item, events.Abort | events.Admin):
            return item
        late = item.work.cancelled or item.work.over  # chunks of a function that has returned already, say
        if isinstance(item, events.StreamDone | events.StreamFailed):
            return None if late else item
        if late:
            item.discard()
            return None
        try:
            opened: events.Incoming = item.open()
        except BaseException as error:
            self._fail(item.work, error)
            return None
        return opened
