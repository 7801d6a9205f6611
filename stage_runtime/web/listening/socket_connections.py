"""One WebSocket's connection: uvicorn's protocol without its timers, watched as all connections are.

`connections` hands a connection over here after its handshake's head. Here: bytes of the connection, its end. Not here:
messages (`web_sockets`), what they mean (`realtime`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import SecurityError

from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges.exchange import CLIENT, KEY
from stage_runtime.web.exchanges.memory_budget import MemoryReservation
from stage_runtime.web.listening.connection_drain import ConnectionDrain
from stage_runtime.web.listening.limits import refusals
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimits
from stage_runtime.web.listening.limits.stalled_readers import StalledReader

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
    from websockets.frames import Frame

MESSAGE_NBYTES: Final = 32 << 20  # of one message: a longer one ends the connection, as its rest cannot be skipped
FRAME_NBYTES: Final = 64  # of a frame beside its data: a message may have any number of empty ones
TRY_AGAIN_LATER: Final = 1013  # a close code of the registry that RFC 6455 begins
#: A client that has vanished is found by its kernel's silence: probes of TCP need no timer of ours.
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
_log = logging.getLogger(__name__)
#: uvicorn logs each handshake; `middleware` logs the whole exchange.
_uvicorn_log = logging.getLogger("uvicorn.error.sockets")
_uvicorn_log.setLevel(logging.ERROR)
#: A client whose text is not UTF-8 is told by the close code; its traceback would fill the log.
_uvicorn_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError)))


class SocketConnection(WebSocketsSansIOProtocol):
    """uvicorn's protocol: watched for its end and for a client that does not read."""

    limits: ConnectionLimits
    drain: ConnectionDrain

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.logger = _uvicorn_log
        self.unread_since: float | None = None
        self._stalled = StalledReader(self.transport, self.limits)
        self._ending: Callable[[], object] | None = None
        self._frames_nbytes = 0  #: Bytes of a message that has begun, in its frames so far.
        self._waiting: deque[int] = deque()  #: Sizes of the messages that are whole and that nobody has read.
        self._waiting_nbytes = 0  #: Their sum.
        self._untaken: MemoryReservation | None = None  #: The share of all that nobody has read.
        self._early = b""  #: Frames that came before the handshake was answered, by which it is known what they are.
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._ending = None
        if self._untaken is not None:
            self._untaken.release()
            self._untaken = None
        self.drain.lost(len(self.connections))

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated and not self.handshake_complete:
            self._early += data
            self.transport.pause_reading()
            return
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse(self.conn.handshake_exc)
        if self.handshake_initiated and self.conn.close_sent is None:
            self._count_untaken()

    def handle_text(self, event: Frame) -> None:
        self._frames_nbytes = FRAME_NBYTES + len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._frames_nbytes = FRAME_NBYTES + len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._frames_nbytes += FRAME_NBYTES + len(event.data)
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self._waiting.append(self._frames_nbytes)
        self._waiting_nbytes += self._frames_nbytes
        self._frames_nbytes = 0
        super().send_receive_event_to_app()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if message["type"] == "websocket.receive" and self._waiting:
            self._waiting_nbytes -= self._waiting.popleft()
            if self._untaken is not None:
                self._untaken.keep(self._untaken_nbytes())
        return message

    def _untaken_nbytes(self) -> int:
        return len(self.conn.reader.buffer) + self._frames_nbytes + self._waiting_nbytes

    def _count_untaken(self) -> None:
        """A message counts as bodies do from its first byte on. One that finds no room ends the connection."""
        nbytes = self._untaken_nbytes()
        if self._untaken is None:
            if not nbytes or KEY not in self.scope:
                return
            self._untaken = self.scope[KEY].reservation.beside()  # type: ignore[typeddict-item]
        try:
            self._untaken.hold(nbytes)
        except RequestError as error:
            self.conn.fail(TRY_AGAIN_LATER, error.message)
            self.handle_parser_exception()

    def _refuse(self, problem: Exception) -> None:
        """The head is one of HTTP, but not of a handshake. uvicorn would neither answer nor end the connection."""
        if self.transport.is_closing():
            return
        long = isinstance(problem, SecurityError) or isinstance(problem.__cause__, SecurityError)
        reason = f"no handshake of a WebSocket that can be read: {problem.__cause__ or problem}"
        error = RequestError("too_large" if long else "invalid_request", reason)
        self.transport.write(refusals.encoded(error, 431 if long else 400))
        self.handshake_complete = True  # uvicorn would answer once more when the server ends
        self.transport.close()

    async def run_asgi(self) -> None:
        self.scope[CLIENT] = self  # type: ignore[typeddict-unknown-key]
        try:
            await super().run_asgi()
        finally:
            self.scope.clear()  # type: ignore[attr-defined]  # it holds this connection

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.accept" and self._early and not self.transport.is_closing():
            early, self._early = self._early, b""
            self.transport.resume_reading()
            self.data_received(early)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # by an answer of HTTP; uvicorn would log a handshake that was forgotten

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_since = None

    # --- web_sockets.SocketClient ---------------------------------------------------------------------------------

    def watch_end(self, ending: Callable[[], object] | None) -> None:
        self._ending = ending
        self.announce_end()

    # --- what the server asks of all connections ------------------------------------------------------------------

    def announce_end(self) -> None:
        if self.drain.begun and self._ending is not None:
            self._ending()

    def sweep(self, now: float) -> None:
        waits = self.unread_since is not None or self.transport.is_closing()
        if self._stalled.for_too_long(now, waits=waits):
            self.cut_off(f"did not read for {self.limits.write_s:g} s")

    def cut_off(self, why: str) -> None:
        _log.info("closing a client's WebSocket: it %s", why)
        self.transport.abort()


def limited(shared: dict[str, Any]) -> type[SocketConnection]:
    """The class of WebSocket connections that share the limits and the drain of a server."""
    return type("SocketConnection", (SocketConnection,), shared)
