"""One admitted request at the request manager: its events on the way to their reader.

`events.RequestHandleApi`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from stage_runtime.coordinator.answering import waterfall
from stage_runtime.coordinator.answering.token_counts import TokenCounts
from stage_runtime.coordinator.answering.waterfall import Observed
from stage_runtime.coordinator.events import ChunkEvent, RequestRecord, ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.payloads.pack import Extracted
from stage_runtime.rules.binding.prefixes import Hashes
from stage_runtime.rules.flow.streams import Inbound
from stage_runtime.rules.requests.lifecycle import Tracked
from stage_runtime.telemetry.traceparents import TraceContext
from stage_runtime.transfers.receiving import Fetched
from stage_runtime.wire.parts import Failure, Timing
from stage_runtime.wire.values import OmniRequest


class Streamed(msgspec.Struct):
    """A chunk that has arrived: opened when it is read."""

    stage: str
    index: int
    modality: str | None
    fetched: Fetched
    weight: int
    nbytes: int  #: Bytes as `UnreadBytes` counts them.
    taken: bool = False  #: Its producer counts it as taken, though it was not read.


class Resulted(msgspec.Struct):
    """A terminal's result: opened when it is read. ``fetched`` None: it gave none."""

    stage: str
    fetched: Fetched | None
    nbytes: int  #: Bytes as `UnreadBytes` counts them.


class UnreadBytes:
    """The bytes of answers that one coordinator has received and nobody has read yet."""

    def __init__(self) -> None:
        self.nbytes = 0


class BodyOwner(msgspec.Struct):
    """`transfers.sending.SendOwner` of one attempt's body: not sent any more once the attempt is given up."""

    owner: str
    request_id: str
    attempt: int
    aborted: bool = False


class RequestTrace(NamedTuple):
    """The trace that a request belongs to."""

    header: str | None = None  #: The ``traceparent`` that its stages get.
    context: TraceContext | None = None  #: None: its spans are not sent.


class HandleContext(NamedTuple):
    """The parts of one request manager that all its handles use; they hold no reference to the manager itself."""

    owner: str  #: The coordinator's incarnation.
    cancel: Callable[[RequestHandle, str], bool]
    consumed: Callable[[RequestHandle, str, int], None]
    unread_bytes: UnreadBytes
    clocks_us: Mapping[str, int] = {}  #: Instance -> what to add to its times.


