"""How many round trips the first message on a new link takes, counted over a proxy. Real `Channels` over TCP.

The proxy holds what comes and passes all of it on at once when both ends are silent: one flight. So a slow machine
counts the same as a fast one. Called by `benchmarks/scale.py` and by the test of the links.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Final

import msgspec

from stage_runtime.sockets.addresses import Security
from stage_runtime.sockets.channels import Channels
from stage_runtime.wire.messages import Deregister, Message, RequestRef

QUIET_S: Final = 0.1  # nothing more comes without an answer
TCP: Final = 1.0  # round trips of TCP's own handshake, which the proxy does not see
PATIENCE_S: Final = 60.0


class FirstMessage(msgspec.Struct, frozen=True):
    """Round trips until a message arrives, beyond those of a message on an open link."""

    curve: bool
    round_trips: float


class Flights:
    """A proxy to one TCP endpoint."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._held: list[tuple[asyncio.StreamWriter, bytes]] = []
        self._came = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.count = 0  #: Times that something was passed on.

    async def __aenter__(self) -> Flights:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._start(self._pass_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        self._start(self._hold(reader, back))
        self._start(self._hold(there, writer))

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self._held.append((writer, data))
                self._came.set()

    async def _pass_on(self) -> None:
        while True:
            await self._came.wait()
            while self._came.is_set():
                self._came.clear()
                await asyncio.sleep(QUIET_S)
            held, self._held = self._held, []
            self.count += 1
            for writer, data in held:
                writer.write(data)

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _End:
    """`sockets.channels.Handler`."""

    def __init__(self, name: str, security: Security | None) -> None:
        self.words: asyncio.Queue[str] = asyncio.Queue()
        # Without heartbeats in the time that this takes: they would be flights.
        self.channels = Channels(
            self, incarnation=name, loop=asyncio.get_running_loop(), security=security, dead_after_s=3 * PATIENCE_S
        )
        self.endpoint = self.channels.bind("tcp://127.0.0.1:*")

    def introduced(self, sender: str, message: Message) -> bool:
        return False

    def received(self, sender: str, message: Message) -> None:
        if isinstance(message, Deregister):
            self.words.put_nowait(message.reason)

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None: ...

    def lost(self, peer: str) -> None: ...


async def measure(curve: bool) -> FirstMessage:
    security = Security(os.urandom(32)) if curve else None
    one, other = _End("one", security), _End("other", security)
    try:
        async with asyncio.timeout(PATIENCE_S), Flights(other.endpoint) as proxy:
            other.channels.connect("one", one.endpoint)
            one.channels.connect("other", proxy.endpoint)
            one.channels.send("other", Deregister("first"))
            assert await other.words.get() == "first"
            first = proxy.count
            one.channels.send("other", Deregister("second"))
            assert await other.words.get() == "second"
            return FirstMessage(curve, TCP + (first - (proxy.count - first)) / 2)
    finally:
        one.channels.close()
        other.channels.close()
