"""A program that asks over HTTP as fast as it is answered: ``client.py URL CONCURRENCY TOTAL < body``.

Prints requests per second. It parses no more than it must, since it shares the processors with what it measures.
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import uvloop


class Connection(asyncio.Protocol):
    """One keep-alive connection: a request, its whole answer, the next request."""

    def __init__(self, request: bytes, left: list[int], ended: asyncio.Future[None]) -> None:
        self._request = request
        self._left = left  #: Requests that no connection has begun; shared.
        self._ended = ended
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._next()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._ended.set_exception(SystemExit(self._answer.decode(errors="replace")[:500]))
            return
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        if len(body) >= length:
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(error or EOFError("the server closed the connection"))

    def _next(self) -> None:
        self._answer = b""
        if self._left[0] > 0:
            self._left[0] -= 1
            self._transport.write(self._request)
        else:
            self._ended.set_result(None)
            self._transport.close()


async def main(url: str, concurrency: int, total: int, body: bytes) -> None:
    where = urlsplit(url)
    assert where.hostname is not None and where.port is not None
    head = f"POST {where.path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    loop = asyncio.get_running_loop()
    left = [total]
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(concurrency)]
    began = time.perf_counter()
    for end in ends:
        await loop.create_connection(partial(Connection, request, left, end), where.hostname, where.port)
    await asyncio.gather(*ends)
    print(total / (time.perf_counter() - began))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.stdin.buffer.read()))
