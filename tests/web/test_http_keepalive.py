"""How long a connection may rest: with a clock of the test's, over a transport in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from stage_runtime.web.listening.connections import HttpConnection, limited
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimits

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
MOST = 8


class Wire(asyncio.Transport):
    """Takes what is written, and is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def resume_reading(self) -> None:
        pass


async def empty(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def at_rest(count: int, limits: ConnectionLimits) -> list[tuple[HttpConnection, Wire]]:
    """So many connections of one server whose first request has been answered."""
    config = uvicorn.Config(empty, log_config=None, access_log=False)
    config.load()
    state, made = ServerState(), []
    for _ in range(count):
        connection, wire = limited(limits)(config, state, {}), Wire()
        connection.connection_made(wire)
        connection.data_received(GET)
        made.append((connection, wire))
    await asyncio.gather(*state.tasks)
    assert all(wire.written.startswith(b"HTTP/1.1 200") for _, wire in made)
    return made


@pytest.mark.parametrize(
    ("count", "seconds", "closed"),
    [
        (1, 600, False),  # Google's load balancers keep a connection so long, and send the next request on it
        (MOST // 4, 600, False),
        (MOST // 4, 640, True),
        (MOST // 4 + 1, 70, False),  # nginx and ALB: 60 s
        (MOST // 4 + 1, 80, True),
    ],
)
async def test_a_connection_may_rest_longer_than_balancers_keep_it_while_connections_are_few(
    count: int, seconds: float, closed: bool
) -> None:
    made = await at_rest(count, ConnectionLimits(connections=MOST))
    now = asyncio.get_running_loop().time()
    for connection, _ in made:
        connection.sweep(now + seconds)
    assert [wire.closed for _, wire in made] == [closed] * count
