"""A TP stage whose ranks, or whose coordinator, are frozen until they are declared dead: all ranks go on together."""

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
from tests.e2e.local_pipelines import HEARTBEAT_S, PATIENCE_S, Client, running
from tests.e2e.test_tensor_parallel import add

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
