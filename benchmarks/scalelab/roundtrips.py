"""How many round trips the first message on a new link takes, counted over proxies. Real `Channels` over TCP.

The proxies hold what comes and pass all of it on at once when all ends are silent: one flight, half a round trip. So a
slow machine counts the same as a fast one. Called by `benchmarks/scale.py` and by the test of the links.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Final

import msgspec

from stage_runtime.sockets.channels import Channels, LinkTimes
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import Deregister, Detour, Message

QUIET_S: Final = 0.1  # nothing more comes without an answer
TCP: Final = 1.0  # round trips of TCP's own handshake, which the proxy does not see
PATIENCE_S: Final = 60.0


class FirstMessage(msgspec.Struct, frozen=True):
    """Round trips until a message arrives, beyond those of a message on an open link."""

    curve: bool
    round_trips: float
    detour: bool = False  #: Frames go by a coordinator, as between instances; else by the link's own connection alone.


class Flights:
    """Proxies to TCP endpoints, which pass on at the same moments."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._held: list[tuple[asyncio.StreamWriter, bytes]] = []
        self._came = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.count = 0  #: Times that something was passed on.

    async def __aenter__(self) -> Flights:
        self._start(self._pass_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def to(self, endpoint: str) -> str:
        """The endpoint of a proxy to that one."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(host.strip("[]"), int(port))
            self._start(self._hold(reader, back))
            self._start(self._hold(there, writer))

        self._servers.append(await asyncio.start_server(accepted, "127.0.0.1", 0))
        return f"tcp://127.0.0.1:{self._servers[-1].sockets[0].getsockname()[1]}"

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
    """`sockets.frames.receiving.Handler`: an instance, or the coordinator that passes frames on."""

    def __init__(self, name: str, security: CurveSecurity | None) -> None:
        self.words: asyncio.Queue[str] = asyncio.Queue()
        # Heartbeats are off in the time that this takes: they would be flights.
        self.channels = Channels(
            self,
            incarnation=name,
            loop=asyncio.get_running_loop(),
            security=security,
            times=LinkTimes(3 * PATIENCE_S),
        )
        self.endpoint = self.channels.bind("tcp://127.0.0.1:*")

    def introduced(self, sender: str, message: Message) -> bool:
        return False

    def received(self, sender: str, message: Message) -> None:
        match message:
            case Deregister():
                self.words.put_nowait(message.reason)
            case Detour(receiver, frame) if receiver == self.channels.incarnation:
                self.channels.detoured(frame)
            case Detour():
                self.channels.hint(message.receiver, message)

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None: ...

    def lost(self, peer: str) -> None: ...

    async def send(self, other: _End, word: str) -> None:
        """Sends a word and waits until it has come."""
        self.channels.send(other.channels.incarnation, Deregister(word))
        assert await other.words.get() == word


async def measure(curve: bool, *, detour: bool = False) -> FirstMessage:
    """detour: both ends have open links to a coordinator."""
    security = CurveSecurity(os.urandom(32)) if curve else None
    one, other, coordinator = (_End(name, security) for name in ("one", "other", "coordinator"))
    try:
        async with asyncio.timeout(PATIENCE_S), Flights() as flights:
            there = await flights.to(other.endpoint)
            if detour:
                one.channels.connect("coordinator", await flights.to(coordinator.endpoint))
                other.channels.connect("coordinator", coordinator.endpoint)
                coordinator.channels.connect("one", one.endpoint)
                coordinator.channels.connect("other", there)
                await one.send(coordinator, "open")
                await coordinator.send(other, "open")
                one.channels.detours = lambda: ["coordinator"]
            other.channels.connect("one", one.endpoint)
            before = flights.count
            link = one.channels.connect("other", there)
            await one.send(other, "first")
            first = flights.count - before
            own = not one.channels.counters["detours"]
            while not link.connected or link.undelivered:
                await asyncio.sleep(QUIET_S)
            before = flights.count
            await one.send(other, "second")
            return FirstMessage(curve, own * TCP + (first - (flights.count - before)) / 2, detour)
    finally:
        for end in (one, other, coordinator):
            end.channels.close()
