"""The I/O around a `Session`: its socket, the requests that it asks for, the detector. Made for each WebSocket.

Effects are carried out in the order in which the session gave them: requests are begun and ended at once, events wait
for those before them. One task reads the client; each request has a task of its own. Nothing here has a timer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from stage_runtime.coordinator.events import AnswerEvent, RequestHandleApi
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges import errors, threads, web_sockets
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.exchanges.web_sockets import SocketClosed, WebSocket
from stage_runtime.web.realtime import dialects
from stage_runtime.web.realtime.effects import Answer, Cancel, Effect, Listen, Send, StopListening
from stage_runtime.web.realtime.session import Session, SessionFacts
from stage_runtime.web.realtime.speech import detection
from stage_runtime.web.realtime.speech.detection import Detector, Listener
from stage_runtime.web.sound.pool import EncodingSession
from stage_runtime.web.translating.answer_outputs import Outputs
from stage_runtime.wire.values import Audio, Note, Text, ToolCall

_log = logging.getLogger(__name__)
BLOCK_MS: Final = 1000  # of sound that is scored at once: an interruption is acted on before the rest is looked at
PROTOCOL: Final = "realtime"
_BETA_PROTOCOL: Final = "openai-beta.realtime-v1"


class Realtime:
    """GET /v1/realtime."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._detector = Detector()

    async def refuse(self, exchange: Exchange) -> None:
        """A request that asks for no WebSocket."""
        raise web_sockets.upgrade_required(exchange.path)

    async def converse(self, socket: WebSocket) -> None:
        """One session, from its handshake to its end."""
        settings, exchange = self._context.settings, socket.exchange
        offered = socket.protocols
        transcribes = "transcription" in settings.serves
        writes_down = b"intent=transcription" in exchange.scope.get("query_string", b"").split(b"&")
        if writes_down and not transcribes:
            raise InvalidRequest("intent: this pipeline does not serve transcription", param="intent")
        facts = SessionFacts(
            model=settings.model,
            beta=(exchange.header(b"openai-beta") or "").startswith("realtime=") or _BETA_PROTOCOL in offered,
            detects=detection.available(),
            transcribes=transcribes,
            calls_tools="tools" in settings.accepts,
            writes_down=writes_down,
        )
        await socket.accept(PROTOCOL)
        session = Session(facts, lambda prefix: f"{prefix}_{secrets.token_hex(12)}")
        await Room(self._context, socket, session, self._detector, beta=facts.beta).run()


