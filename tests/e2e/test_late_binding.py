"""A request is served while a stage is away that its route does not meet; one whose route does waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import HEARTBEAT_S, Client, at_rest, eventually, running

SPEECH = {"way": ["take", "listen", "speak"]}
CHAT = {"way": ["take", "chat", "language", "speak"]}


def branching(*, join: bool) -> PipelineConfig:
    def stage(name: str, process: str, **fields: Any) -> StageConfig:
        return StageConfig(
            name=name,
            process=process,
            factory="branching_stages:passing",
            factory_args={"name": name},
            **fields,
        )

    joins: dict[str, Any] = {
        "wait_for": ["listen", "language"],
        "wait_for_fn": "branching_stages:wait_for_fn",
        "merge_fn": "branching_stages:merge_fn",
    }
    return PipelineConfig(
        name="branching",
        stages=[
            stage("take", "front", next=["listen", "chat"], route_fn="branching_stages:route_fn"),
            stage("listen", "listen", next="speak"),
            stage("chat", "front", next="language"),
            stage("language", "language", next="speak"),
            stage("speak", "voice", terminal=True, **(joins if join else {})),
        ],
        control=Control(heartbeat_seconds=HEARTBEAT_S),
    )


@pytest.mark.long
@pytest.mark.proves("unneeded-stage-missing")
@pytest.mark.parametrize("join", [False, True])
async def test_speech_is_served_while_the_stage_of_chats_is_away(base: Path, join: bool) -> None:
    async with running(branching(join=join), base) as pipeline, Client(pipeline.url) as client:

        async def way(to: str) -> Any:
            result = (await client.ask("", to=to)).get("results", {}).get("speak")
            return result and {"way": result["way"]}

        assert await way("listen") == SPEECH and await way("chat") == CHAT
        pid = pipeline.pids()["language"]
        os.kill(pid, signal.SIGSTOP)
        try:

            async def away() -> bool:
                lacking: list[str] = (await client.status())["missing_groups"]
                return lacking == ["language"]

            await eventually(away)
            for _ in range(5):
                assert await way("listen") == SPEECH
            assert (await client.status())["problem"] is None
            chat = asyncio.create_task(way("chat"))
            await eventually(lambda: held(client))
            assert await way("listen") == SPEECH
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await chat == CHAT
        await at_rest(client)


async def held(client: Client) -> bool:
    return bool((await client.metrics()).get("omnipipeline_requests_waiting{language}"))
