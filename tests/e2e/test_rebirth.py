"""A process that goes on under another incarnation keeps its models, and nothing else of the life before."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import HEARTBEAT_S, Client, at_rest, eventually, running

MIB = 1 << 20


def spec() -> PipelineConfig:
    return PipelineConfig(
        name="rebirth",
        stages=[
            StageConfig(name="give", process="give", factory="rebirth_stages:give", next="take"),
            StageConfig(name="take", process="take", factory="rebirth_stages:take", terminal=True),
        ],
        control=Control(heartbeat_seconds=HEARTBEAT_S),
    )


@pytest.mark.long
@pytest.mark.proves("next-incarnation")
async def test_after_a_rebirth_tensors_come_from_the_arena_that_peers_know_and_the_old_one_is_gone(base: Path) -> None:
    async with running(spec(), base) as pipeline, Client(pipeline.url) as client:
        assert await summed(client, 4 * MIB) == 4 * MIB
        await at_rest(client)
        copied, mapped = await copied_nbytes(client), arenas(pipeline)
        assert copied < MIB, "a tensor from the arena is sent without a copy"
        for _ in range(2):
            await reborn(pipeline, client)
            assert await summed(client, 4 * MIB) == 4 * MIB
        await at_rest(client)
        assert await copied_nbytes(client) < MIB
        await eventually(lambda: arenas(pipeline) == mapped, what=lambda: f"{mapped} arenas, now {arenas(pipeline)}")


async def reborn(pipeline: LocalPipeline, client: Client) -> None:
    before, pid = await incarnation(client), pipeline.pids()["give"]
    os.kill(pid, signal.SIGSTOP)

    async def fenced() -> bool:
        return await incarnation(client) is None

    async def back() -> bool:
        return await incarnation(client) not in (None, before) and (await client.status())["complete"]

    try:
        await eventually(fenced)
    finally:
        os.kill(pid, signal.SIGCONT)
    await eventually(back)


async def give(client: Client) -> dict[str, Any] | None:
    instances = (await client.status())["instances"]
    return next((one for one in instances if one["group"] == "give"), None)


async def incarnation(client: Client) -> str | None:
    found = await give(client)
    return None if found is None else str(found["incarnation"])


async def copied_nbytes(client: Client) -> float:
    found = await give(client)
    assert found is not None
    return float(found["gauges"]["relay_shm_copied_bytes"])


async def summed(client: Client, nbytes: int) -> int:
    answer = await client.post({"inputs": {"size": nbytes}})
    found: int = answer.json()["results"]["take"]
    return found


def arenas(pipeline: LocalPipeline) -> dict[str, int]:
    """How many arenas each process has mapped: its own, and those of its peers."""
    found = {}
    for name, pid in pipeline.pids().items():
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found[name] = len({line.split()[4] for line in lines if "/memfd:omni-arena" in line})
    return found