class RequestHandle:
    """Everything the request manager knows of one request. Owned by the I/O thread."""

    def __init__(
        self,
        request: OmniRequest,
        tracked: Tracked,
        extracted: Extracted,
        context: HandleContext,
        *,
        trace: RequestTrace,
        deadline: float,
        prompt: Hashes = (),
    ) -> None:
        self.tracked = tracked
        self.kind = request.kind
        self.prompt = prompt  #: The prompt's hashes, for the choice of instances of every attempt.
        self.extracted: Extracted | None = extracted  #: Kept while a retry is possible.
        self.owner = context.owner
        self.sending = BodyOwner(context.owner, request.id, tracked.attempt)
        self.bindings: dict[str, str] = {}
        self.revision = ""
        self.away: tuple[str, ...] = ()  #: Stages that it may meet and has no instance of.
        self.required: set[str] = set()  #: Such stages of earlier attempts, to which the route has led.
        self.trace = trace
        self.deadline = deadline  #: A time of the loop's clock.
        self.timings: dict[str, Timing] = {}
        self.observed = Observed(admitted_us=time.time_ns() // 1000, clocks_us=context.clocks_us)
        self.avoid: set[str] = set()  #: Instances that an earlier attempt lost.
        #: Instances to which a stage of an earlier attempt had no connection -> until when none is expected, on the
        #: loop's clock.
        self.unreachable: dict[str, float] = {}
        self.unreached: dict[str, str] = {}  #: The same instances -> the stage that they served for it.
        self.attempt_began_at = 0.0  #: A time of the loop's clock.
        self.judged_attempt = 0  #: Counted as a failure of its revision already.
        self.edges: tuple[tuple[str, str, str], ...] = ()  #: Edges of the attempt's revision.
        self.begun: set[str] = set()  #: Terminal stages that have streamed something in this attempt.
        self.supplied: set[str] = set()  #: Stages that have all their input of this attempt.
        self.streams: dict[str, Inbound[Streamed]] = {}
        self.undelivered: dict[str, Resulted] = {}  #: Results that wait for chunks, by stage.
        self.unread_nbytes = 0  #: Bytes of its answer that are here: out of order, undelivered, or not read.
        self.whole = not request.stream  #: The reader gets everything at the end, or nothing.
        self.admitted_at = time.monotonic()
        self.first_event_at: float | None = None
        self.ended_at: float | None = None
        self.read_at = (
            asyncio.get_running_loop().time()
        )  #: When its client took something last, or had nothing to take.
        self._cancel = context.cancel
        self._consumed = context.consumed
        self._unread_bytes = context.unread_bytes
        self._events: deque[Streamed | Resulted] = deque()
        self._tokens = TokenCounts()  #: Counts of what was read.
        self._failure: Failure | None = None
        self._retry_after_s: float | None = None
        self._finished = False
        self._changed: asyncio.Future[None] | None = None

    # --- events.RequestHandle -----------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.tracked.id

    @property
    def instances(self) -> frozenset[str]:
        return frozenset(self.bindings.values())

    async def events(self) -> AsyncIterator[ChunkEvent | ResultEvent]:
        try:
            while True:
                while self._events and not (self.whole and not self._finished):
                    event = self._open(self._events.popleft())
                    self._tokens.take(event)
                    yield event
                if self._failure is not None:
                    raise self._error()
                if self._finished:
                    return
                self._changed = asyncio.get_running_loop().create_future()
                await self._changed
        finally:
            if not self._finished and self._failure is None:
                self._cancel(self, "the client went away")
            self._drop_events()  # they are not read any more, and the handle stays known for a while

    def abort(self, reason: str) -> bool:
        self._drop_events()
        return self._cancel(self, reason)

    # --- the request manager's side -----------------------------------------------------------------------------------

    def add_timings(self, timings: Iterable[Timing]) -> None:
        """Keep what stages measured; the latest of each stage counts."""
        for timing in timings:
            self.timings[timing.stage] = timing

    def begin_attempt(self, entry: str, edges: tuple[tuple[str, str, str], ...]) -> None:
        """A new attempt begins: partial results of an earlier one are dropped. entry, edges: of its revision."""
        self.timings = {}
        self.edges = edges
        self.begun, self.supplied = set(), set()
        self.attempt_began_at = asyncio.get_running_loop().time()
        self.observed.begin(entry, edges, time.time_ns() // 1000)
        self.sending = BodyOwner(self.owner, self.id, self.tracked.attempt)
        self.give_up_attempt()

    def give_up_attempt(self) -> None:
        """Drop what has come of the attempt and was not shown to the client."""
        self.streams = {stage: Inbound() for stage in self.tracked.terminals}
        self.undelivered.clear()
        if self.whole:
            self._events.clear()
        self._recount()

    def hold(self, nbytes: int) -> None:
        """So many bytes more of its answer are here and unread; negative: fewer."""
        self.unread_nbytes += nbytes
        self._unread_bytes.nbytes += nbytes

    def push(self, event: Streamed | Resulted) -> None:
        if self.first_event_at is None:
            self.first_event_at = time.monotonic()
        self.observed.received(event.stage, time.time_ns() // 1000, stream=isinstance(event, Streamed))
        if not self._events:
            self.read_at = asyncio.get_running_loop().time()
        self._events.append(event)
        if not self.whole:
            self._wake()
        elif isinstance(event, Streamed):
            event.taken = True
            self._consumed(self, event.stage, event.weight)  # it has no reader: its producer must not wait

    @property
    def early(self) -> int:
        """The weight of unread chunks that count as taken; an answer that is given as a whole has no slow reader."""
        return 0 if self.whole else sum(one.weight for one in self._chunks() if one.taken)

    def unread(self, stage: str) -> int:
        """The weight of unread chunks of ``stage`` that count against its window."""
        return sum(one.weight for one in self._chunks() if one.stage == stage and not one.taken)

    def take_early(self, stage: str) -> None:
        """Count what is here of ``stage`` as taken."""
        for one in self._chunks():
            if one.stage == stage and not one.taken:
                one.taken = True
                self._consumed(self, stage, one.weight)

    def finish(self) -> None:
        self._finished = True
        self._let_go()
        self._wake()

    def fail(self, failure: Failure, *, retry_after_s: float | None = None) -> None:
        self._failure = failure
        self._retry_after_s = retry_after_s
        if failure.code != "stage_failed" or not self.tracked.streamed:
            self._events.clear()  # partial results are dropped; what was streamed already cannot be taken back
        self._let_go()
        self._wake()

    def record(self) -> RequestRecord:
        now = self.ended_at or time.monotonic()
        failure = self.tracked.failure
        first = self.first_event_at
        stages, hops = waterfall.draw(self.observed, self.timings, self.bindings)
        return RequestRecord(
            id=self.id,
            kind=self.kind,
            state=self.tracked.public_state,
            age_ms=_ms(time.monotonic() - self.admitted_at),
            attempt=self.tracked.tries,
            bindings=self.bindings,
            waiting_for=tuple(sorted(self.tracked.waiting)) if self.tracked.live else (),
            first_event_ms=None if first is None else _ms(first - self.admitted_at),
            total_ms=None if self.ended_at is None else _ms(now - self.admitted_at),
            admitted_at=self.observed.admitted_us / 1e6,
            stages=stages,
            hops=hops,
            usage=self._tokens.shown(),
            error=None
            if failure is None
            else {"code": failure.code, "message": failure.message, "stage": failure.stage},
        )

    def _error(self) -> RequestError:
        """A new one each time: one that was raised holds the frames that it went through, an upload among them."""
        failure = self._failure
        assert failure is not None
        return RequestError(
            failure.code,
            failure.message,
            stage=failure.stage,
            hook=failure.hook,
            request_id=self.id,
            param=failure.param,
            retry_after_s=self._retry_after_s,
        )

    def _let_go(self) -> None:
        """Events that will not be delivered any more hold slots of their senders."""
        self.streams = {}
        self.undelivered.clear()
        self._recount()

    def _drop_events(self) -> None:
        self._events.clear()
        if not self.tracked.live:
            self._recount()

    def _recount(self) -> None:
        """Nothing is here but the events."""
        self.hold(sum(event.nbytes for event in self._events) - self.unread_nbytes)

    def _chunks(self) -> Iterator[Streamed]:
        return (event for event in self._events if isinstance(event, Streamed))

    def _open(self, event: Streamed | Resulted) -> ChunkEvent | ResultEvent:
        self.read_at = asyncio.get_running_loop().time()
        self.hold(-event.nbytes)
        if isinstance(event, Resulted):
            if event.fetched is None:
                return ResultEvent(stage=event.stage, has_data=False)
            return ResultEvent(stage=event.stage, data=event.fetched.open(torch=False))
        fields: dict[str, Any] = event.fetched.open(torch=False)
        if not event.taken:
            self._consumed(self, event.stage, event.weight)
        return ChunkEvent(
            stage=event.stage,
            index=event.index,
            data=fields.get("data"),
            modality=event.modality,
            metadata=fields.get("metadata"),
        )

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
