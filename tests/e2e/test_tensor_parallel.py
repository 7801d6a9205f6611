"""A TP stage of two ranks on gloo: real collectives, one failure for all ranks, and a rank that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import PATIENCE_S, Client, eventually, running

SPEC = PipelineConfig(
    name="ranks",
    stages=[StageConfig(name="adder", factory="diamond_stages:ranks", gpu=[0, 1], tp_size=2, terminal=True)],
)


async def add(client: Client, values: list[float], **more: object) -> object:
    body = await client.ask("", values=values, **more)
    return body["results"]["adder"] if "results" in body else body["error"]


@pytest.mark.proves("tp-rank-dies")
async def test_two_ranks_compute_together_fail_together_and_are_replaced_together(base: Path) -> None:
    async with running(SPEC, base, cpu=True) as pipeline, Client(pipeline.url) as client:
        assert sorted(pipeline.pids()) == ["adder_tp0", "adder_tp1", "coordinator"]
        assert await add(client, [1, 2, 3, 4]) == {"sum": 10.0, "ranks": 2}
        found = await asyncio.gather(*(add(client, [number, 1]) for number in range(20)))
        assert found == [{"sum": number + 1.0, "ranks": 2} for number in range(20)]

        error = await add(client, [1, 2], fail="all")
        assert isinstance(error, dict)
        assert (error["code"], error["stage"], error["hook"]) == ("stage_failed", "adder", "run")
        assert await add(client, [5, 6]) == {"sum": 11.0, "ranks": 2}

        before = pipeline.pids()
        waiting = asyncio.create_task(add(client, [1, 1]))
        os.kill(before["adder_tp1"], signal.SIGKILL)
        await eventually(lambda: not set(before.values()) - {before["coordinator"]} & set(pipeline.pids().values()))
        await asyncio.wait_for(waiting, PATIENCE_S)
        await pipeline.ready()
        after = pipeline.pids()
        assert after["coordinator"] == before["coordinator"]
        assert after["adder_tp0"] != before["adder_tp0"] and after["adder_tp1"] != before["adder_tp1"]
        assert await add(client, [7, 8, 9]) == {"sum": 24.0, "ranks": 2}
