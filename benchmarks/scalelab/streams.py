"""Thousands of idle HTTP streams at one coordinator: real sockets, the real web room, one light instance.

A program of three roles, each in a process of its own: the coordinator with its HTTP server, the instance, clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from typing import Any, Final

import msgspec

from benchmarks.scalelab import children
from benchmarks.scalelab.children import Child
from benchmarks.scalelab.coordinating import PLAN
from benchmarks.scalelab.fakes import PIPELINE, LightInstance, NoRelays, revision_of
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.coordinator import Coordinator
from stage_runtime.coordinator.reporting import member_reports
from stage_runtime.payloads import encoding
from stage_runtime.sockets.channels import Channels
from stage_runtime.transfers.receiving import Fetched
from stage_runtime.web.app import make_app
from stage_runtime.web.listening.limits.connection_limits import MOST, ConnectionLimits
from stage_runtime.web.listening.server import Server
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.wire.messages import DataReady, Stream, Submit
from stage_runtime.wire.parts import Body

MODULE: Final = "benchmarks.scalelab.streams"
STAGE: Final = "stage0"
PROBES: Final = 200  # requests whose first byte is timed
SLOW: Final = 20
FLOOD_CHUNKS: Final = 255  # within the window of a stream: 256
FLOOD_NBYTES: Final = 12 << 10
SETTLE_S: Final = 2.0
OPENING: Final = 200  # connections at the same time


class Streams(msgspec.Struct, frozen=True):
    """The cost of idle streams and slow readers to a coordinator."""

    streams: int
    bytes_per_stream: float
    idle_processor: float  #: Part of a core, with all of them open.
    request_processor_us: float  #: Processor time of a short streamed request, one at a time, without idle streams.
    first_byte_ms: float  #: Time to the first byte of a request, without idle streams; median.
    first_byte_idle_ms: float  #: The same with all of them open.
    first_byte_slow_ms: float  #: The same with `SLOW` clients that do not read.
    bytes_per_slow_reader: float
    slow_reader_bound: float  #: The window of its stream, and as much again for the answer's text.
    first_byte_p99_ms: float = 0.0  #: The same as ``first_byte_ms``, 99 %; 0: not measured.
    first_byte_idle_p99_ms: float = 0.0


async def measure(count: int) -> Streams:
    with tempfile.TemporaryDirectory(prefix="streams-") as folder:
        server = await Child.start(MODULE, "server", folder)
        instance = await Child.start(MODULE, "instance", folder)
        clients = [await Child.start(MODULE, "clients", folder) for _ in range(2)]
        try:
            port = (await server.ask("open"))["port"]
            await clients[0].ask("first_bytes", port=port, count=PROBES)  # warms up
            warm = await server.ask("usage")
            alone = await clients[0].ask("first_bytes", port=port, count=PROBES)
            before = await server.ask("usage")
            await asyncio.gather(*(one.ask("hold", port=port, count=count // len(clients)) for one in clients))
            await asyncio.sleep(SETTLE_S)
            after = await server.ask("usage")
            await asyncio.sleep(SETTLE_S)
            later = await server.ask("usage")
            beside = await clients[0].ask("first_bytes", port=port, count=PROBES)
            loaded = await server.ask("usage")
            await clients[0].ask("flood", port=port, count=SLOW)
            await asyncio.sleep(SETTLE_S)
            flooded = await server.ask("usage")
            slowed = await clients[1].ask("first_bytes", port=port, count=PROBES)
            return Streams(
                count,
                (after["memory_bytes"] - before["memory_bytes"]) / count,
                (later["processor_s"] - after["processor_after_s"]) / SETTLE_S,
                1e6 * (before["processor_s"] - warm["processor_after_s"]) / PROBES,
                alone["median_ms"],
                beside["median_ms"],
                slowed["median_ms"],
                (flooded["memory_bytes"] - loaded["memory_bytes"]) / SLOW,
                2.0 * FLOOD_CHUNKS * FLOOD_NBYTES,
                alone["p99_ms"],
                beside["p99_ms"],
            )
        finally:
            for child in (server, instance, *clients):
                await child.kill()


# --- the roles ----------------------------------------------------------------------------------------------------


class ServerRole:
    """A coordinator with its HTTP server."""

    def __init__(self, folder: str) -> None:
        loop = asyncio.get_running_loop()
        incarnation = secrets.token_hex(8)
        self._coordinator = Coordinator(PLAN, incarnation=incarnation, loop=loop)
        channels = Channels(self._coordinator, incarnation=incarnation, loop=loop)
        relays: Any = NoRelays()
        publisher = channels.bind_publisher(f"ipc://{folder}/publish")
        self._coordinator.wire(
            channels,
            relays,
            endpoint=channels.bind(f"ipc://{folder}/coordinator"),
            publisher=publisher,
            revisions=[revision_of("one", (STAGE,))],
        )
        self._codecs = CodecPool()
        self._server = Server(
            make_app(self._coordinator.manager, WebSettings(model=PIPELINE), codecs=self._codecs),
            limits=ConnectionLimits(connections=MOST),
        )

    async def open(self) -> dict[str, Any]:
        await self._codecs.__aenter__()
        await self._server.__aenter__()
        while not member_reports.ready_count(self._coordinator.membership).get(STAGE):
            await asyncio.sleep(0.02)
        return {"port": self._server.port}

    async def usage(self) -> dict[str, Any]:
        return dict(children.own_usage())


def _flood() -> Body:
    extracted = encoding.extract({"data": "x" * FLOOD_NBYTES}, where="chunk")
    return Body(extracted.value_bytes, tuple(extracted.refs), extracted.flat())


class StreamingInstance(LightInstance):
    """Sends one chunk and nothing more, or a full window of them."""

    def work(self, message: Submit | DataReady) -> None:
        assert isinstance(message, Submit)
        header = message.header
        fields: dict[str, Any] = Fetched(message.body, None).open()
        flood = fields["request"].inputs == "flood"
        body = _flood() if flood else FIRST
        for index in range(FLOOD_CHUNKS if flood else 1):
            self.send(header.owner, Stream(header.request_id, header.attempt, STAGE, index, body))


def _first() -> Body:
    extracted = encoding.extract({"data": "first"}, where="chunk")
    return Body(extracted.value_bytes, tuple(extracted.refs), extracted.flat())


FIRST: Final = _first()


class ClientsRole:
    """HTTP clients over plain sockets."""

    def __init__(self) -> None:
        self._open: list[asyncio.StreamWriter] = []

    async def hold(self, port: int, count: int) -> dict[str, Any]:
        """Open so many streams, read the first event of each, and nothing more."""
        gate = asyncio.Semaphore(OPENING)

        async def one() -> None:
            async with gate:
                _, writer = await _first_event(port, "idle")
                self._open.append(writer)

        await asyncio.gather(*(one() for _ in range(count)))
        return {"open": len(self._open)}

    async def flood(self, port: int, count: int) -> dict[str, Any]:
        """Open streams that are full at once, and read none."""
        for _ in range(count):
            _, writer = await _ask(port, "flood")
            transport: Any = writer.transport
            transport.pause_reading()
            self._open.append(writer)
        return {}

    async def first_bytes(self, port: int, count: int) -> dict[str, Any]:
        """How long the first byte of a request takes, one after the other."""
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            _, writer = await _first_event(port, "idle")
            times.append(1000 * (time.perf_counter() - begun))
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        times.sort()
        return {"median_ms": times[len(times) // 2], "p99_ms": times[len(times) * 99 // 100]}


async def _ask(port: int, inputs: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = msgspec.json.encode({"inputs": inputs, "stream": True})
    head = f"POST /v1/pipeline HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    return reader, writer


async def _first_event(port: int, inputs: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await _ask(port, inputs)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(head.decode(errors="replace")[:200])
    await reader.readuntil(b"\n\n")
    return reader, writer


def main() -> None:
    role, folder = sys.argv[1:]

    def make() -> dict[str, Any]:
        match role:
            case "server":
                server = ServerRole(folder)
                return {"open": server.open, "usage": server.usage}
            case "instance":
                loop = asyncio.get_running_loop()
                StreamingInstance(
                    STAGE,
                    "one",
                    folder=folder,
                    coordinators=(f"ipc://{folder}/{COORDINATOR}",),
                    loop=loop,
                    groups=(STAGE,),
                )
                return {}
            case _:
                clients = ClientsRole()
                return {"hold": clients.hold, "flood": clients.flood, "first_bytes": clients.first_bytes}

    children.serve(make)


if __name__ == "__main__":
    main()
