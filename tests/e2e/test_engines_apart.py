"""Prefill and decode apart with engines in processes of their own: the tokens of one engine, whichever process ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import Disaggregation, PipelineConfig, PrefillPlacement, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import Client, eventually, running
from tests.engines.generation_kit import alone, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

KINDS: dict[str, dict[str, Any]] = {"process": {"own_process": True}, "engines": {"data_parallel_size": 2}}
FRESH = itertools.count(1000, 20)  # prompts that nobody has asked for


#: One engine alone goes through the same code; each death of it costs a start of its stage's process.
PARAMS = [pytest.param("process", marks=pytest.mark.nightly), "engines"]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=PARAMS)
async def paired(request: pytest.FixtureRequest) -> AsyncIterator[LocalPipeline]:
    """One pipeline of each kind for all tests: each of its processes imports torch. Its pools are small."""
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        model = Path(folder, "model")
        tiny_model("llama").save_pretrained(model)
        tiny_tokenizer().save_pretrained(model)
        words = StageConfig(
            name="words",
            process="decoder",
            factory="language_stages:apart_engines",
            factory_args={"model": str(model), "kv_cache_bytes": 40 * 4 * 512, **KINDS[request.param]},
            terminal=True,
            disaggregation=Disaggregation(prefill=PrefillPlacement(process="prefiller")),
        )
        spec = PipelineConfig(name="language", stages=[words], control=Control(heartbeat_seconds=0.25))
        async with running(spec, Path(folder)) as pipeline:
            yield pipeline


def texts(first: int, count: int = 6) -> list[str]:
    return [
        f"{one}: the quick brown fox jumps over the lazy dog, {one * 7} times" for one in range(first, first + count)
    ]


def expected(text: str, count: int = 12) -> list[int]:
    return alone("llama", tiny_tokenizer()(text)["input_ids"], count)


async def answer(client: Client, text: str, **params: Any) -> Any:
    body = (await client.post({"inputs": {"text": text, "params": {"max_tokens": 12, **params}}})).json()
    return body.get("results", body).get("words", body)


async def all_right(client: Client, asked: list[str]) -> None:
    found = await asyncio.gather(*(answer(client, text) for text in asked))
    assert found == [expected(text) for text in asked]


async def count(client: Client, name: str, stage: str = "words") -> float:
    """The sum of a metric of engines, over the instances of a stage."""
    found = await client.samples()
    return sum(
        float(one.value)
        for one in found
        if one.name == f"omnipipeline_engine_{name}" and one.labels.get("stage") == stage
    )


def engines(pipeline: LocalPipeline, group: str) -> list[int]:
    """The processes that compute for the group's only instance."""
    tasks = Path(f"/proc/{pipeline.pids()[group]}/task")
    children = [int(pid) for task in tasks.iterdir() for pid in Path(task, "children").read_text().split()]
    return [pid for pid in sorted(children) if Path(f"/proc/{pid}/comm").read_text().startswith("engine")]


async def nothing_held(client: Client) -> None:
    """No block is in use at either side."""

    async def free() -> bool:
        return await count(client, "kv_blocks_used") + await count(client, "kv_blocks_used", "words-prefill") == 0

    await eventually(free, what="each block must be free again")


async def crossed(client: Client, tokens: float) -> None:
    """Numbers come with beats, and a starved machine may declare prefill dead for a while."""

    async def received() -> bool:
        if await count(client, "kv_received_tokens_total") > tokens:
            return True
        await all_right(client, texts(next(FRESH)))
        return False

    await eventually(received, what="the blocks of as many tokens must cross")


async def test_engine_processes_exchange_blocks_and_answer_as_one_engine(paired: LocalPipeline) -> None:
    async with Client(paired.url) as client:
        await all_right(client, texts(0))
        await crossed(client, 6 * 40)
        asked = texts(50)[0]
        seeded = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
        twice = [await answer(client, asked, **seeded) for _ in range(2)]  # by prefill, then by decode's own cache
        others = await answer(client, asked, temperature=0)
        assert twice[0] == twice[1] != others == expected(asked)
        await all_right(client, [asked + " and then some more of it", asked[:20] + "another one, which begins alike"])

        async def sent() -> bool:
            return await count(client, "kv_sent_blocks_total", "words-prefill") > 60

        await eventually(sent, what="prefill must report what it sent")  # numbers come with beats
        assert await count(client, "kv_least_tokens") == 1
        await nothing_held(client)


async def test_small_pools_of_engine_processes_preempt_and_lose_no_block(paired: LocalPipeline) -> None:
    async with Client(paired.url) as client:

        async def preempted() -> bool:
            """How many requests are in decode at once depends on the machine."""
            asked = texts(next(FRESH), 16)
            found = await asyncio.gather(*(answer(client, text, max_tokens=40) for text in asked))
            assert found == [expected(text, 40) for text in asked]
            return await count(client, "preemptions_total") > 0

        await eventually(preempted, what="the pool must have been too small for all at once")
        await nothing_held(client)


async def test_a_killed_engine_of_prefill_costs_no_answer(paired: LocalPipeline) -> None:
    async with Client(paired.url) as client:
        asked = [asyncio.create_task(all_right(client, [text])) for text in texts(300, 24)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        os.kill(engines(paired, "prefiller")[0], signal.SIGKILL)
        await asyncio.gather(*asked)
        await paired.ready()
        await crossed(client, await count(client, "kv_received_tokens_total") + 40)  # by the one that took its place
        await nothing_held(client)


async def test_a_killed_engine_of_decode_fails_clearly_and_leaves_no_room(paired: LocalPipeline) -> None:
    async with Client(paired.url) as client:
        asked = texts(400, 24)
        tasks = [asyncio.create_task(answer(client, text)) for text in asked]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        os.kill(engines(paired, "decoder")[0], signal.SIGKILL)
        for text, found in zip(asked, await asyncio.gather(*tasks), strict=True):
            assert found == expected(text) or found["error"]["code"] in ("stage_failed", "unavailable"), found
        await paired.ready()

        async def answers() -> bool:
            text = texts(next(FRESH))[0]
            return bool(await answer(client, text) == expected(text))

        await eventually(answers, what="the engine that took its place must answer")
        await crossed(client, await count(client, "kv_received_tokens_total") + 40)
        await nothing_held(client)
