"""Strangers at every socket of a running pipeline: what they say is counted and dropped, and kills nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from stage_runtime.processes.one_machine.local import LocalPipeline
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from stage_runtime.wire import codec
from stage_runtime.wire.frames import FRAME_LIMIT, PROTOCOL, Frame
from stage_runtime.wire.messages import Abort, Deregister
from tests.e2e.local_pipelines import APART, Client, at_rest, diamond, eventually
from tests.e2e.pod_pipelines import KEY, pods

NESTED = b"\x91" * 100_000 + b"\xc0"
FRAMES: dict[str, bytes] = {
    "nothing": b"",
    "noise": random.Random(0).randbytes(3000),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "deep": NESTED,
    "deep in a frame": msgspec.msgpack.encode([PROTOCOL, "x", "", 0, 0, 0, 0, None, msgspec.Raw(NESTED)]),
    "deep in a message": msgspec.msgpack.encode([PROTOCOL, "x", "", 0, 0, 0, 0, None, NESTED]),
    "a map": msgspec.msgpack.encode({"protocol": PROTOCOL}),
    "no list": b"\xdd\xff\xff\xff\xff",
    "an unknown message": msgspec.msgpack.encode([PROTOCOL, "x", "", 0, 0, 0, 0, None, b"\x91\xcc\xc8"]),
}
OTHER_PROTOCOL = msgspec.msgpack.encode([PROTOCOL + 99, "x", "", 0, 0, 0, 0, [1]])
STRANGERS: dict[str, Any] = {
    "an abort": Abort("r", 1, "somebody", "no reason"),
    "a goodbye": Deregister("not mine to say"),
}


@pytest.fixture
def stranger() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def control(pipeline: LocalPipeline) -> dict[str, str]:
    """Process -> its control endpoint, of all processes."""
    names = {path.name.removesuffix(".sock").rpartition("-")[0] or "coordinator": path for path in _sockets(pipeline)}
    return {name: f"ipc://{path}" for name, path in names.items()}


def _sockets(pipeline: LocalPipeline) -> list[Path]:
    return [path for path in pipeline.folder.glob("*.sock") if path.name not in ("publisher.sock", "admin.sock")]


def send_frames(stranger: zmq.Context[Any], endpoint: str, *messages: list[bytes]) -> None:
    # The types that each accepts: it hangs up on another type, and then messages may wait for ever.
    with stranger.socket(zmq.PUSH if endpoint.endswith(".data") else zmq.DEALER) as push:
        push.linger = 1000
        push.sndtimeo = 5000
        push.connect(endpoint)
        with contextlib.suppress(zmq.Again):  # a publisher takes nothing
            for frames in messages:
                push.send_multipart(frames)


async def counted(client: Client, kind: str) -> dict[str, float]:
    """How much of ``kind`` every process has counted."""
    status = await client.status()
    gauges = {one["group"]: one["gauges"] for one in status["instances"]} | {"coordinator": status["gauges"]}
    return {group: own.get(f"control_{kind}", 0.0) for group, own in gauges.items()}


@pytest.mark.proves("garbage-frames")
async def test_garbage_at_every_control_socket_is_counted_and_dropped(
    shared: LocalPipeline, client: Client, stranger: zmq.Context[Any]
) -> None:
    honest = await counted(client, "received")
    await client.answer("a b")

    async def reported() -> bool:
        found = await counted(client, "received")
        return all(found[group] > honest[group] for group in ("front", "side", "joiner"))

    await eventually(reported)
    assert set((await counted(client, "malformed")).values()) == {0.0}, (
        "the positive control: honest frames are not garbage"
    )
    before = shared.pids()
    endpoints = control(shared)
    assert set(endpoints) == set(before)
    for endpoint in endpoints.values():
        send_frames(stranger, endpoint, *([frame] for frame in FRAMES.values()), [OTHER_PROTOCOL])
        encoded = [codec.encode(Frame(PROTOCOL, "mallory", "", 0, 0, 0, 0, message)) for message in STRANGERS.values()]
        send_frames(stranger, endpoint, *([frame] for frame in encoded))
    groups = {"coordinator", "front", "side", "joiner", "voice"}

    async def all_counted() -> bool:
        garbage, unknown = await counted(client, "malformed"), await counted(client, "unknown_peers")
        other = await counted(client, "other_protocol")
        return all(
            garbage[group] >= len(FRAMES) and unknown[group] >= len(STRANGERS) and other[group] >= 1 for group in groups
        )

    await eventually(all_counted)
    await serves_as_before(shared, client, before)


@pytest.mark.proves("garbage-frames")
async def test_oversized_or_foreign_frames_harm_no_other_link(
    shared: LocalPipeline, client: Client, stranger: zmq.Context[Any]
) -> None:
    before = shared.pids()
    pulls = [*control(shared).values(), *(f"ipc://{path}" for path in shared.folder.glob("*.data"))]
    for endpoint in [*pulls, shared_publisher(shared)]:
        send_frames(stranger, endpoint, [bytes(FRAME_LIMIT + 1)], [b"", b"x" * 1000, b"", b"y"], [b"z"] * 500)
        for noise in (b"", b"\0" * 10, os.urandom(5000), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(endpoint.removeprefix("ipc://"))
                try:
                    raw.sendall(noise)
                except OSError:  # it hung up on us already
                    pass
    with stranger.socket(zmq.SUB) as subscriber:
        subscriber.linger = 1000  # what is not sent yet is sent after it is closed
        subscriber.connect(shared_publisher(shared))
        for number in range(2000):
            subscriber.subscribe(f"topic {number}".encode())
    await serves_as_before(shared, client, before)


@pytest.mark.proves("garbage-frames")
async def test_garbage_at_every_relay_socket_is_counted_and_dropped(
    shared: LocalPipeline, client: Client, stranger: zmq.Context[Any]
) -> None:
    before = shared.pids()
    for path in shared.folder.glob("*.data"):
        send_frames(stranger, f"ipc://{path}", [b"malformed", b"x" * 100], [b""], [NESTED, b""])

    async def all_counted() -> bool:
        status = await client.status()
        counts = [one["gauges"].get("relay_tcp_malformed_messages", 0) for one in (*status["instances"], status)]
        return bool(min(counts) >= 3)

    await eventually(all_counted)
    await serves_as_before(shared, client, before)


async def test_a_connection_that_says_nothing_holds_up_nobody(shared: LocalPipeline, client: Client) -> None:
    silent = []
    for path in [*_sockets(shared), *shared.folder.glob("*.data")]:
        one = socket.socket(socket.AF_UNIX)
        one.connect(str(path))
        silent.append(one)
    await serves_as_before(shared, client, shared.pids())
    for one in silent:
        one.close()


# --- over TCP, where CURVE stands before every frame ------------------------------------------------------------


def listening(pid: int) -> list[int]:
    """The TCP ports of a process: control, relay, of a coordinator its publisher and HTTP, too."""
    return sorted(
        one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN
    )


def without_key(_: zmq.Socket[Any]) -> None:
    """The mechanism NULL."""


def another_key(push: zmq.Socket[Any]) -> None:
    CurveSecurity(b"another pipeline's own 32 bytes!").client(push)


def half_a_key(push: zmq.Socket[Any]) -> None:
    """Knows the servers' public key, and is not a member: what the ZAP handler alone turns away."""
    CurveSecurity(KEY).client(push)
    push.curve_publickey, push.curve_secretkey = zmq.curve_keypair()


