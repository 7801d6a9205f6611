"""A producer that is faster than its readers is held back: memory stays bounded, others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import pytest_asyncio

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import HEARTBEAT_S, Client, at_rest, running

MIB = 1 << 20
POUR_S = 2.5  # an unbounded producer makes gigabytes in this time
WITHIN = 200 * MIB  # of growth, of each process


def backpressure() -> PipelineConfig:
    """tap → slow (stream and result) or fine (result): each in a process of its own."""

    def stage(name: str, **fields: object) -> StageConfig:
        return StageConfig(name=name, process=name, factory=f"backpressure_stages:{name}", **fields)  # type: ignore[arg-type]

    return PipelineConfig(
        name="backpressure",
        stages=[
            stage(
                "tap",
                next=["slow", "fine"],
                route_fn="backpressure_stages:route_fn",
                stream_to="slow",
                stream_done_to_fn="backpressure_stages:done_fn",
            ),
            stage("slow", terminal=True),
            stage("fine", terminal=True),
        ],
        terminal_stages_fn="backpressure_stages:terminal_stages_fn",
        control=Control(heartbeat_seconds=HEARTBEAT_S),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def flooded() -> AsyncIterator[LocalPipeline]:
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(backpressure(), Path(folder)) as pipeline:
            async with Client(pipeline.url, connections=40) as client:  # arenas and pools have their size
                await asyncio.gather(*(client.ask("", to="fine", size=MIB) for _ in range(40)))
                await client.ask("", to="slow", size=MIB, chunks=3, pace=0)
                await at_rest(client)
            yield pipeline


def footprint(pipeline: LocalPipeline) -> dict[str, int]:
    """All memory of each process, its arena with it."""
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pipeline.pids().items()}


async def watched(pipeline: LocalPipeline, client: Client, before: dict[str, int]) -> None:
    """Let it pour. Nobody grows beyond the bound, and the healthy branch answers again and again."""
    until, answers = time.monotonic() + POUR_S, 0
    while time.monotonic() < until or answers < 5:
        answer = await client.ask("", to="fine", size=1000)
        assert answer["results"]["fine"]["sum"] == 7000
        answers += 1
        grown = {name: (nbytes - before[name]) // MIB for name, nbytes in footprint(pipeline).items()}
        assert max(grown.values()) < WITHIN // MIB, f"MiB of growth: {grown}"
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def pouring(pipeline: LocalPipeline, client: Client, count: int, **inputs: object) -> AsyncIterator[None]:
    """So many requests under way that will not end by themselves, aborted afterwards."""
    tasks = [asyncio.create_task(client.ask("", **inputs)) for _ in range(count)]
    try:
        yield
        assert not any(one.done() for one in tasks), "the slow one cannot be through: it was not back-pressure"
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.proves("slow-receiver")
async def test_a_stream_that_is_not_read_is_held_back(flooded: LocalPipeline) -> None:
    """4 requests would pour 100 GiB: 2 wait for their turn at the consumer, 2 are read drop by drop."""
    async with Client(flooded.url, connections=40) as client:
        before = footprint(flooded)
        async with pouring(flooded, client, 4, to="slow", size=64 << 10, chunks=400_000, pace=0.05):
            await watched(flooded, client, before)
        await at_rest(client)


@pytest.mark.proves("slow-receiver")
async def test_payloads_that_are_not_taken_wait_within_bounds_and_block_no_other_branch(flooded: LocalPipeline) -> None:
    async with Client(flooded.url, connections=60) as client:
        before = footprint(flooded)
        async with pouring(flooded, client, 40, to="slow", size=2 * MIB, pace=3600.0):
            await watched(flooded, client, before)
        await at_rest(client)


@pytest.mark.long
@pytest.mark.proves("slow-receiver")
async def test_clients_that_stop_reading_hold_back_their_own_streams_alone(flooded: LocalPipeline) -> None:
    """8 clients ask for 500 GiB each and read nothing of it. Each is a window behind: 16 MiB."""
    where = urlsplit(flooded.url)
    body = {"inputs": {"to": "fine", "size": 10, "gush": 500_000, "piece": 1 << 20}, "stream": True}
    encoded = json.dumps(body).encode()
    head = "POST /v1/pipeline HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(encoded)}\r\n\r\n"
    async with Client(flooded.url, connections=40) as client:
        before = footprint(flooded)
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                deaf = stack.enter_context(socket.create_connection((where.hostname or "", where.port or 0)))
                deaf.sendall(head.encode() + encoded)
            await watched(flooded, client, before)
            assert (await client.status())["in_flight"] >= 8
        await at_rest(client)
