"""One HTTP request and its answer, as routes see them. Raw ASGI: no framework between a stage's output and the socket.

Counts what the log line contains. Knows no request manager and no OpenAI. Made by `middleware.Middleware`, used by the
routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Protocol

from starlette.types import Message, Receive, Scope, Send

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.exchanges.answer_times import AnswerTimes
from stage_runtime.web.exchanges.errors import Headers, RequestRefused, logged
from stage_runtime.web.exchanges.memory_budget import MemoryReservation

KEY: Final = "omni.exchange"  #: The key by which `Middleware` puts it into the ASGI scope.
CLIENT: Final = "omni.client"  #: The key by which `connections` puts the connection there.
_SANE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
_TRACE: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,64})?")
#: Headers with the coding of a body, and their values for none; the server has decoded `chunked`.
_CODINGS: Final = {
    b"content-encoding": frozenset({"", "identity"}),
    b"transfer-encoding": frozenset({"", "identity", "chunked"}),
}
_SECONDS: Final = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
_BODILESS: Final = b""


class ConnectedClient(Protocol):
    """The connection of the client. A task that waits for its end would cost as much as a request's admission."""

    @property
    def received(self) -> bool:
        """The whole request is here: reading it does not wait."""

    def watch(self, gone: Callable[[], object]) -> None:
        """Call ``gone`` once, when the client has disconnected: now, if it has. It is called after the request was
        read.
        """

    def unwatch(self) -> None:
        """Call ``gone`` no more."""

    def watch_half_close(self, poke: Callable[[], object] | None) -> None:
        """Call ``poke`` when the client has closed its sending half: what is written next tells whether it is gone."""