def member(push: zmq.Socket[Any]) -> None:
    CurveSecurity(KEY).client(push)


@contextlib.contextmanager
def knocking(stranger: zmq.Context[Any], ports: list[int], *keys: Any) -> Iterator[list[zmq.Socket[Any]]]:
    """Two who speak (PUSH is of relays, DEALER of control) and one who listens for every port and key, meanwhile."""
    with contextlib.ExitStack() as stack:
        made = []
        for port in ports:
            for key in keys:
                for kind in (zmq.PUSH, zmq.DEALER, zmq.SUB):
                    one = stack.enter_context(stranger.socket(kind))
                    one.linger = 0
                    key(one)
                    if kind == zmq.SUB:
                        one.subscribe(b"")
                    one.connect(f"tcp://127.0.0.1:{port}")
                    made.append(one)
        yield made


def utter(push: zmq.Socket[Any], *messages: list[bytes]) -> None:
    """Send without waiting: at a publisher's or an HTTP port nobody ever takes it."""
    for frames in messages:
        with contextlib.suppress(zmq.Again):
            push.send_multipart(frames, zmq.NOBLOCK)


def raw_noise(port: int) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port))
    with contextlib.suppress(OSError):  # it may hang up on us at once
        plain.sendall(os.urandom(5000))
    return plain


