"""An instance that loads tells its coordinators how far it is, until it is ready."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import HEARTBEAT_S, Client, eventually, running


async def test_the_share_of_an_instance_that_loads_is_in_the_coordinators_status(base: Path) -> None:
    until = base / "go"
    until.touch()
    stage = StageConfig(
        name="talk",
        process="talk",
        factory="loading_stages:talk",
        factory_args={"until": str(until)},
        terminal=True,
    )
    spec = PipelineConfig(name="p", stages=[stage], control=Control(heartbeat_seconds=HEARTBEAT_S))
    async with running(spec, base) as pipeline, Client(pipeline.url) as client:

        async def loading() -> list[Any]:
            return [one["loading"] for one in (await client.status())["instances"]]

        assert await loading() == [[]]
        until.unlink()
        scaling = asyncio.create_task(pipeline.scale("talk", 2))

        async def is_known() -> bool:
            rows = [row for one in await loading() for row in one]
            return rows == [{"stage": "talk", "done": 700.0, "total": 2800.0, "unit": "B"}]

        await eventually(is_known)
        until.touch()
        await scaling
        assert await loading() == [[], []]
