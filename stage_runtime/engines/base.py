"""The two ends between which every engine runs: an inbox that it reads, an outbox that it fills; any thread.

Messages that are put into the inbox are opened (decoded, its tensors restored) by the thread that takes it out, inside
the request's error boundary: the I/O thread stays free, and a payload that cannot be read fails its request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import Event
from typing import Any, Final, Protocol

from stage_runtime.engines import events
from stage_runtime.engines.backlog import Backlog
from stage_runtime.engines.gates import Gate as Gate
from stage_runtime.engines.gates import Parking
from stage_runtime.errors import RequestError
from stage_runtime.profiler import events as profile
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.profiler.recording.templates import Template

# Tuples, made once: ``A | B`` in a call makes a union each time.
_UNBOUND: Final = (events.Abort, events.Admin, events.Stalled)  # not dropped with a request
_OPEN: Final = (events.StreamDone, events.StreamFailed, events.NoPayload)  # nothing is encoded


class Work(Protocol):
    """One request at one stage."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def cancelled(self) -> bool:
        """Its request has ended: stop if you can."""

    @property
    def over(self) -> bool:
        """Done or failed here: whatever still comes of it is late."""

    @property
    def bindings(self) -> Mapping[str, str]:
        """stage -> the incarnation of the instance that serves it for this request."""

    at_engine: bool  #: The inbox has given something of it to the engine, which must then get its abort.
    left_depth: int | None  #: How many waited in the queue when it left, if that is recorded when it begins.


class InboxItem(Protocol):
    """Something that waits in an inbox, not opened yet."""

    @property
    def work(self) -> Work: ...

    def open(self) -> events.Incoming:
        """Decode it. An exception in it fails the request."""

    def discard(self) -> None:
        """It is not needed: free what it holds."""


class Outbox(Protocol):
    """The place where results go. Every call is safe from any thread, and a no-op for a request that is over."""

    def emit(self, work: Work, chunk: Any) -> Gate | None:
        """Send a chunk. A gate: its consumer lags behind; wait for it before the next one."""

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None: ...

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None:
        """The request failed here. Never raises, whatever ``error`` is: engines call it in their last resort."""

    def began(self, work: Work) -> None:
        """Its computation begins now: time in the queue ends."""

    def consumed(self, work: Work, source: str, count: int) -> int:
        """Chunks of ``source`` were taken by the stage's function; the producer may send as many again.

        Returns: their weight in the stream's window.
        """

    def turn_away(self, work: Work, error: RequestError) -> None:
        """Fail a request that has not begun. An `Abort` of it follows, in the order of all events."""

    def together(self) -> AbstractContextManager[None]:
        """Chunks and results that this thread gives inside leave as one at the end: a step of an engine wakes each
        receiver once.
        """

    def letting_go(self) -> None:
        """The engine drops what it has received, in this thread, and calls `settle` next."""

    def settle(self) -> None:
        """User code goes on in this thread. A value that was sent without a copy, and is still in use, must not change
        for its receivers when it is written into. The engine itself holds nothing of it any more.
        """

    def crashed(self, error: BaseException) -> None:
        """A thread of the engine's ends with this: the process ends, because the thread's work would never be done."""


class Engine(Protocol):
    """The engine that a factory's return value is made into."""

    takes_chunks: bool  #: Whether stream chunks may be sent to it.
    takes_admin: bool  #: Whether it answers operations of its own.
    concurrency: int  #: Requests at once. The ranks of a TP stage need 1: they must see the same order.
    places: int  #: The same, as load counts it: a batch has several, and an engine that does not say has 0.

    @property
    def ticks(self) -> int:
        """Grows while an event loop of its own turns, or processes of its own compute; 0 for ever without them."""

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        """Work until the inbox closes. It runs on the stage's scheduler thread."""


