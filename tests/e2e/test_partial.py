"""A pipeline of which a part is away serves the requests that never meet that part."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.local_pipelines import Client, at_rest, eventually, running
from tests.e2e.test_bounds import backpressure


@pytest.mark.proves("unneeded-stage-missing")
async def test_a_frozen_branch_holds_up_its_own_requests_alone(base: Path) -> None:
    async with running(backpressure(), base) as pipeline, Client(pipeline.url) as client:
        assert "results" in await client.ask("", to="slow", size=4, pace=0)
        pid = pipeline.pids()["slow"]
        os.kill(pid, signal.SIGSTOP)
        try:

            async def away() -> bool:
                lacking: list[str] = (await client.status())["missing_groups"]
                return lacking == ["slow"]

            await eventually(away)
            for _ in range(5):
                assert (await client.ask("", to="fine", size=1000))["results"]["fine"]["sum"] == 7000
            waits = asyncio.create_task(client.ask("", to="slow", size=4, pace=0))
            await eventually(lambda: held(client))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert "results" in await waits
        await eventually(lambda: served(client))
        await at_rest(client)


async def held(client: Client) -> bool:
    return bool((await client.metrics()).get("omnipipeline_requests_waiting{slow}"))


async def served(client: Client) -> bool:
    return "results" in await client.ask("", to="slow", size=4, pace=0)
