"""A stage that generates tokens with `tpSize` 2: two processes, one answer, and one end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import PATIENCE_S, Client, eventually, running
from tests.engines.generation_kit import alone, tiny_model, tiny_tokenizer

TEXTS = ["a", "the quick brown fox", "the quick brown cat"]


def pipeline_of(model: Path) -> PipelineConfig:
    return PipelineConfig(
        name="language",
        stages=[
            StageConfig(
                name="words",
                factory="language_stages:language_model",
                factory_args={"model": str(model)},
                gpu=[0, 1],
                tp_size=2,
                terminal=True,
            )
        ],
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def expected() -> list[list[int]]:
    return [alone("llama", tiny_tokenizer()(text)["input_ids"], 12) for text in TEXTS]


async def answers(client: Client) -> list[object]:
    bodies = await asyncio.gather(*(client.ask(text) for text in TEXTS))
    return [body.get("results", body).get("words", body) for body in bodies]


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_two_ranks_of_a_stage_generate_what_one_does(base: Path, model: Path) -> None:
    async with running(pipeline_of(model), base, cpu=True) as pipeline, Client(pipeline.url) as client:
        assert await answers(client) == expected()
        async with httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http:
            body = {"operation": "reset_prefix_cache", "stages": ["words"]}
            first, again = [(await http.post("/operations", json=body)).json()["results"] for _ in range(2)]
        assert [(one["rank"], one["error"]) for one in first] == [(0, None), (1, None)]
        assert first[0]["value"] > 0 and again[0]["value"] == 0
        assert await answers(client) == expected()


@pytest.mark.nightly  # test_tensor_parallel.py has ranks replaced each time, without a model
@pytest.mark.timeout(300)
async def test_ranks_that_are_replaced_together_generate_the_same(base: Path, model: Path) -> None:
    async with running(pipeline_of(model), base, cpu=True) as pipeline, Client(pipeline.url) as client:
        assert await answers(client) == expected()
        before = pipeline.pids()
        os.kill(before["words_tp1"], signal.SIGKILL)
        await eventually(lambda: not {before["words_tp0"], before["words_tp1"]} & set(pipeline.pids().values()))
        await pipeline.ready()
        assert await answers(client) == expected()
