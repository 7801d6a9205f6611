"""A talker behind a thinker, between real processes: hidden rows of one model are the prompt of the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e import talker_stages
from tests.e2e.local_pipelines import Client, running
from tests.engines.generation_kit import alone, tiny_model, tiny_tokenizer, transformers

TEXTS = ["a", "the quick brown fox", "the quick brown cat", "zzz" * 9]


def spoken(text: str) -> list[int]:
    """The answer of transformers alone: the thinker's text, its hidden rows, the talker's answer to them."""
    prompt = tiny_tokenizer()(text)["input_ids"]
    thinker, talker = tiny_model("llama"), tiny_model("qwen2")
    whole = prompt + alone("llama", prompt, 12)
    talker.set_attn_implementation("eager")
    with torch.inference_mode():
        hidden = thinker(torch.tensor([whole]), output_hidden_states=True).hidden_states[-1][0]
        first = talker.get_input_embeddings()(torch.tensor(talker_stages.FIRST))
        embeds = torch.cat([first, hidden[len(prompt) - 1 : -1]])[None]
        wanted = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        answer = talker.generate(inputs_embeds=embeds, attention_mask=mask, generation_config=wanted)
    return [int(token) for token in answer[0]]


def checkpoints(folder: Path) -> None:
    for name, kind in (("thinker", "llama"), ("talker", "qwen2")):
        tiny_model(kind).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)


def pipeline_of(folder: Path, *, streamed: Mapping[str, Any], whole: Mapping[str, Any]) -> PipelineConfig:
    """Two thinkers with a talker each. streamed, whole: settings of the engines of the pair that passes rows so."""
    stages = [
        StageConfig(
            name="take",
            process="thinkers",
            factory="talker_stages:take",
            next=["streamed-thinker", "whole-thinker"],
        )
    ]
    for way, settings in (("streamed", streamed), ("whole", whole)):
        streams = way == "streamed"
        talker = f"{way}-talker"
        edges: dict[str, Any] = {"next": talker, **({"stream_to": talker} if streams else {})}
        for name, fields in (("thinker", edges), ("talker", {"terminal": True})):
            stages.append(
                StageConfig(
                    name=f"{way}-{name}",
                    process=f"{name}s",
                    factory=f"talker_stages:{name}",
                    factory_args={"model": str(folder / name), "streams": streams, **settings},
                    **fields,
                )
            )
    return PipelineConfig(name="talk", stages=stages)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("streamed", "whole"),
    [
        ({}, {"own_process": True}),
        pytest.param({"own_process": True}, {}, marks=pytest.mark.nightly),
    ],
    ids=["streamed in the stage, whole own process", "streamed own process, whole in the stage"],
)
async def test_a_talker_continues_from_the_hidden_rows_of_its_thinker(
    streamed: dict[str, Any], whole: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    checkpoints(tmp_path)
    spec = pipeline_of(tmp_path, streamed=streamed, whole=whole)
    async with running(spec, base) as pipeline, Client(pipeline.url) as client:
        bodies = await asyncio.gather(*(client.ask(text) for text in TEXTS * 3))
    for way in ("streamed", "whole"):
        found = [body.get("results", body).get(f"{way}-talker", body) for body in bodies]
        assert found == [spoken(text) for text in TEXTS * 3]


@pytest.mark.timeout(300)
@pytest.mark.nightly  # test_tensor_parallel_language.py has two ranks each time
async def test_a_talker_of_two_ranks_continues_from_the_stream_of_its_thinker(base: Path, tmp_path: Path) -> None:
    checkpoints(tmp_path)
    arguments = {"streams": True}
    thinker = StageConfig(
        name="thinker",
        process="thinker",
        factory="talker_stages:thinker",
        factory_args={"model": str(tmp_path / "thinker"), **arguments},
        next="talker",
        stream_to="talker",
    )
    talker = StageConfig(
        name="talker",
        process="talker",
        factory="talker_stages:talker",
        factory_args={"model": str(tmp_path / "talker"), **arguments},
        terminal=True,
        gpu=[0, 1],
        tp_size=2,
    )
    spec = PipelineConfig(name="talk", stages=[thinker, talker])
    async with running(spec, base, cpu=True) as pipeline, Client(pipeline.url) as client:
        bodies = await asyncio.gather(*(client.ask(text) for text in TEXTS * 3))
    assert [body.get("results", body).get("talker", body) for body in bodies] == [spoken(text) for text in TEXTS * 3]