class Claim(Protocol):
    """The report of a request under an ``Idempotency-Key`` on itself (`web.idempotency`)."""

    async def read(self, body: bytes) -> None:
        """The whole body is here. May raise: its request is known."""

    def replied(self, body: bytes, status: int, content_type: bytes, headers: Headers) -> None:
        """The whole answer is about to be sent."""


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, reservation: MemoryReservation) -> None:
        self.scope = scope
        self.reservation = reservation  #: Memory that its data take; `Middleware` gives it back.
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.route = "unknown"  #: The route's pattern, for logs and metrics: never what the client wrote.
        self.request_id: str | None = None
        self.common_headers: Headers = []  #: Headers that every answer to it has.
        self.failure: str | None = None  #: Code of the error that the answer carries, in its status or as an event.
        self.problem: dict[str, Any] = {}  #: Fields of the error in the request's log line.
        self.status = 0
        self.sent_bytes = 0
        self.body_nbytes = 0  #: Bytes of the request's body, as far as it was read.
        self.begun_at = time.perf_counter()
        self.first_byte_at: float | None = None
        self.complete = False  #: The whole answer was sent.
        self.claim: Claim | None = None  #: While it is handled under a key of its client's.
        self.answer_times: AnswerTimes | None = None  #: The times of an answer that is made of a request's events.
        self._client: ConnectedClient = scope[CLIENT]
        self._receive = receive
        self._send = send
        self._headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name, []).append(value)

    @property
    def is_socket(self) -> bool:
        """The handshake of a WebSocket, and what follows it."""
        return bool(self.scope["type"] == "websocket")

    @property
    def started(self) -> bool:
        """The status line is sent: an error can no longer be one."""
        return self.status != 0

    @property
    def outcome(self) -> str:
        """``completed``, the error's code, or ``torn``: an answer that was begun and not ended."""
        return self.failure or ("completed" if self.complete else "torn")

    def note_error(self, error: RequestError) -> None:
        """The answer carries it. The exception itself is not kept: its traceback holds the request's body."""
        self.failure = error.code
        self.problem = logged(error)

    def header(self, name: bytes) -> str | None:
        """A request header by its lower-case name."""
        found = self._headers.get(name)
        return found[0].decode("latin-1") if found else None

    def only_header(self, name: bytes) -> str | None:
        """The same as `header`, for one that must not be repeated.


        Raises: InvalidRequest: it is there twice; a proxy may have read the other one.
        """
        found = self._headers.get(name, ())
        if len(found) > 1:
            raise InvalidRequest(f"{name.decode()}: there twice", param=name.decode())
        return found[0].decode("latin-1") if found else None

    def name_request(self, new_id: Callable[[], str]) -> str:
        """The request's id: the client's own if it is valid, else a new one. Echoed in the answer.

        Raises: InvalidRequest: the header is there twice.
        """
        given = self.only_header(b"x-request-id")
        self.request_id = given if given is not None and _SANE_ID.fullmatch(given) else new_id()
        return self.request_id

    def answer_id(self) -> str:
        """The request's id for the answer. Also of a request that no route took, or whose header is there twice."""
        if self.request_id is None:
            single = len(self._headers.get(b"x-request-id", ())) == 1
            given = self.header(b"x-request-id") if single else None
            self.request_id = given if given and _SANE_ID.fullmatch(given) else f"http-{secrets.token_hex(16)}"
        return self.request_id

    @property
    def id(self) -> str:
        """The request's id, on a route that names its requests (`routing.Route.ids`)."""
        assert self.request_id is not None
        return self.request_id

    def trace(self) -> str | None:
        """The client's `traceparent`, if it is one."""
        given = self.header(b"traceparent")
        return given if given is not None and _TRACE.fullmatch(given) else None

    def trace_state(self) -> str | None:
        """The client's `tracestate`, which may come in several headers."""
        found = self._headers.get(b"tracestate")
        return b",".join(found).decode("latin-1") if found else None

    def timeout_s(self, in_body: float | None) -> float | None:
        """The deadline that the client sets: the shorter of header and body field.

        Raises: InvalidRequest: the header is not a number of seconds, or is there twice.
        """
        given = self.only_header(b"x-request-timeout")
        if given is None:
            return in_body
        seconds = float(given) if _SECONDS.fullmatch(given) else -1.0
        if not 0 < seconds < float("inf"):
            raise InvalidRequest(f"x-request-timeout: {given!r} is not a number of seconds", param="x-request-timeout")
        return seconds if in_body is None else min(seconds, in_body)

    async def body(self, limit: int) -> bytes:
        """The request's body.

        Raises: RequestError: invalid_request (415): it is compressed, which nothing here undoes;
                too_large: as soon as it is known to be over ``limit`` bytes; rate_limited: with it all
                bodies in flight would be too large; deadline (408): it comes too slowly; cancelled: torn off.
        """
        self._check_codings()
        declared = self.header(b"content-length")
        if declared is not None and declared.isascii() and declared.isdigit():
            nbytes = int(declared[:20])
            if nbytes > limit:
                raise _too_large(limit)
            self.reservation.expect(nbytes)
        held, piece = bytearray(), _BODILESS  # no list of pieces: one of a few bytes would take ten times as many
        begun = asyncio.get_running_loop().time()
        more = True
        while more:
            message = await self._next(begun)
            if message["type"] == "http.disconnect":
                raise RequestError("cancelled", "the client disconnected while sending the body")
            piece = message.get("body", _BODILESS)
            self.body_nbytes += len(piece)
            if self.body_nbytes > limit:
                raise _too_large(limit)
            self.reservation.add(len(piece))
            more = message.get("more_body", False)
            if more or held:
                held += piece
        whole = bytes(held) if held else piece
        if self.claim is not None:
            await self.claim.read(whole)
        return whole

    async def body_pieces(self, idle_s: float) -> AsyncGenerator[bytes, None]:
        """The request's body as it comes; none of it is held here, and while the caller waits none of it is read.

        idle_s: how long the client may send nothing.
        Raises: RequestError: as `body`, without a limit; deadline (408): it was idle for too long.
        """
        self._check_codings()
        more = True
        while more:
            message = await self._within(idle_s, f"nothing of the body came within {idle_s:g} s")
            if message["type"] == "http.disconnect":
                raise RequestError("cancelled", "the client disconnected while sending the body")
            piece = message.get("body", _BODILESS)
            self.body_nbytes += len(piece)
            more = message.get("more_body", False)
            if piece:
                yield piece

    async def _within(self, seconds: float, problem: str) -> Message:
        try:
            async with asyncio.timeout(seconds):
                return await self._receive()
        except TimeoutError:
            raise RequestRefused(408, "deadline", problem) from None

    def _check_codings(self) -> None:
        """Raises: Refused: the body is not sent as it is. Read as it comes, it would be other data than was meant."""
        for name, plain in _CODINGS.items():
            if name not in self._headers:
                continue
            given = [value.decode("latin-1") for value in self._headers[name]]
            codings = {coding.strip().lower() for value in given for coding in value.split(",")}
            if codings - plain:
                problem = f"{name.decode()}: {', '.join(given)[:80]}: send the body uncompressed"
                raise RequestRefused(415, "invalid_request", problem, param=name.decode())

    async def _next(self, begun: float) -> Message:
        if self._client.received:
            return await self._receive()
        body_timeout_s = self.reservation.body_timeout_s(self.body_nbytes)
        try:
            async with asyncio.timeout_at(begun + body_timeout_s):
                return await self._receive()
        except TimeoutError:
            problem = f"{self.body_nbytes} bytes of the body came within {body_timeout_s:g} s"
            raise RequestRefused(408, "deadline", problem) from None

    def watch(self, gone: Callable[[], object]) -> None:
        """Call ``gone`` when the client disconnects before the answer is out. It is called after `body`; `unwatch` must
        follow.
        """
        self._client.watch(gone)

    def unwatch(self) -> None:
        if not self.complete:  # with the answer the connection has become that of the next request
            self._client.unwatch()

    def watch_half_close(self, poke: Callable[[], object] | None) -> None:
        """Call ``poke`` when the client sends nothing more: it writes something; None: no more."""
        self._client.watch_half_close(poke)

    async def send(self, message: Message) -> None:
        """Starlette's own responses are sent by this, too."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            named = (b"x-request-id", self.answer_id().encode())
            message = {**message, "headers": [*message["headers"], *self.common_headers, named]}
        else:
            body = message.get("body", _BODILESS)
            if body and self.first_byte_at is None:
                self.first_byte_at = time.perf_counter()
            self.sent_bytes += len(body)
            self.complete = not message.get("more_body", False)
        await self._send(message)

    async def reply(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = b"application/json",
        headers: Headers | None = None,
    ) -> None:
        """The whole answer."""
        if self.claim is not None:
            self.claim.replied(body, status, content_type, list(headers or ()))
        fixed = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": [*fixed, *(headers or ())]})
        await self.send({"type": "http.response.body", "body": body})

    async def reply_empty(self, headers: Headers) -> None:
        """204: an answer that has no body, and no length."""
        await self.send({"type": "http.response.start", "status": 204, "headers": headers})
        await self.send({"type": "http.response.body", "body": _BODILESS})

    async def start(self, content_type: bytes, headers: Headers) -> None:
        """The head of an answer that comes in pieces; its status is 200."""
        await self.send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type), *headers]}
        )

    async def write(self, body: bytes) -> None:
        """One more piece; waits while the client reads slower than it is written to."""
        if self.first_byte_at is None:
            self.first_byte_at = time.perf_counter()
        self.sent_bytes += len(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def close_socket(self, code: int, reason: str) -> None:
        """Close the WebSocket that the exchange is, unless it is closed."""
        with contextlib.suppress(Exception):  # uvicorn raises errors of its own, and those of its library
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": _BODILESS})


def _too_large(limit: int) -> RequestError:
    return RequestError("too_large", f"the body is larger than {limit} bytes")
