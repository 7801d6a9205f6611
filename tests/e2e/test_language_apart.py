"""A language model with prefill and decode apart, as processes: the same tokens over every relay, and at deaths."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import Disaggregation, PipelineConfig, PrefillPlacement, StageConfig
from tests.e2e.local_pipelines import Client, eventually, running
from tests.engines.generation_kit import alone, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.timeout(300)


def texts(first: int = 0) -> list[str]:
    """Eight prompts that begin differently."""
    return [f"{one}: the quick brown fox jumps over the lazy dog, {one * 7} times" for one in range(first, first + 8)]


TEXTS = texts()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


def expected(asked: Sequence[str] = TEXTS) -> list[list[int]]:
    return [alone("llama", tiny_tokenizer()(text)["input_ids"], 12) for text in asked]


def apart(model: Path, **changes: Any) -> PipelineConfig:
    words = StageConfig(
        name="words",
        process="decoder",
        factory="language_stages:apart_model",
        factory_args={"model": str(model)},
        terminal=True,
        disaggregation=Disaggregation(prefill=PrefillPlacement(process="prefiller")),
    )
    return PipelineConfig(name="language", stages=[words], control=Control(heartbeat_seconds=0.25), **changes)


async def answers(client: Client, asked: Sequence[str] = TEXTS) -> list[object]:
    bodies = await asyncio.gather(*(client.ask(text) for text in asked))
    return [body.get("results", body).get("words", body) for body in bodies]


async def count(client: Client, name: str) -> float:
    found = await client.metrics()
    return sum(value for key, value in found.items() if key.startswith(f"omnipipeline_engine_kv_{name}"))


# Each time: engines/test_disaggregated_example.py has the tokens, test_prefill_apart.py relays without a model.
@pytest.mark.nightly
@pytest.mark.parametrize("relay", ["shm", "tcp", "nixl", "mooncake"])
async def test_prompts_from_prefill_are_answered_right_over_every_relay(
    relay: Literal["shm", "tcp", "nixl", "mooncake"], base: Path, model: Path
) -> None:
    async with running(apart(model, relay_backend=relay), base) as pipeline, Client(pipeline.url) as client:
        assert await answers(client) == expected()
        firsts = itertools.count(8, 8)

        async def received() -> bool:
            """Counts come with beats, after the answers. A starved machine may declare prefill dead for a while."""
            if await count(client, "received_tokens_total") > 8 * 40:
                return True
            more = texts(next(firsts))
            assert await answers(client, more) == expected(more)
            return False

        await eventually(received, what="the blocks of as many tokens must cross")
        assert (await client.metrics())["omnipipeline_engine_kv_failed_total{refused}"] == 0
        assert await answers(client) == expected()  # from decode's own cache


@pytest.mark.nightly  # test_prefill_apart.py kills, freezes and scales prefill each time, without a model
async def test_prefill_that_is_killed_or_frozen_costs_no_answer(base: Path, model: Path) -> None:
    async with running(apart(model), base) as pipeline, Client(pipeline.url) as client:
        wanted = expected()
        asked = asyncio.create_task(answers(client))
        os.kill(pipeline.pids()["prefiller"], signal.SIGKILL)
        assert await asked == wanted
        await pipeline.ready()
        frozen = pipeline.pids()["prefiller"]
        os.kill(frozen, signal.SIGSTOP)
        try:
            assert await answers(client) == wanted
        finally:
            os.kill(frozen, signal.SIGCONT)
        await pipeline.scale("prefiller", 0)
        assert await answers(client) == wanted
        await pipeline.scale("prefiller", 1)

        async def used() -> bool:
            before = await count(client, "received_tokens_total")
            await client.ask(f"{os.urandom(20).hex()} and more of it")
            return await count(client, "received_tokens_total") > before

        await eventually(used, what="the next prefill instance must be used")
