"""A TP stage of two ranks on gloo: real collectives, failures of all ranks, and what becomes of it when one goes."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import HEARTBEAT_S, PATIENCE_S, Client, eventually, running

DEAD_AFTER_S = 3.0  # a busy machine may hold a process up for longer than one second
SPEC = PipelineConfig(
    name="ranks",
    stages=[StageConfig(name="adder", factory="diamond_stages:ranks", gpu=[0, 1], tp_size=2, terminal=True)],
    control=Control(heartbeat_seconds=HEARTBEAT_S, dead_after_seconds=DEAD_AFTER_S),
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranks() -> AsyncIterator[LocalPipeline]:
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(SPEC, Path(folder), cpu=True) as pipeline:
            yield pipeline


async def add(client: Client, values: list[float], **more: object) -> object:
    body = await client.ask("", values=values, **more)
    return body["results"]["adder"] if "results" in body else body["error"]


@pytest.mark.proves("tp-rank-dies")
async def test_two_ranks_compute_together_fail_together_and_are_replaced_together(ranks: LocalPipeline) -> None:
    async with Client(ranks.url) as client:
        assert sorted(ranks.pids()) == ["adder_tp0", "adder_tp1", "coordinator"]
        assert await add(client, [1, 2, 3, 4]) == {"sum": 10.0, "ranks": 2}
        found = await asyncio.gather(*(add(client, [number, 1]) for number in range(20)))
        assert found == [{"sum": number + 1.0, "ranks": 2} for number in range(20)]

        error = await add(client, [1, 2], fail="all")
        assert isinstance(error, dict)
        assert (error["code"], error["stage"], error["hook"]) == ("stage_failed", "adder", "run")
        assert await add(client, [5, 6]) == {"sum": 11.0, "ranks": 2}

        before = ranks.pids()
        waiting = asyncio.create_task(add(client, [1, 1]))
        os.kill(before["adder_tp1"], signal.SIGKILL)
        await eventually(lambda: not set(before.values()) - {before["coordinator"]} & set(ranks.pids().values()))
        await asyncio.wait_for(waiting, PATIENCE_S)
        await ranks.ready()
        after = ranks.pids()
        assert after["coordinator"] == before["coordinator"]
        assert after["adder_tp0"] != before["adder_tp0"] and after["adder_tp1"] != before["adder_tp1"]
        assert await add(client, [7, 8, 9]) == {"sum": 24.0, "ranks": 2}


@pytest.mark.long
@pytest.mark.proves("tp-frozen")
@pytest.mark.parametrize(
    ("frozen", "computing"),
    [
        pytest.param(["coordinator"], 20, id="coordinator"),
        pytest.param(["adder_tp1"], 0, id="follower"),
        pytest.param(["adder_tp0"], 0, id="rank 0", marks=pytest.mark.nightly),
        pytest.param(["adder_tp0", "adder_tp1"], 20, id="all ranks", marks=pytest.mark.nightly),
    ],
)
async def test_after_a_freeze_all_ranks_serve_again(ranks: LocalPipeline, frozen: list[str], computing: int) -> None:
    async with Client(ranks.url) as client:
        assert await add(client, [1, 2]) == {"sum": 3.0, "ranks": 2}
        before = ranks.pids()
        under_way = [asyncio.create_task(add(client, [number, 1])) for number in range(computing)]
        pids = [before[name] for name in frozen]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(3 * DEAD_AFTER_S)
        finally:
            for pid in pids:
                if pid in ranks.pids().values():  # not replaced: a frozen process dies of SIGKILL alone
                    os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(asyncio.gather(*under_way), PATIENCE_S)

        async def served() -> None:
            while await add(client, [3, 4]) != {"sum": 7.0, "ranks": 2}:
                await asyncio.sleep(0.1)

        await asyncio.wait_for(served(), PATIENCE_S)
        assert await add(client, [5, 6]) == {"sum": 11.0, "ranks": 2}
        if frozen == ["coordinator"]:
            assert ranks.pids() == before, "no rank was replaced: nothing was wrong with them"
