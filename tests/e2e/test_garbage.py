"""Strangers at every socket of a running pipeline: what they say is counted and dropped, and kills nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from stage_runtime.processes.local import LocalPipeline
from stage_runtime.wire.messages import FRAME_LIMIT, PROTOCOL, Abort, Frame, Goodbye
from tests.e2e.world import Client, at_rest, eventually

NESTED = b"\x91" * 100_000 + b"\xc0"
FRAMES: dict[str, bytes] = {
    "nothing": b"",
    "noise": os.urandom(3000),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "deep": NESTED,
    "deep in a frame": msgspec.msgpack.encode([PROTOCOL, "x", "", 0, 0, 0, 0, msgspec.Raw(NESTED)]),
    "a map": msgspec.msgpack.encode({"protocol": PROTOCOL}),
    "no list": b"\xdd\xff\xff\xff\xff",
    "an old protocol": msgspec.msgpack.encode([PROTOCOL + 99, "x", "", 0, 0, 0, 0, [1]]),
    "an unknown message": msgspec.msgpack.encode([PROTOCOL, "x", "", 0, 0, 0, 0, [200]]),
}
STRANGERS: dict[str, Any] = {
    "an abort": Abort("r", 1, "somebody", "no reason"),
    "a goodbye": Goodbye("not mine to say"),
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


def say(stranger: zmq.Context[Any], endpoint: str, *messages: list[bytes]) -> None:
    with stranger.socket(zmq.PUSH) as push:
        push.linger = 1000
        push.connect(endpoint)
        for frames in messages:
            push.send_multipart(frames)


async def counted(client: Client, kind: str) -> dict[str, float]:
    """How much of ``kind`` every process has counted."""
    gauges = {one["group"]: one["gauges"] for one in (await client.status())["instances"]}
    found = {group: told.get(f"control_{kind}", 0.0) for group, told in gauges.items()}
    return found | {"coordinator": (await client.metrics()).get(f"omnipipeline_control_events_total{{{kind}}}", 0.0)}


async def test_garbage_at_every_control_socket_is_counted_and_dropped(
    shared: LocalPipeline, client: Client, stranger: zmq.Context[Any]
) -> None:
    await client.answer("a b")
    await asyncio.sleep(0.5)
    assert set((await counted(client, "garbage")).values()) == {0.0}, (
        "the positive control: honest frames are no garbage"
    )
    before = shared.pids()
    endpoints = control(shared)
    assert set(endpoints) == set(before)
    for endpoint in endpoints.values():
        say(stranger, endpoint, *([frame] for frame in FRAMES.values()))
        encoded = [
            msgspec.msgpack.encode(Frame(PROTOCOL, "mallory", "", 0, 0, 0, 0, message))
            for message in STRANGERS.values()
        ]
        say(stranger, endpoint, *([frame] for frame in encoded))
    groups = {"coordinator", "front", "side", "joiner", "voice"}

    async def all_counted() -> bool:
        garbage, unknown = await counted(client, "garbage"), await counted(client, "strangers")
        return all(garbage[group] >= len(FRAMES) and unknown[group] >= len(STRANGERS) for group in groups)

    await eventually(all_counted, 5)
    await serves_as_before(shared, client, before)


async def test_what_is_oversized_in_parts_or_no_zmq_at_all_harms_nobody(
    shared: LocalPipeline, client: Client, stranger: zmq.Context[Any]
) -> None:
    before = shared.pids()
    pulls = [*control(shared).values(), *(f"ipc://{path}" for path in shared.folder.glob("*.data"))]
    for endpoint in [*pulls, shared_publisher(shared)]:
        say(stranger, endpoint, [bytes(FRAME_LIMIT + 1)], [b"", b"x" * 1000, b"", b"y"], [b"z"] * 500)
        for noise in (b"", b"\0" * 10, os.urandom(5000), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(endpoint.removeprefix("ipc://"))
                try:
                    raw.sendall(noise)
                except OSError:  # it hung up on us already
                    pass
    with stranger.socket(zmq.SUB) as subscriber:
        subscriber.connect(shared_publisher(shared))
        for number in range(2000):
            subscriber.subscribe(f"topic {number}".encode())
        time.sleep(0.2)
    await serves_as_before(shared, client, before)


async def test_garbage_at_every_relay_socket_is_counted_and_dropped(
    shared: LocalPipeline, client: Client, stranger: zmq.Context[Any]
) -> None:
    before = shared.pids()
    for path in shared.folder.glob("*.data"):
        say(stranger, f"ipc://{path}", [b"garbage", b"x" * 100], [b""], [NESTED, b""])

    async def all_counted() -> bool:
        told = [one["gauges"].get("relay_tcp_garbage_messages", 0) for one in (await client.status())["instances"]]
        own = (await client.metrics())["omnipipeline_relay_tcp_garbage_messages"]
        return min(*told, own) >= 3

    await eventually(all_counted, 5)
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


def shared_publisher(pipeline: LocalPipeline) -> str:
    return f"ipc://{pipeline.folder / 'publisher.sock'}"


async def serves_as_before(pipeline: LocalPipeline, client: Client, pids: dict[str, int]) -> None:
    answers = await asyncio.gather(*(client.answer(f"still {number}", size=1 << 20) for number in range(10)))
    assert [one["text"] for one in answers] == [f"still {number}" for number in range(10)]
    await client.streamed("and a stream")
    assert pipeline.pids() == pids
    await at_rest(client)
