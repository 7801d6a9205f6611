"""Requests that time out at a busy stage give back what they hold at once, wherever it waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.busy_stages import KINDS
from tests.e2e.local_pipelines import HEARTBEAT_S, Client, at_rest, eventually, resident, running, under_way

MIB = 1 << 20
BODIES, EACH, BODY = 12, 6, 4 * MIB  # of each kind of stage; so many at once
WITHIN = 100 * MIB  # of growth of each process's private memory: 288 MiB have come; an allocator's rest stays


def spec() -> PipelineConfig:
    """take → one stage of each kind, all of these in one process; side → join."""

    def stage(name: str, **fields: object) -> StageConfig:
        fields.setdefault("process", "busy")
        return StageConfig(name=name, factory=f"busy_stages:{name}", **fields)  # type: ignore[arg-type]

    return PipelineConfig(
        name="busy",
        stages=[
            stage(
                "take",
                process="front",
                next=[*KINDS, "side"],
                route_fn="busy_stages:route_fn",
                stream_to="early",
                stream_done_to_fn="busy_stages:done_fn",
            ),
            stage("side", process="front", next="join"),
            *(stage(kind, terminal=True) for kind in KINDS if kind != "join"),
            stage("join", terminal=True, wait_for=["take", "side"], merge_fn="busy_stages:merge_fn"),
        ],
        terminal_stages_fn="busy_stages:terminal_stages_fn",
        control=Control(heartbeat_seconds=HEARTBEAT_S),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pipeline() -> AsyncIterator[LocalPipeline]:
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(spec(), Path(folder)) as pipeline:
            async with Client(pipeline.url) as client:  # arenas and pools have their size
                await asyncio.gather(*(client.post(request(kind, BODY)) for kind in KINDS for _ in range(2)))
                await at_rest(client)
            yield pipeline


def request(kind: str, nbytes: int, *, hold: bool = False) -> dict[str, object]:
    return {"inputs": {"kind": kind, "hold": hold, "pad": "x" * nbytes}}


@pytest.mark.long
@pytest.mark.proves("ended-while-busy")
async def test_bodies_that_time_out_at_busy_stages_are_freed_while_these_are_busy(pipeline: LocalPipeline) -> None:
    """Stages of every kind are busy at once, and a fan-in whose hook is busy; all are in one process."""
    async with Client(pipeline.url, connections=100) as client:
        holding = [asyncio.create_task(client.post(request(kind, 10, hold=True))) for kind in KINDS]

        async def all_busy() -> bool:
            return (await under_way(client)).get("busy.running", 0) + 1 >= len(KINDS)  # a join runs before it begins

        await eventually(all_busy)
        before = resident(pipeline.pids())

        def grown() -> dict[str, int]:
            return {name: (size - before[name]) // MIB for name, size in resident(pipeline.pids()).items()}

        async def in_arenas() -> dict[str, float]:
            return {name: size for name, size in (await under_way(client)).items() if "arena_bytes_in_use" in name}

        async def no_arena_is_used() -> bool:
            return not await in_arenas()

        for _ in range(BODIES // EACH):
            bodies = [json.dumps({**request(kind, BODY), "timeout": 1.0}).encode() for kind in KINDS]
            answers = await asyncio.gather(*(client.send(body) for body in bodies for _ in range(EACH)))
            assert {answer.status_code for answer in answers} == {504}
        await eventually(no_arena_is_used)
        await eventually(lambda: max(grown().values()) < WITHIN // MIB, what=lambda: f"MiB of growth: {grown()}")
        assert not any(one.done() for one in holding), "the stages were busy all the time"
        for one in holding:
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                await one
        await at_rest(client)
