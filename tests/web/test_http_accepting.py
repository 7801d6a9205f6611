"""Clients that come all at once: how many the server takes before it can refuse them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest
import uvloop

from stage_runtime.web.listening.accepting import Listener
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimit, ConnectionLimits
from tests.web.running import PATIENCE_S

BURST = 300
FEW = 100  # of three turns: a connection is accepted in one, begins in the next one, and is closed in a third one


class Refusing(asyncio.Protocol):
    """Closes each connection as it begins, and counts descriptors."""

    open: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.open.append(descriptors())
        transport.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def burst() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2 * BURST))
        limit = ConnectionLimit(ConnectionLimits(), 1 << 16)
        for _ in range(BURST):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            assert client.connect_ex(listening.getsockname()) in (0, 115)  # EINPROGRESS
        before = descriptors()
        listener = Listener(listening, Refusing, None, timeout_s=1.0, limit=limit)
        async with asyncio.timeout(PATIENCE_S):
            while len(Refusing.open) < BURST:
                await asyncio.sleep(0.001)
        await listener.wait_closed()
    assert max(Refusing.open) - before <= FEW


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_burst_of_clients_takes_few_descriptors_until_they_are_refused(factory: object) -> None:
    Refusing.open = []
    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        runner.run(burst())
