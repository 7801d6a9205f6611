"""Pipelines answer alike wherever their stages run: to the openai client, streamed and not, on every transport."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import openai
import pytest

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import HELLO, SPREAD, TOGETHER, Client, at_rest, diamond, running
from tests.thoroughness import THOROUGH, rows

TEXTS = ["one", "one two", "the quick brown fox jumps over", "a b c d e f g h i j k l m n o p"]


async def test_hello_answers_the_openai_client_streamed_and_whole(base: Path) -> None:
    user: Any = [{"role": "user", "content": "hello big world"}]
    async with running(HELLO, base) as pipeline:
        url = f"{pipeline.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="hello", messages=user)
            pieces = [
                chunk.choices[0].delta.content
                async for chunk in await client.chat.completions.create(model="hello", messages=user, stream=True)
                if chunk.choices
            ]
    assert whole.choices[0].message.content == "HELLO!! BIG!! WORLD!! "
    assert whole.usage is not None and whole.usage.completion_tokens == 3
    assert [piece for piece in pieces if piece] == ["HELLO!! ", "BIG!! ", "WORLD!! "]


async def answers(client: Client) -> list[Any]:
    """Everything that a diamond says: to small and large requests at once, then streamed."""
    whole = await asyncio.gather(*(client.answer(text, size=size) for text in TEXTS for size in (4, 1 << 20)))
    streams = [await client.streamed(text) for text in TEXTS]
    await at_rest(client)
    return [whole, streams]


async def answers_of(base: Path, processes: dict[str, str], **changes: Any) -> list[Any]:
    """The same of one that is placed so."""
    async with running(diamond(processes, **changes), base) as pipeline, Client(pipeline.url) as client:
        assert len(pipeline.pids()) == 1 + len(set(processes.values()))
        return await answers(client)


@pytest.mark.long
@pytest.mark.proves("placement")
@pytest.mark.timeout(400)  # up to four pipelines, 20 s on a machine that does nothing else
async def test_the_same_pipeline_answers_the_same_in_one_process_in_many_and_by_either_relay(
    base: Path, client: Client
) -> None:
    """Placement and relay change how values travel, never what the stages make of them. The shared one is apart."""
    together = await answers_of(base, TOGETHER)
    assert [answer["text"] for answer in together[0]] == [text for text in TEXTS for _ in range(2)]
    words = [[event[1]["data"] for event in stream if event[0] == "chunk"] for stream in together[1]]
    assert words == [text.upper().split() for text in TEXTS]
    assert await answers(client) == together
    assert await answers_of(base, SPREAD, relay_backend="tcp") == together
    if THOROUGH:
        assert await answers_of(base, SPREAD, relay_backend="nixl") == together


@pytest.mark.long
@pytest.mark.proves("buffer-written-again")
# Every relay each time: relays/test_relay_contract.py.
@pytest.mark.parametrize("relay", rows(["shm", "tcp", "nixl", "mooncake"], each_run=1))
async def test_a_buffer_that_is_used_again_arrives_as_it_was_each_time(
    relay: Literal["shm", "tcp", "nixl", "mooncake"], base: Path
) -> None:
    """The buffer is a generator's own memory or the arena's; values are yielded and returned, one after the other."""
    stages = [
        StageConfig(name="give", process="p", factory="diamond_stages:one_buffer", next="take", stream_to="take"),
        StageConfig(name="take", process="q", factory="diamond_stages:what_came", terminal=True),
    ]
    source = PipelineConfig(stages=stages, relay_backend=relay)
    async with running(source, base) as pipeline, Client(pipeline.url) as client:
        answers = [client.ask("x", chunks=count) for count in (12, 1, 12, 7)]
        for count, body in zip((12, 1, 12, 7), await asyncio.gather(*answers), strict=True):
            assert body["results"]["take"] == [*([[number], [number]] for number in range(count)), [[255], [255]]]


async def test_both_replicas_of_a_group_serve(client: Client) -> None:
    before = await served(client)
    found = await asyncio.gather(*(client.answer(f"request {index}") for index in range(40)))
    assert [answer["text"] for answer in found] == [f"request {index}" for index in range(40)]
    counts = {name: count - before[name] for name, count in (await served(client)).items() if name[0] == "voice"}
    assert len(counts) == 2 and sum(counts.values()) == 40 and min(counts.values()) >= 5, counts


async def served(client: Client) -> dict[tuple[str, str], int]:
    return {(one["group"], one["incarnation"]): one["bound_total"] for one in (await client.status())["instances"]}


async def test_chunks_of_one_request_never_turn_up_in_another(client: Client) -> None:
    texts = [" ".join(f"w{index}x{word}" for word in range(12)) for index in range(60)]
    streams = await asyncio.gather(*(client.streamed(text) for text in texts))
    found = [[event[1]["data"] for event in events if event[0] == "chunk"] for events in streams]
    assert found == [text.upper().split() for text in texts]
    assert [one["text"] for one in await asyncio.gather(*map(client.answer, texts))] == texts
