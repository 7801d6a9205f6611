"""One HTTP connection, with limits that uvicorn's protocol has not: of heads, of waiting, of readers that never read.

Here: bytes and times of a connection. Not here: the limits (`connection_limits`), a request's body (`exchange`),
who may ask (`middleware`, `origins`). Made by `server`, one for each client that connects. A head is the request line
and headers.

uvicorn limits neither a head nor the time that one takes, nor how many requests are sent ahead; reads the rest of a
refused body for ever; waits for ever for a client that does not read. One timer (`IdleConnections`) looks at all
connections instead of one for each.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, Final, NoReturn

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from omnipipeline_spec.types.routes import SOCKETS
from stage_runtime.errors import RequestError
from stage_runtime.sockets.endpoints.limits import allowed_descriptors
from stage_runtime.web.exchanges.errors import RequestRefused
from stage_runtime.web.exchanges.exchange import CLIENT
from stage_runtime.web.listening import socket_connections
from stage_runtime.web.listening.connection_drain import ConnectionDrain
from stage_runtime.web.listening.limits import half_closed, refusals
from stage_runtime.web.listening.limits.connection_limits import (
    FEW,
    ConnectionLimit,
    ConnectionLimits,
)
from stage_runtime.web.listening.limits.half_closed import HalfClosed
from stage_runtime.web.listening.limits.stalled_readers import StalledReader
from stage_runtime.web.listening.socket_connections import SocketConnection

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent

_log = logging.getLogger(__name__)
#: uvicorn warns of each request that it cannot read; anybody could fill the log. Its errors are shown.
_uvicorn_log = logging.getLogger("uvicorn.error.connections")
_uvicorn_log.setLevel(logging.ERROR)


#: Paths of WebSockets. Any other request to upgrade is answered as if it asked for nothing.
_SOCKETS: Final = frozenset(one.path.encode() for one in SOCKETS)


class Phase(enum.Enum):
    """The event that a connection waits for."""

    HEAD = enum.auto()  #: The rest of a head; of a new connection the first one.
    ANSWER = enum.auto()  #: The application. `exchange` limits the time for the body.
    DISCARD = enum.auto()  #: The rest of a body that is not read.
    IDLE = enum.auto()  #: The next request.
    REFUSED = enum.auto()  #: Wait for the client to close: closing at once could lose the answer.


class _ReadControl(FlowControl):
    """uvicorn's, which reads on for each request that is begun or answered, however many are read and wait."""

    def __init__(self, transport: asyncio.Transport, pipelined: Sized) -> None:
        super().__init__(transport)
        self._pipelined = pipelined

    def resume_reading(self) -> None:
        """Not while requests wait. The one that is being answered then needs nothing: it was read before them."""
        if not self._pipelined:
            super().resume_reading()


