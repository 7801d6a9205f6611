"""`omni.Streaming`: an async generator per request that takes chunks while they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from stage_runtime.api import Session
from stage_runtime.engines import events, running
from stage_runtime.engines.base import Outbox, Work
from stage_runtime.engines.threads.loops import LoopEngine
from stage_runtime.errors import RequestError
from stage_runtime.rules.flow import turns
from stage_runtime.rules.flow.turns import TakeEarly, Turn
from stage_runtime.wire.values import Chunk, OmniRequest, StagePayload


class StreamingEngine(LoopEngine):
    """One `Session` per request, made by its first message, payload or chunk."""

    takes_chunks = True

    def __init__(
        self, fn: Callable[[Session], AsyncIterator[object]], concurrency: int, sources: tuple[str, ...]
    ) -> None:
        super().__init__(concurrency)
        self._fn = fn
        self._sources = sources
        self.knows_sources = True  #: ``sources`` are all that can be; a test of a stage gives some of them.
        self._sessions: dict[Work, RequestSession] = {}  #: Sessions in the order of their first messages.
        self._stalled: set[turns.Source] = set()

    def on_event(self, event: events.Incoming) -> None:
        if isinstance(event, events.Stalled):
            (self._stalled.add if event.stalled else self._stalled.discard)((event.source, event.instance))
            self._let_go_on()
            return
        if isinstance(event, events.Admin | events.Abort) or event.work.cancelled:
            return
        session = self._session(event)
        if not session.takes:
            return
        match event:
            case events.Start():
                session.give_payload(event.payload)
            case events.ChunkIn():
                session.give_chunk(event.chunk)
            case events.StreamDone():
                session.end(event.source, event.request)
            case events.NoPayload():
                session.lack_payload()
            case events.StreamFailed():
                session.fail(cause(event))
        self._let_go_on()

    def on_abort(self, work: Work) -> None:
        if not self.lockstep:
            self._sessions.pop(work, None)
        elif (session := self._sessions.get(work)) is not None:
            session.fail(RequestError("cancelled", "the request was aborted"))

    def on_forget(self, work: Work) -> None:
        session = self._sessions.get(work)
        if session is not None:
            session.let_go()

    def on_ended(self, work: Work) -> None:
        self._let_go_on()

    def _let_go_on(self) -> None:
        """Make room where sources wait for streams that wait for those very sources."""
        while self._stalled:
            sessions = list(self._sessions.values())
            found = [
                session.turn(begun=work in self._running)
                for work, session in self._sessions.items()
                if not session.failed
            ]
            room = turns.ROOM - sum(session.early for session in sessions)
            steps = turns.decide(found, self._stalled, places=self.concurrency, room=room)
            for step in steps:
                if isinstance(step, TakeEarly):
                    step.request.take_early(step.source)
                else:
                    self._turn_away(step.request)
            if not steps or isinstance(steps[0], turns.TurnAway):
                return

    def _turn_away(self, session: RequestSession) -> None:
        """Its place in the queue is taken back by the `Abort` that follows."""
        if not self.lockstep:
            self._sessions.pop(session.work, None)
        self.outbox.turn_away(
            session.work,
            RequestError(
                "unavailable",
                "no room for streams of requests that wait for their turn, and those that run wait for the same "
                "producers: allow more requests at once, or fewer of them",
            ),
        )

    def _session(
        self, event: events.Start | events.ChunkIn | events.StreamDone | events.StreamFailed | events.NoPayload
    ) -> RequestSession:
        session = self._sessions.get(event.work)
        if session is None:
            session = RequestSession(
                event.work,
                self.outbox,
                self._sources,
                waits=self._let_go_on,
                in_order=self.lockstep,
                others=not self.knows_sources,
            )
            self._sessions[event.work] = session
            self.launch(event.work, lambda: self._one(event.work, session))
        return session

    async def _one(self, work: Work, session: RequestSession) -> None:
        try:
            await session.open()
            generator = self._fn(session)
            if not hasattr(generator, "__aiter__"):
                running.never_awaited(generator)
                raise TypeError("omni.Streaming needs an async generator: async def fn(session) with yield")
            await running.drain_async(work, self.outbox, generator, self.wait)
        finally:
            self._sessions.pop(work, None)


class RequestSession:
    """`api.Session` of one request. Lives on the stage's event loop."""

    def __init__(
        self,
        work: Work,
        outbox: Outbox,
        sources: tuple[str, ...],
        *,
        waits: Callable[[], None] = lambda: None,
        in_order: bool = False,
        others: bool = True,
    ) -> None:
        """waits: called when the function begins to wait for input.

        in_order: a failure is raised where the function has read all that came before it, and what comes after it is
            dropped, so that the function is cut short at the same place on every rank; else at once.
        others: chunks of other sources may be asked for, and never come.
        """
        self.work = work
        self.early = 0  #: Weight of chunks that are counted as taken and not read.
        self._on_wait = waits
        self._in_order = in_order
        self._others = others
        self._waits = False
        self._opened = asyncio.Event()  #: The request itself is known, or never will be.
        self._outbox = outbox
        self._request: OmniRequest | None = None
        self._payload: StagePayload | None = None
        self._wants_payload = 0  #: Calls of `payload` that wait.
        self._no_payload = False  #: None will come.
        self._open = set(sources)  #: Sources that may still send.
        self._chunks: deque[Chunk] = deque()  #: Chunks in order of arrival.
        #: Chunks of each source that are among ``_chunks`` and count against its window; the others were taken early,
        #: before these.
        self._fresh: dict[str, deque[Chunk]] = {source: deque() for source in sources}
        self._taken_early: dict[int, int] = {}  #: id of a chunk that was taken early -> its weight
        self._changed = asyncio.Event()
        self._failure: RequestError | None = None

    @property
    def request(self) -> OmniRequest:
        assert self._request is not None  # `open`
        return self._request

    async def payload(self) -> StagePayload:
        # Chunks may fill their window while we wait for the payload that their sender sends last: let them come.
        self._wants_payload += 1
        try:
            for chunk in self._chunks:
                self._consume(chunk)
            while self._payload is None:
                if self._no_payload:
                    raise running.no_payload()
                await self._change()
        finally:  # a caller that gives up, and reads on, is a consumer that may lag
            self._wants_payload -= 1
        return self._payload

    async def chunks(self, source: str | None = None) -> AsyncIterator[Chunk]:
        if source is not None and source not in self._fresh and self._fresh and not self._others:
            known = ", ".join(map(repr, self._fresh))
            raise ValueError(f"session.chunks({source!r}): not a stage that streams to this one, which are {known}")
        while True:
            chunk = self._next(source)
            if chunk is not None:
                yield chunk
            elif source not in self._open if source is not None else not self._open:
                return
            else:
                await self._change()

    # --- the engine's side --------------------------------------------------------------------------------------

    def turn(self, *, begun: bool) -> Turn[RequestSession]:
        """The state of this request."""
        held = {source for source, chunks in self._fresh.items() if chunks}
        return Turn(self, begun, self._waits, self._instances(self._open), self._instances(held))

    def take_early(self, source: turns.Source) -> None:
        """Count what is here of ``source`` as taken."""
        fresh = self._fresh[source[0]]
        while fresh:
            self._consume(fresh[0])

    def _instances(self, sources: set[str]) -> frozenset[turns.Source]:
        return frozenset((source, self.work.bindings.get(source, "")) for source in sources)

    def let_go(self) -> None:
        """It will never begin. Any thread may call this."""
        self._payload = None
        self._chunks.clear()

    async def open(self) -> None:
        """Wait until the request is known. Raises: RequestError: a source failed before that."""
        await self._opened.wait()
        if self._request is None or not self._in_order:
            self._raise_failure()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def takes(self) -> bool:
        """Whether what comes for it is still given to the function."""
        return not (self._in_order and self.failed)

    def give_payload(self, payload: StagePayload) -> None:
        self._payload = payload
        self._know(payload.request)

    def give_chunk(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._fresh.setdefault(chunk.source, deque()).append(chunk)
        if self._wants_payload:
            self._consume(chunk)
        self._know(chunk.request)

    def end(self, source: str, request: OmniRequest | None) -> None:
        self._open.discard(source)
        self._know(request)

    def lack_payload(self) -> None:
        self._no_payload = True
        self._changed.set()

    def fail(self, cause: RequestError) -> None:
        self._failure = self._failure or cause
        self._changed.set()
        self._opened.set()

    def _know(self, request: OmniRequest | None) -> None:
        if request is not None and self._request is None:
            self._request = request
            self._opened.set()
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        if self._failure is None:
            self._waits = True
            self._on_wait()
            try:
                await self._changed.wait()
            finally:
                self._waits = False
            if self._in_order:  # what came before a failure is looked for first
                return
        self._raise_failure()

    def _raise_failure(self) -> None:
        """A new exception each time: one that is kept keeps its traceback, whose frames keep this session and its
        chunks, a cycle that would hold their senders' slots until the garbage collector comes by.
        """
        cause = self._failure
        if cause is not None:
            raise RequestError(
                cause.code, cause.message, stage=cause.stage, hook=cause.hook, param=cause.param
            ) from None

    def _next(self, source: str | None) -> Chunk | None:
        if not self._in_order:
            self._raise_failure()
        for index, chunk in enumerate(self._chunks):
            if source is None or chunk.source == source:
                del self._chunks[index]
                self._consume(chunk)
                self.early -= self._taken_early.pop(id(chunk))
                return chunk
        return None

    def _consume(self, chunk: Chunk) -> None:
        if id(chunk) not in self._taken_early:
            self._fresh[chunk.source].popleft()
            weight = self._outbox.consumed(self.work, chunk.source, 1)
            self._taken_early[id(chunk)] = weight
            self.early += weight


def cause(event: events.StreamFailed) -> RequestError:
    """The error as the source reported it to the coordinator: whichever report is first, the client gets the same."""
    failure = event.failure
    if failure is None:
        return RequestError("stage_failed", event.error, stage=event.source)
    return RequestError(failure.code, failure.message, stage=failure.stage, hook=failure.hook, param=failure.param)
