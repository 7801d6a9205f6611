"""Two coordinators at once, as in a roll, and clients that give both the same request ids: nobody notices the other."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import HEARTBEAT_S, PATIENCE_S, Client, at_rest, eventually
from tests.e2e.pod_pipelines import pods
from tests.e2e.test_coordinators import complete, in_flight

KINDS = ("sync", "batch", "engine", "produce", "collect")


def same_ids() -> PipelineConfig:
    """sync → batch → engine → produce → collect, in three processes: over the wire and inside."""
    processes = {"sync": "front", "batch": "middle", "engine": "front", "produce": "middle", "collect": "back"}

    def stage(name: str, **fields: Any) -> StageConfig:
        return StageConfig(name=name, process=processes[name], factory=f"same_id_stages:{name}", **fields)

    return PipelineConfig(
        name="same-ids",
        stages=[
            stage("sync", next="batch"),
            stage("batch", next="engine"),
            stage("engine", next="produce"),
            stage("produce", next="collect", stream_to="collect"),
            stage("collect", terminal=True),
        ],
        control=Control(heartbeat_seconds=HEARTBEAT_S),
    )


@pytest.mark.long
@pytest.mark.proves("same-request-id")
async def test_requests_of_one_id_at_two_coordinators_are_answered_and_aborted_apart(base: Path) -> None:
    async with (
        pods(same_ids(), base, "old", "new") as made,
        Client(made.url("old"), connections=60) as old,
        Client(made.url("new"), connections=60) as new,
    ):
        for client in (old, new):
            await eventually(partial(lambda client: complete(client), client))

        async def ask(client: Client, request_id: str, word: str, until: Path | None = None) -> httpx.Response:
            return await client.post({"inputs": {"word": word, "until": until and str(until)}}, request_id=request_id)

        def answered(response: httpx.Response, word: str) -> bool:
            return bool(response.json().get("results") == {"collect": {"word": word, "letters": word}})

        # answered apart
        for number in range(3):
            ids = [f"round{number}-{one}" for one in range(8)]
            both = [
                (client, one, word) for one in ids for client, word in ((old, "old" + one), (new, "a newer " + one))
            ]
            answers = await asyncio.gather(*(ask(*asked) for asked in both))
            wrong = [
                answer.text for answer, (_, _, word) in zip(answers, both, strict=True) if not answered(answer, word)
            ]
            assert wrong == []

        # aborted apart: while the other's waits at its last stage, with all its tensors behind it
        ids = [f"aborted-{one}" for one in range(8)]
        doomed = [asyncio.create_task(ask(old, one, "doomed", base / "never")) for one in ids]
        kept = [asyncio.create_task(ask(new, one, "kept", base / "go on")) for one in ids]

        async def all_there() -> bool:
            return await in_flight(new, 8) and await in_flight(old, 8)

        await eventually(all_there)
        async with httpx.AsyncClient(base_url=made.url("old"), timeout=PATIENCE_S) as http:
            for one in ids:
                gone = await http.delete(f"/v1/requests/{one}")
                assert gone.json() == {"id": one, "cancelled": True}
        codes = [answer.json()["error"]["code"] for answer in await asyncio.gather(*doomed)]
        assert codes == ["cancelled"] * 8
        (base / "go on").touch()
        assert all(answered(answer, "kept") for answer in await asyncio.gather(*kept))
        for client in (old, new):
            await at_rest(client)
