"""A process without a free descriptor: what runs goes on, whatever wants to open one, and all works again later."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from stage_runtime.rules.members.introductions import FRESH_S
from tests.e2e import descriptors
from tests.e2e.local_pipelines import APART, PATIENCE_S, Client, diamond, running


@contextlib.asynccontextmanager
async def none_left(pid: int, *, but: float = 0.0) -> AsyncIterator[None]:
    """The process can open nothing: not even what it keeps free where it counts by itself. but: or so many, as a share
    of those that it has.
    """
    used = {int(entry.name) for entry in os.scandir(f"/proc/{pid}/fd")}
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    lowest = next(number for number in itertools.count() if number not in used)
    await descriptors.allow(pid, int(lowest * (1 + but)), hard)
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


async def connect(url: str) -> int:
    """The status of an answer on a new connection."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        return (await client.get("/status")).status_code


@pytest.mark.proves("no-descriptors")
async def test_a_process_without_descriptors_serves_on_and_says_what_it_cannot_open(base: Path) -> None:
    environ = {"OMNI_PROFILE_ROOT": str(base / "profiles")}
    async with (
        running(diamond(APART), base, environ=environ) as pipeline,
        Client(pipeline.url, connections=1, keep_s=None) as client,
    ):
        for _ in range(3):  # every edge has moved a large payload
            await client.answer("before", size=1 << 20)
        pids = pipeline.pids()
        for process in ("coordinator", "front"):
            async with none_left(pids[process]):
                turned_away = asyncio.create_task(connect(pipeline.url))
                await client.answer("a short one")
                await client.answer("a large one", size=1 << 20)
                words = [word["data"] for name, word in await client.streamed("a stream") if name == "chunk"]
                assert words == ["A", "STREAM"]
                assert await client.metrics() and await client.status()
                profile = await client.order("/start_request_profile", {})  # a trace would load torch everywhere
                assert "Too many open files" in profile.text
                await client.answer("another one")
            with contextlib.suppress(httpx.TransportError):  # it may have waited instead
                await turned_away
            await client.order("/stop_request_profile", {})
            assert await connect(pipeline.url) == 200
            await client.answer("after", size=1 << 20)
        assert pipeline.pids() == pids, "none has ended"


@pytest.mark.proves("no-descriptors")
async def test_a_pair_of_instances_that_had_no_descriptor_to_meet_serves_as_soon_as_it_has(base: Path) -> None:
    async with running(diamond(APART), base) as pipeline, Client(pipeline.url) as client:
        async with none_left(pipeline.pids()["front"], but=0.25):  # less than it keeps free for others
            began = time.monotonic()
            while time.monotonic() - began < FRESH_S + 1:  # until then, requests bring along whom they are bound to
                refused = await client.ask("no link")
                assert "error" in refused, refused
                await asyncio.sleep(0.2)
        assert "RLIMIT_NOFILE" in (base / "log").read_text()
        await client.answer("a link")
        await client.answer("a large one", size=1 << 20)