class Inbox:
    """The events that wait for a stage's engine, in order of arrival. `tensor_parallel` has a leader's and a
    follower's.
    """

    def __init__(self, fail: Callable[[Work, BaseException], None], leaves: Template | None = None) -> None:
        """leaves: the event of a payload that the engine takes, with the queue's depth. None: none is recorded."""
        self._backlog: Backlog[Any] = Backlog()
        self._fail = fail
        self._leaves = leaves
        #: The engine calls `Outbox.began` as soon as it has taken a payload: both are recorded as one moment.
        self.begins_at_once = False
        self.depth: Final = self._backlog.__len__  #: How many wait, with one call less than `len`.
        self._wake: Callable[[], None] | None = None
        self._forget: Callable[[Work], None] | None = None
        self.parking = Parking()  #: The engine's workers, as far as they wait for others.
        self.taken = 0  #: Events handed to the engine: its sign of progress.
        self.polls = 0  #: How often the engine has polled: the sign of life of a loop that has nothing to do.
        self.gauges: dict[str, float] = {}  #: The engine reports them of itself; its thread replaces them whole.
        self.dropped = 0  #: Requests that ended while something of them waited.

    def put(self, arrival: InboxItem | events.Incoming) -> None:
        work = None if isinstance(arrival, _UNBOUND) else arrival.work
        self._backlog.put(arrival, work)
        if work is not None and (
            work.cancelled or work.over
        ):  # it ended in the meantime, perhaps before this was there to be dropped
            self.drop(work)
        if self._wake is not None:
            self._wake()

    def drop(self, work: Work) -> None:
        """It is over: free what waits of it now, and not when the engine comes to it."""
        dropped = self._backlog.drop(work)
        if dropped:
            self.dropped += 1
            for item in dropped:
                if not isinstance(item, _OPEN):
                    item.discard()

    def abort(self, work: Work) -> None:
        """The same as `drop`, for a request that the engine may still be computing: the engine gets an `Abort`."""
        self.drop(work)
        if self._forget is not None:
            self._forget(work)
        if work.at_engine:
            self.put(events.Abort(work.request_id, work))

    def close(self) -> None:
        """Every reader finds the end, once what waits before it is taken."""
        self._backlog.close()
        if self._wake is not None:
            self._wake()

    def on_arrival(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, in any thread, whenever something is put: for engines that wait in an event loop."""
        self._wake = wake
        wake()

    def on_abort(self, forget: Callable[[Work], None]) -> None:
        """Call ``forget`` at once, in the thread that aborts: for engines that keep what they have not begun."""
        self._forget = forget

    def get(self, timeout: float | None = None) -> events.Incoming | None:
        """The next event; None when the inbox is closed or ``timeout`` seconds have passed without one."""
        return self._next(timeout)

    def get_nowait(self) -> events.Incoming | None:
        """The next event, or None when none waits."""
        return self._next(0.0)

    @property
    def closed(self) -> bool:
        """Closed, and nothing waits any more."""
        return self._backlog.closed

    def __len__(self) -> int:
        return len(self._backlog)

    def _next(self, timeout: float | None) -> events.Incoming | None:
        while True:
            self.polls += 1
            if timeout == 0.0:
                item = self._backlog.take_nowait()
            else:
                self.parking.rest()
                try:
                    item = self._backlog.take(timeout)
                finally:
                    self.parking.resume()
            if item is None:
                return None
            event = self._open(item)
            if event is not None:
                return event

    def _open(self, item: Any) -> events.Incoming | None:
        self.taken += 1
        if isinstance(item, _UNBOUND):
            return item
        item.work.at_engine = True  # set before the check: an abort marks the work first and reads this afterwards
        late = item.work.cancelled or item.work.over  # for example chunks of a function that has returned
        if isinstance(item, _OPEN):
            return None if late else item
        if late:
            item.discard()
            return None
        try:
            opened: events.Incoming = item.open()
        except BaseException as error:
            self._fail(item.work, error)
            return None
        if recorder.active:
            self._record_leaving(opened)
        return opened

    def _record_leaving(self, event: events.Incoming) -> None:
        """It leaves the queue. The thread of the stage that takes it calls this."""
        if isinstance(event, events.Start):
            if self.begins_at_once:
                event.work.left_depth = self.depth()
            elif self._leaves is not None:
                recorder.note(self._leaves, event.work.request_id, event.work.attempt, self.depth())
        elif isinstance(event, events.ChunkIn):
            work, chunk = event.work, event.chunk
            facts = {
                "from_stage": chunk.source,
                "chunk_id": chunk.index,
                "depth": self.depth(),
                "attempt": work.attempt,
            }
            recorder.emit(profile.STAGE_QUEUE_LEAVE, work.request_id, None, {"kind": "chunk", **facts})