@pytest.mark.long
@pytest.mark.proves("garbage-frames")
async def test_strangers_at_every_tcp_socket_are_turned_away_counted_and_logged_once(
    base: Path, stranger: zmq.Context[Any]
) -> None:
    async with pods(diamond(APART, relay_backend="tcp"), base) as made, Client(made.url("coordinator")) as client:

        async def every(*kinds: str) -> bool:
            """Whether every process has counted some of each kind."""
            status = await client.status()
            counts = [
                one["gauges"].get(kind, one["gauges"].get(f"control_{kind}", 0))
                for one in (*status["instances"], status)
                for kind in kinds
            ]
            return len(counts) == len(kinds) * len(before) and min(counts) > 0

        async def goes_on() -> None:
            answers = await asyncio.gather(*(client.answer(f"still {number}", size=1 << 20) for number in range(6)))
            assert [one["text"] for one in answers] == [f"still {number}" for number in range(6)]
            await client.streamed("and a stream")

        before = made.pids()
        await goes_on()
        assert not await every("handshake_failures") and not await every("relay_tcp_handshake_failures")
        ports = [port for pid in before.values() for port in listening(pid)]
        assert len(ports) == 2 * len(before) + 2
        for _ in range(2):
            with (
                contextlib.ExitStack() as open_ones,
                knocking(stranger, ports, without_key, another_key, half_a_key) as knocks,
            ):
                for port in ports:
                    open_ones.enter_context(raw_noise(port))
                    open_ones.enter_context(socket.create_connection(("127.0.0.1", port)))  # and says nothing
                for one in knocks:
                    if one.type in (zmq.PUSH, zmq.DEALER):
                        utter(one, *([frame] for frame in FRAMES.values()))
                await eventually(lambda: every("handshake_failures", "relay_tcp_handshake_failures"))
                await goes_on()
                with pytest.raises(zmq.Again):
                    next(one for one in knocks if one.type == zmq.SUB).recv(zmq.NOBLOCK)
        log = (base / "log").read_text()
        for process in before:
            logged = [
                line for line in log.splitlines() if line.startswith(f"{process}: ") and "(handshake_failures)" in line
            ]
            assert 1 <= len(logged) <= 2 * 3, "each reason once at each socket, however often somebody comes"
        # One who has the key, and says what nobody can read, or too much of it.
        with knocking(stranger, ports, member) as knocks:
            for one in knocks:
                if one.type in (zmq.PUSH, zmq.DEALER):
                    utter(one, *([frame] for frame in FRAMES.values()))
                    utter(one, [b"malformed", b"x" * 100], [b"z"] * 500, [bytes(9 << 20)])
            await eventually(lambda: every("malformed", "relay_tcp_malformed_messages"))
            await goes_on()
        lines = (base / "log").read_text().splitlines()
        for process in before:
            relay = [line for line in lines if line.startswith(f"{process}: ") and "tcp relay: " in line]
            assert sum("a connection was refused" in line for line in relay) in (1, 2, 3), "a line a reason"
            assert sum("dropped a malformed message" in line for line in relay) == 1
        assert made.pids() == before
        await at_rest(client)


def shared_publisher(pipeline: LocalPipeline) -> str:
    return f"ipc://{pipeline.folder / 'publisher.sock'}"


async def serves_as_before(pipeline: LocalPipeline, client: Client, pids: dict[str, int]) -> None:
    answers = await asyncio.gather(*(client.answer(f"still {number}", size=1 << 20) for number in range(10)))
    assert [one["text"] for one in answers] == [f"still {number}" for number in range(10)]
    await client.streamed("and a stream")
    assert pipeline.pids() == pids
    await at_rest(client)