class _Unchunked:
    """An application that answers HTTP/1.0: it has no chunks (RFC 9112, 6.1), which uvicorn sends all the same.

    An answer without a length ends with its connection, which uvicorn closes.
    """

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._endless = False

    async def __call__(self, scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_plain(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.start":
                self._endless = all(name != b"content-length" for name, _ in message["headers"])
                if self._endless:
                    self._cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and self._endless:
                self._cycle.expected_content_length = len(message["body"])
            await send(message)

        await self._app(scope, receive, send_plain)


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol, limited."""

    limits: ConnectionLimits = ConnectionLimits()
    limit: ConnectionLimit  #: The limit of the server; one object for all of its connections.
    drain: ConnectionDrain  #: The server's, as ``limit``.
    socket_class: type[SocketConnection]  #: The protocol that takes over a WebSocket.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _ReadControl(transport, self.pipeline)
        self.logger = _uvicorn_log
        self._phase = Phase.HEAD
        self._since = self.loop.time()
        self._in_message = False  #: It is between a request's first byte and the end of its body.
        self._in_body = False
        self._wire_nbytes = self._head_nbytes = self._head_count = self._body_nbytes = 0
        #: The error of a request that ended the parser, and its status.
        self._refusal: tuple[RequestError, int] | None = None
        self._answering: RequestResponseCycle | None = None  #: ``cycle`` is the request that was read last.
        self._last_told = False  #: The answer that comes next, or an earlier state of it, was to be the last.
        self._gone: Callable[[], object] | None = None  #: See `watch`.
        self._stalled = StalledReader(self.transport, self.limits)
        self._half_closed: HalfClosed | None = None  #: Its client sends nothing more, and may wait for answers.
        self._poke: Callable[[], object] | None = None  #: See `watch_half_close`.
        self.unread_since: float | None = None  #: It has been given more than it takes at once; None: it has not.
        if len(self.connections) > self.limit.most:
            self._refuse_connection()
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disconnect()
        self.scope = None  # type: ignore[assignment]  # it holds this connection
        self.drain.lost(len(self.connections))

    # --- exchange.Client ----------------------------------------------------------------------------------------

    @property
    def received(self) -> bool:
        """Requests come one after the other: with no other one begun, the one that is being answered is complete."""
        return not self._in_message

    def watch(self, gone: Callable[[], object]) -> None:
        self._gone = gone
        if self._over():
            self._notify_gone()
        else:
            self.flow.resume_reading()  # a body pauses it, and a connection that is not read is not seen to end

    def unwatch(self) -> None:
        self._gone = None

    def watch_half_close(self, poke: Callable[[], object] | None) -> None:
        self._poke = poke

    def _disconnect(self) -> None:
        """Nothing is answered any more: neither the request that is being answered nor those behind it."""
        self.pipeline.clear()
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.disconnected = True
            answering.message_event.set()
        self._notify_gone()

    def _notify_gone(self) -> None:
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    # --- what comes in ------------------------------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. True: it may wait for an answer, so the connection stays open for that."""
        if self.scheme == "https":
            return False  # an alert of TLS, or a lost connection: asyncio keeps neither open
        answering = self._answering
        if self._over() or answering is None or (self._in_message and self.cycle is answering):
            return False
        if self._half_closed is not None:
            return True
        if answering.response_started and self._poke is None:
            return False  # in the middle of an answer nothing can be written that would tell
        self._half_closed = HalfClosed(self.transport, self.loop, self.transport.abort)
        if self._may_probe():
            self._half_closed.probe()
        elif answering.response_started and self._poke is not None:
            self._poke()
            self._half_closed.look_soon()
        return True

    def _may_probe(self) -> bool:
        """HTTP/1.0 has no interim answers."""
        answering = self._answering
        return answering is not None and not answering.response_started and answering.scope["http_version"] != "1.0"

    def data_received(self, data: bytes) -> None:
        if self._over():
            return
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        self._wire_nbytes += len(data)
        self._feed(data)
        if self._over() or not self._in_message:
            return
        if not self._in_body:
            if self._wire_nbytes > self.limits.head_nbytes:  # a header that does not end yet
                self._refuse(*self._head_too_large())
        elif self._wire_nbytes - self._head_nbytes - self._body_nbytes > self.limits.framing_nbytes:
            self._refuse(RequestError("invalid_request", "the chunk headers exceed the limit for this body"), 400)

    def _feed(self, data: bytes) -> None:
        """Pass input to the parser. It stops at a head that asks for another protocol, and takes no body of it."""
        try:
            while True:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as wish:
                    if self._opens_socket():
                        self._hand_over(data[wish.args[0] :])
                        return
                    data = self._head_without_upgrade() + data[wish.args[0] :]
                    self.parser = _parser(self)
        except httptools.HttpParserError:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CLIENT] = self  # type: ignore[typeddict-unknown-key]
        self._in_message, self._in_body = True, False
        self._head_nbytes = self._head_count = self._body_nbytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer: it comes too late to mean anything
        super().on_header(name, value)
        self._head_count += 1
        self._count_head(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._end_parser(RequestError("invalid_request", "this is not a proxy"), 400)
            return  # it is read again: see `_feed`
        if len(self.pipeline) >= self.limits.pipelined:
            problem = f"{self.limits.pipelined} requests of this connection wait for the answer to another one"
            self._end_parser(RequestError("rate_limited", problem, retry_after_s=1.0), 429)
        super().on_headers_complete()
        self.announce_end()  # of the request that is answered, which is not the last one any more
        self._in_body = True
        self._enter(Phase.ANSWER)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering, self._last_told = cycle, False
        self.announce_end()
        super()._start_asgi_task(cycle, _Unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def announce_end(self) -> None:
        """While the server drains, the answer to the last request that is here says that its connection ends."""
        answering = self._answering
        if not self.drain.begun or answering is None or answering.response_started:
            return
        if answering.keep_alive or self._last_told:  # else its client wants the connection to end with this answer
            answering.keep_alive, self._last_told = bool(self.pipeline), True

    def on_body(self, body: bytes) -> None:
        self._body_nbytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_message = False
        self._wire_nbytes = 0
        if self._phase is Phase.DISCARD:
            self._enter(Phase.IDLE)

    def on_response_complete(self) -> None:
        """The same as uvicorn's, without its timer: `sweep` ends idle connections."""
        self.server_state.total_requests += 1
        self._answering = self._gone = None
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._half_closed is not None:
            self.transport.close()
            return
        else:
            self._enter(Phase.IDLE if not self._in_message else Phase.DISCARD if self._in_body else Phase.HEAD)
        self.flow.resume_reading()

    def _head_without_upgrade(self) -> bytes:
        """The head that was read: clients that ask for another protocol (``curl --http2``) are answered in this one."""
        return self._head(without=b"upgrade")

    def _head(self, without: bytes = b"") -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != without]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _opens_socket(self) -> bool:
        """A handshake of a WebSocket that there is, with no request before it that waits for its answer."""
        asks = self._get_upgrade() == b"websocket" and self.parser.get_method() == b"GET"
        known = self.url.partition(b"?")[0] in _SOCKETS and self.parser.get_http_version() == "1.1"
        return asks and known and self._answering is None and not self.pipeline

    def _hand_over(self, rest: bytes) -> None:
        """The connection is a WebSocket's from now on. rest: what has come behind the head."""
        self.connections.discard(self)
        made = self.socket_class(self.config, self.server_state, self.app_state)
        made.connection_made(self.transport)
        self.transport.set_protocol(made)
        self._phase = Phase.REFUSED  # this object reads nothing any more
        self._in_message = False
        made.data_received(self._head())
        if rest and not self.transport.is_closing():
            made.data_received(rest)

    def _count_head(self, nbytes: int) -> None:
        self._head_nbytes += nbytes
        if self._head_nbytes > self.limits.head_nbytes or self._head_count > self.limits.head_count:
            self._end_parser(*self._head_too_large())

    def _end_parser(self, error: RequestError, status: int) -> NoReturn:
        """Called in a callback of the parser, which reads nothing behind this. `send_400_response` is called next."""
        self._refusal = error, status
        raise ValueError(error.message)

    def _head_too_large(self) -> tuple[RequestError, int]:
        limits = self.limits
        problem = f"request line and headers are over {limits.head_nbytes} bytes, or there are over {limits.head_count}"
        return RequestError("too_large", problem), 431

    # --- what is refused before there is a request ---------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """A request that httptools cannot read gets an error of ours."""
        if self._refusal is not None:
            self._refuse(*self._refusal)
        else:
            self._refuse(RequestError("invalid_request", "no HTTP request that can be read"), 400)

    def _refuse_connection(self) -> None:
        """There are too many."""
        limit = self.limit
        if not limit.logged:
            limit.logged = True
            _log.warning("clients are refused (logged once): %s; %s", limit.reason, limit.advice)
        self._refuse(RequestError("rate_limited", limit.reason, retry_after_s=1.0), 429)

    def _refuse(self, error: RequestError, status: int) -> None:
        """Send the error and close; an answer that has begun is only cut off."""
        if self._answering is not None and self._answering.response_started:
            self.transport.abort()
            return
        self.transport.write(refusals.encoded(error, status))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS, where a connection has no half: what is written is sent first, and the rest is read
            self.transport.close()
        self._disconnect()  # a request that was begun: what follows it, or its body, has turned out to be none
        self.flow.resume_reading()
        self._enter(Phase.REFUSED)

    # --- what takes too long ------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_since = None

    def cut_off(self, why: str) -> None:
        """Close it without sending what the client has not taken."""
        _log.info("closing a client's connection: it %s", why)
        self.transport.abort()

    def sweep(self, now: float) -> None:
        """End the connection if its time is over."""
        unwatched = self.pipeline and self._half_closed is None  # while requests wait the connection is not read
        if unwatched and half_closed.has_ended(self.transport) and not self.eof_received():
            self.transport.close()
        if self._half_closed is not None:
            self._half_closed.sweep(now, may_probe=self._may_probe())
        waited = now - self._since
        match self._phase:
            case _ if self.transport.is_closing():
                pass
            case Phase.HEAD | Phase.IDLE if not self._wire_nbytes and self.drain.over(now, self._since, self.transport):
                self.transport.close()
            case Phase.HEAD if waited > self.limits.head_s:
                if self._wire_nbytes:
                    problem = f"no whole head within {self.limits.head_s:g} s"
                    self._refuse(RequestRefused(408, "deadline", problem), 408)
                else:
                    self.transport.close()  # a connection opened in advance: no request waits for an answer
            case Phase.IDLE if waited > self._idle_s():
                self.transport.close()
            case Phase.DISCARD | Phase.REFUSED if waited > self.limits.discard_s:
                self.transport.close()
            case _:
                pass
        self._sweep_reader(now)

    def _idle_s(self) -> float:
        few = len(self.connections) <= self.limit.most * FEW
        return self.limits.idle_s if few else min(self.limits.idle_s, self.limits.crowded_idle_s)

    def _sweep_reader(self, now: float) -> None:
        """Cut off a client that takes too little of what is there for it."""
        waits = self.flow.write_paused or self.transport.is_closing() or self._phase is not Phase.ANSWER
        if self._stalled.for_too_long(now, waits=waits):
            self.cut_off(f"did not read for {self.limits.write_s:g} s")

    def _over(self) -> bool:
        """Discard all further input."""
        return self.transport.is_closing() or self._phase is Phase.REFUSED

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()


def _parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """The parser, made as uvicorn makes its own."""
    made = httptools.HttpRequestParser(protocol)
    made.set_dangerous_leniencies(lenient_data_after_close=True)
    return made


def limited(limits: ConnectionLimits) -> type[HttpConnection]:
    """`HttpConnection` with these limits: uvicorn makes its protocols itself."""
    both: dict[str, Any] = {"limits": limits, "drain": ConnectionDrain()}
    own = {"limit": ConnectionLimit(limits, allowed_descriptors()), "socket_class": socket_connections.limited(both)}
    return type("HttpConnection", (HttpConnection,), both | own)
