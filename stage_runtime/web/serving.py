"""A request at the request manager for the length of an HTTP exchange: admitted, read, and released in every case.

Called by the routes. Knows events and sockets, but nothing of what events mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Protocol

import msgspec

from stage_runtime.coordinator.events import AnswerEvent, RequestHandleApi, RequestManagerApi
from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.answer_times import AnswerTimes
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.wire.values import OmniRequest

_log = logging.getLogger(__name__)

#: ``X-Accel-Buffering``: nginx holds an answer back until 4 to 8 KiB are there unless this header forbids it.
UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


DONE = b"data: [DONE]\n\n"  #: The last frame of an OpenAI stream that is whole; none that fails has it.


#: Characters at which clients (httpx, several SDKs) break a line, beside those that JSON escapes.
_LINE_BREAKS: Final = tuple((letter.encode(), f"\\u{ord(letter):04x}".encode()) for letter in "\u0085\u2028\u2029")


def data_frame(value: Any) -> bytes:
    """One event without a name, as OpenAI's streams have them."""
    return b"data: " + _one_line(value) + b"\n\n"


def named_frame(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _one_line(value) + b"\n\n"


def _one_line(value: Any) -> bytes:
    """JSON in which clients see no line break: in JSON these characters stand inside of strings only."""
    made = msgspec.json.encode(value)
    for letter, escape in _LINE_BREAKS:
        if letter in made:
            made = made.replace(letter, escape)
    return made


class TextFrame:
    """The frames of events that differ in one string: what is around it is encoded once."""

    def __init__(self, value: Any, field: str) -> None:
        """value: one of the events, as `data_frame` takes it, in which this string is empty. field: the name that is
        before it; the last one of that name with an empty string.
        """
        mark = b'"' + field.encode() + b'":'
        self._head, _, self._tail = data_frame(value).rpartition(mark + b'""')
        self._head += mark

    def of(self, text: str) -> bytes:
        """The same bytes as `data_frame` of the whole event."""
        made = msgspec.json.encode(text) if text.isascii() else _one_line(text)
        return self._head + made + self._tail


class StreamEncoder(Protocol):
    """How one route encodes events."""

    def frames(self, events: AsyncIterator[AnswerEvent]) -> AsyncGenerator[bytes, None]:
        """Whole events of the stream, several at once where they are ready together."""

    def fail(self, error: RequestError) -> bytes:
        """The last frame of a stream that cannot go on."""


async def _admit(
    manager: RequestManagerApi, exchange: Exchange, request: OmniRequest, timeout_s: float | None
) -> tuple[RequestHandleApi, AnswerTimes]:
    """The request, which is aborted when the client disconnects. `Exchange.unwatch` must follow."""
    try:
        hook_result = await manager.call_terminal_stages(request, timeout_s=timeout_s, watch=exchange.watch)
    except BaseException:
        exchange.unwatch()
        raise
    handle = manager.admit(
        request,
        timeout_s=timeout_s,
        trace=exchange.trace(),
        trace_state=exchange.trace_state(),
        hook_result=hook_result,
    )
    exchange.watch(lambda: handle.abort("the client disconnected"))
    times = exchange.answer_times = AnswerTimes(exchange.begun_at, request)
    return handle, times


async def _let_go(exchange: Exchange, handle: RequestHandleApi, events: AsyncIterator[AnswerEvent]) -> None:
    """Its events are not read any more."""
    exchange.unwatch()
    handle.abort("the answer is not read")  # changes nothing when it is over
    if isinstance(events, AsyncGenerator):
        await events.aclose()


@asynccontextmanager
async def admitted(
    manager: RequestManagerApi, exchange: Exchange, request: OmniRequest, timeout_s: float | None
) -> AsyncIterator[AsyncIterator[AnswerEvent]]:
    """The request's events. It is aborted when the client disconnects or the body of the block is left early."""
    handle, times = await _admit(manager, exchange, request, timeout_s)
    events = handle.events()
    timed = _timed(events, times)
    try:
        yield timed
    finally:
        await timed.aclose()
        await _let_go(exchange, handle, events)


@asynccontextmanager
async def admitted_each(
    manager: RequestManagerApi, exchange: Exchange, requests: Sequence[OmniRequest], timeout_s: float | None
) -> AsyncIterator[AsyncIterator[tuple[int, AnswerEvent]]]:
    """The same as `admitted`, for several requests with one answer: their events, each with the request's place.

    All of them fail when one does.
    """
    if len(requests) == 1:
        async with admitted(manager, exchange, requests[0], timeout_s) as events:
            yield ((0, event) async for event in events)
        return
    handles: list[RequestHandleApi] = []
    try:
        for request in requests:
            handle, _times = await _admit(manager, exchange, request, timeout_s)
            handles.append(handle)
        times = exchange.answer_times = AnswerTimes(exchange.begun_at, requests[0])
        exchange.watch(lambda: [handle.abort("the client disconnected") for handle in handles])
        async with aclosing(_merged([handle.events() for handle in handles])) as merged:
            yield _timed_each(merged, times)
    finally:
        exchange.unwatch()
        for handle in handles:
            handle.abort("the answer is not read")  # changes nothing when it is over


async def _merged(streams: Sequence[AsyncIterator[AnswerEvent]]) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
    """The events of all as they come, at most one of each read ahead."""
    reading = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = reading.pop(task)
                if (event := task.result()) is not None:
                    reading[asyncio.ensure_future(_next(streams[index]))] = index
                    yield index, event
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for stream in streams:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()


async def _next(stream: AsyncIterator[AnswerEvent]) -> AnswerEvent | None:
    return await anext(stream, None)


async def _timed_each(
    events: AsyncIterator[tuple[int, AnswerEvent]], times: AnswerTimes
) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
    """Stages are told apart by request: their counts add up."""
    async for index, event in events:
        times.note(msgspec.structs.replace(event, stage=f"{event.stage}#{index}"), time.perf_counter())
        yield index, event


async def _timed(events: AsyncIterator[AnswerEvent], times: AnswerTimes) -> AsyncGenerator[AnswerEvent, None]:
    async for event in events:
        times.note(event, time.perf_counter())
        yield event


async def collect(
    manager: RequestManagerApi,
    exchange: Exchange,
    request: OmniRequest,
    timeout_s: float | None,
    add: Callable[[AnswerEvent], object],
) -> None:
    """Hand every event to ``add``, up to the end. It is `admitted` without a context and a generator of its own."""
    handle, times = await _admit(manager, exchange, request, timeout_s)
    events = handle.events()
    try:
        async for event in events:
            times.note(event, time.perf_counter())
            add(event)
    except BaseException:
        await _let_go(exchange, handle, events)
        raise
    exchange.unwatch()


async def stream(
    manager: RequestManagerApi,
    exchange: Exchange,
    request: OmniRequest,
    timeout_s: float | None,
    encoder: StreamEncoder,
    heartbeat_s: float,
) -> None:
    """Answer with server-sent events. The head goes out with the first of them, or the first comment.

    An error has a status until then.
    """
    async with admitted(manager, exchange, request, timeout_s) as events:
        await send_frames(exchange, encoder.frames(events), encoder.fail, heartbeat_s)


async def send_frames(
    exchange: Exchange,
    frames: AsyncGenerator[bytes, None],
    fail: Callable[[RequestError], bytes],
    heartbeat_s: float,
) -> None:
    """The same as `stream`, for frames that are made elsewhere. fail: that of `StreamEncoder`."""
    async with EventStream(exchange, heartbeat_s) as out:
        try:
            async with aclosing(frames):
                async for ready in frames:
                    await out.send(ready)
        except RequestError as error:
            await _send_error(out, exchange, fail, error)
        except Exception:
            _log.exception("request %s: %s failed", exchange.request_id, exchange.route)
            await _send_error(out, exchange, fail, errors.internal(exchange.request_id))
        await out.end()


async def _send_error(
    out: EventStream, exchange: Exchange, fail: Callable[[RequestError], bytes], error: RequestError
) -> None:
    if not exchange.started:
        raise error
    exchange.note_error(error)
    await out.send(fail(error))


class EventStream:
    """Server-sent events, and a comment whenever the stages have been silent for a while.

    The comments keep proxies from cutting a quiet stream, and reveal a client that has vanished.
    """

    def __init__(self, exchange: Exchange, heartbeat_s: float) -> None:
        self._exchange = exchange
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._spoke_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # a comment must not overtake the head, nor the other way round

    async def __aenter__(self) -> EventStream:
        self._timer = self._loop.call_later(self._heartbeat_s, self._tick)
        self._exchange.watch_half_close(self._comment)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._exchange.watch_half_close(None)
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()

    async def send(self, frames: bytes) -> None:
        """Whole events; none: nothing. Waits while the client reads slower than it is written to."""
        if not frames:
            return
        self._spoke_at = self._loop.time()
        if self._exchange.started and not self._turn.locked():  # the head is out
            await self._exchange.write(frames)
            return
        async with self._turn:
            if not self._exchange.started:
                await self._exchange.start(b"text/event-stream; charset=utf-8", UNBUFFERED)
            await self._exchange.write(frames)

    async def end(self) -> None:
        await self.__aexit__()
        await self._exchange.end()

    def _tick(self) -> None:
        silent_s = self._loop.time() - self._spoke_at
        if silent_s >= self._heartbeat_s:
            self._comment()
            silent_s = 0.0
        self._timer = self._loop.call_later(max(0.01, self._heartbeat_s - silent_s), self._tick)

    def _comment(self) -> None:
        if self._beat is None or self._beat.done():
            # a piece of its own, so it is never inside an event
            self._beat = self._loop.create_task(self.send(b": waiting\n\n"))