class Room:
    """One session and what it has under way."""

    def __init__(
        self, context: HandlerContext, socket: WebSocket, session: Session, detector: Detector, *, beta: bool
    ) -> None:
        self._context = context
        self._socket = socket
        self._session = session
        self._detector = detector
        self._beta = beta
        self._listener: Listener | None = None
        self._sending = asyncio.Lock()
        #: Events in the session's order. The task with ``_sending`` sends all: theirs may be cancelled.
        self._unsent: deque[dict[str, Any]] = deque()
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False  #: The server drains: the session ends between two turns.
        self._instances: frozenset[str] = frozenset()  #: That answered last: they have caches of the conversation.
        self._count = context.sessions.begin()

    async def run(self) -> None:
        """Converse until the client is gone, or the server drains."""
        try:
            await self._do(self._session.begin())
            self._socket.watch_end(self._end)
            while (message := await self._socket.receive()) is not None:
                await self._take(message)
        except SocketClosed:
            pass
        finally:
            self._count.close()
            self._socket.watch_end(None)
            self._begin_and_end(self._session.close())
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, message: str | bytes) -> None:
        reservation = self._socket.exchange.reservation
        try:
            reservation.expect(self._session.held_nbytes + len(message))
        except RequestError as error:
            await self._do(self._session.refused(error))
            return
        await self._do(self._session.receive(message))
        reservation.keep(self._session.held_nbytes)

    async def _do(self, effects: Sequence[Effect]) -> None:
        """Carry out. Raises: SocketClosed."""
        self._begin_and_end(effects)
        events = [effect.event for effect in effects if isinstance(effect, Send)]
        if events:
            self._unsent.extend(events)
            async with self._sending:
                while self._unsent:
                    await self._send(self._unsent.popleft())
        for effect in effects:
            match effect:
                case StopListening():
                    self._listener = None
                case Listen():
                    await self._listen(effect)
        if self._ending and not self._session.busy:
            await self._socket.close(web_sockets.GOING_AWAY, "the server is going away: connect again")

    async def _send(self, event: dict[str, Any]) -> None:
        shown = dialects.beta(event) if self._beta else event
        try:
            if shown is not None:
                await self._socket.send(msgspec.json.encode(shown).decode())
        except asyncio.CancelledError:  # nothing of it was written: the next task that sends begins with it
            self._unsent.appendleft(event)
            raise
        self._count.sent(event, time.perf_counter())

    def _begin_and_end(self, effects: Sequence[Effect]) -> None:
        """Begins and cancels answers at once: a client that reads slowly keeps no cancelled request alive."""
        for effect in effects:
            match effect:
                case Answer():
                    self._begin(effect)
                case Cancel():
                    running = self._running.pop(effect.key, None)
                    if running is not None:
                        running.cancel(effect.reason)

    async def _listen(self, effect: Listen) -> None:
        if self._listener is None:
            self._listener = self._detector.listener(effect.format)
        for block in _blocks(effect):
            listener = self._listener
            if listener is None:
                return  # what was heard ended the listening
            try:
                scores = await threads.call(listener.take, block)
            except RequestError as error:
                self._listener = None
                await self._do(self._session.refused(error))
                return
            await self._do(self._session.heard(scores))

    def _begin(self, effect: Answer) -> None:
        running = _Running()
        self._running[effect.key] = running
        task = running.task = asyncio.get_running_loop().create_task(self._answer(effect, running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, effect: Answer, running: _Running) -> None:
        """Run one request, and tell the session all that comes of it."""
        key = effect.key
        try:
            await self._run(effect, running)
        except SocketClosed:
            pass  # the reading task ends the session
        except RequestError as error:
            await self._fail(key, error)
        except Exception:
            _log.exception("request %s: realtime failed", key)
            await self._fail(key, errors.internal(key))
        finally:
            self._running.pop(key, None)

    async def _run(self, effect: Answer, running: _Running) -> None:
        manager, session, key = self._context.manager, self._session, effect.key
        hook_result = await manager.call_terminal_stages(effect.request)
        exchange = self._socket.exchange
        running.handle = manager.admit(
            effect.request,
            trace=exchange.trace(),
            trace_state=exchange.trace_state(),
            hook_result=hook_result,
            prefer=self._instances,
        )
        outputs, words = Outputs(), _Words()
        with self._context.codecs.encoder(effect.encoding or "") as encoder:
            encode = encoder if effect.encoding is not None else None
            async for event in running.handle.events():
                if effect.request.kind == "chat":
                    self._instances = running.handle.instances
                await self._show(key, event, outputs, encode, words)
            outputs.check("realtime")
            rest = b"" if encoder.empty else await encoder.finish()
        await self._do(session.sound(key, rest))
        await self._end_of_request(session.completed(key, outputs.usage, outputs.reason(), words.text))

    async def _show(
        self, key: str, event: AnswerEvent, outputs: Outputs, encoder: EncodingSession | None, words: _Words
    ) -> None:
        session = self._session
        for shown in outputs.take(event):
            match shown:
                case Text(text=text):
                    words.text += text
                    await self._do(session.text(key, text))
                case Audio() if encoder is not None:
                    await self._do(session.sound(key, await encoder.write(shown, stage=event.stage)))
                case ToolCall():
                    await self._do(session.called(key, shown))
                case Note():
                    await self._do(session.noted(key, shown))

    async def _fail(self, key: str, error: RequestError) -> None:
        try:
            await self._end_of_request(self._session.failed(key, error))
        except SocketClosed:
            pass

    async def _end_of_request(self, effects: Sequence[Effect]) -> None:
        """Carry out what the end of a request leads to. The words that it brought may have replaced sound."""
        self._socket.exchange.reservation.keep(self._session.held_nbytes)
        await self._do(effects)

    def _end(self) -> None:
        """The server drains."""
        self._ending = True
        task = asyncio.get_running_loop().create_task(self._leave())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leave(self) -> None:
        try:
            await self._do([])
        except SocketClosed:
            pass


class _Words(msgspec.Struct):
    """The text of a request, for a transcript."""

    text: str = ""


class _Running:
    """A request under way."""

    def __init__(self) -> None:
        self.handle: RequestHandleApi | None = None
        self.task: asyncio.Task[None] | None = None

    def cancel(self, reason: str) -> None:
        """End it at every stage. Its task gives nothing more to the session."""
        if self.handle is not None:
            self.handle.abort(reason)
        if self.task is not None:
            self.task.cancel()


def _blocks(effect: Listen) -> Iterator[bytes]:
    step = effect.format.bytes_per_ms * BLOCK_MS
    return (effect.data[at : at + step] for at in range(0, len(effect.data), step))
