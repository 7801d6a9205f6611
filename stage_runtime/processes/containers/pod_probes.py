"""HTTP for kubelets and Prometheus, in a few lines: PID 1 of a stage pod has to stay small.

Here: GET and HEAD of fixed paths, one request per connection, `MAX_CONNECTIONS` at a time. Not here: what is answered
(`pod`), anything that clients of the pipeline see (`web`). Called by `pod`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import TracebackType

import msgspec

from stage_runtime.errors import ConfigurationError
from stage_runtime.sockets.endpoints import hosts

MAX_HEAD = 8 << 10  # kubelets and scrapers send a few hundred bytes
MAX_CONNECTIONS = 64  # a kubelet and a few scrapers have one each; others could use up the pod's descriptors
BACKLOG = 100
TIMEOUT_S = 5.0  # for one request and its answer


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a path now."""

    body: str
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"


Routes = Mapping[str, Callable[[], Reply]]


class ProbeServer:
    """Serves ``routes`` as long as it is open."""

    def __init__(self, routes: Routes, *, host: str, port: int) -> None:
        self._routes, self._host, self._port = routes, host, port
        self._open = 0  #: Connections that are being answered.

    async def __aenter__(self) -> ProbeServer:
        """Listen. Raises: ConfigurationError: the address cannot be bound; names it."""
        try:
            listener = hosts.listener(self._host, self._port, backlog=BACKLOG)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}"
            ) from error
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_HEAD)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    @property
    def port(self) -> int:
        """The bound port; of interest when it was to be any free one."""
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._open += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client sent no whole request in time, or has gone
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _encode(Reply(body="no HTTP/1 request\n", status=HTTPStatus.BAD_REQUEST), with_body=True)
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _encode(Reply(body="read only\n", status=HTTPStatus.METHOD_NOT_ALLOWED), with_body=True)
        route = self._routes.get(target.partition("?")[0])
        missing = Reply(body=f"there is {', '.join(self._routes)}\n", status=HTTPStatus.NOT_FOUND)
        return _encode(route() if route is not None else missing, with_body=method == "GET")


def _encode(reply: Reply, *, with_body: bool) -> bytes:
    body = reply.body.encode()
    head = (
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\ncontent-type: {reply.content_type}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
