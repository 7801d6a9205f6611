"""Events that an author's function records belong to its stage, whatever runs the function."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime import profiler
from stage_runtime.profiler.recorder import recorder
from tests.stage.stage_kit import plan, world


def note(payload: omni.StagePayload) -> Any:
    with profiler.span("model", payload.request.id):
        return payload.data


async def wait(payload: omni.StagePayload) -> Any:
    await asyncio.sleep(0)
    return await asyncio.to_thread(note, payload)


def produce(payload: omni.StagePayload) -> Iterator[Any]:
    yield omni.Result(note(payload))


async def stream(session: omni.Session) -> AsyncIterator[Any]:
    yield omni.Result(note(await session.payload()))


KINDS: dict[str, Any] = {
    "one worker": omni.Simple(note),
    "workers": omni.Simple(note, concurrency=3),
    "generators": omni.Simple(produce, concurrency=2),
    "tasks": omni.Simple(wait, concurrency=2),
    "batches": omni.Batched(lambda payloads: [note(payload) for payload in payloads]),
    "streams": omni.Streaming(stream),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_events_without_a_stage_are_of_the_stage_that_computes(kind: str, tmp_path: Path) -> None:
    path = recorder.start("run", tmp_path, "first")
    try:
        async with world() as made:
            made.process("p", [plan("a", terminal=True)], {"a": KINDS[kind]})
            for number in range(4):
                made.submit(f"r{number}", "a", number)
            await made.until(lambda: len(made.results()) == 4)
    finally:
        recorder.stop()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(each["request_id"], each["stage"]) for each in events if each["event_name"] == "model_start"]
    assert sorted(found) == [(f"r{number}", "a") for number in range(4)]
