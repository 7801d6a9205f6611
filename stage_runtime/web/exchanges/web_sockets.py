"""A WebSocket as the routes see it, over raw ASGI. Made by `routing`, used by `realtime` and `spoken`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from starlette.types import Receive, Send

from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges.errors import RequestRefused
from stage_runtime.web.exchanges.exchange import CLIENT, Exchange

#: Prefix of the subprotocol by which OpenAI's browsers send a key: a page cannot set a header of the handshake.
KEY_PROTOCOL: Final = "openai-insecure-api-key."
DONE: Final = 1000
GOING_AWAY: Final = 1001
INTERNAL_ERROR: Final = 1011


class SocketClosed(Exception):
    """The client is gone: nothing is sent any more."""


class SocketClient(Protocol):
    """The connection, as a socket's route needs it."""

    def watch_end(self, ending: Callable[[], object] | None) -> None:
        """Call ``ending`` once the server drains: now, if it does. None: no more."""


class WebSocket:
    """One accepted or refused connection. One task reads; any may write."""

    def __init__(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        self.exchange = exchange
        self._receive = receive
        self._send = send
        self._closed = False

    @property
    def protocols(self) -> Sequence[str]:
        """The subprotocols that the client offers."""
        offered: Sequence[str] = self.exchange.scope.get("subprotocols", ())
        return offered

    def watch_end(self, ending: Callable[[], object] | None) -> None:
        client: SocketClient = self.exchange.scope[CLIENT]
        client.watch_end(ending)

    async def accept(self, known: str | None) -> None:
        """known: the subprotocol to choose if it is offered. A browser that offers some ends a connection for which
        none is chosen: then it is the first one, that with a key only where no other is there.

        Raises: SocketClosed.
        """
        protocol = min(self.protocols, key=lambda one: (one != known, one.startswith(KEY_PROTOCOL)), default=None)
        head = [*self.exchange.common_headers, (b"x-request-id", self.exchange.answer_id().encode())]
        await self._write({"type": "websocket.accept", "subprotocol": protocol, "headers": head})
        self.exchange.status = 101

    async def receive(self) -> str | bytes | None:
        """The next message; None: the client is gone."""
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self._closed = True
                return None
            if message["type"] == "websocket.receive":
                text = message.get("text")
                return message["bytes"] if text is None else str(text)

    async def send(self, text: str) -> None:
        """Waits while the client reads slower than it is written to. Raises: SocketClosed."""
        self.exchange.sent_bytes += len(text)
        await self._write({"type": "websocket.send", "text": text})

    async def send_bytes(self, data: bytes) -> None:
        """The same as `send`, for a binary message."""
        self.exchange.sent_bytes += len(data)
        await self._write({"type": "websocket.send", "bytes": data})

    async def close(self, code: int, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        await self._write({"type": "websocket.close", "code": code, "reason": reason})

    async def _write(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # uvicorn raises an OSError of its own, or what its library raises
            self._closed = True
            raise SocketClosed(str(error)) from error


def refusing(send: Send) -> Send:
    """``send`` of a handshake for an answer of HTTP: an error is one, with its status and body."""

    async def send_refusal(message: Any) -> None:
        if message["type"].startswith("http.response."):
            message = {**message, "type": f"websocket.{message['type']}"}
        await send(message)

    return send_refusal


def key_of(exchange: Exchange) -> str | None:
    """The API key that a handshake's subprotocols name."""
    offered = exchange.scope.get("subprotocols", ())
    return next((one[len(KEY_PROTOCOL) :] for one in offered if one.startswith(KEY_PROTOCOL)), None)


def upgrade_required(path: str) -> RequestError:
    """The answer to a request for a WebSocket's path that is not a handshake."""
    return RequestRefused(426, "invalid_request", f"{path} is a WebSocket: expected a handshake, Upgrade: websocket")
