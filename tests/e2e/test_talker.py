"""A talker behind a thinker, between real processes: hidden rows of one model are the prompt of the other."""

from __future__ import annotations

import asyncio
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


def pipeline_of(folder: Path, streams: bool, settings: dict[str, Any], **of_talker: Any) -> PipelineConfig:
    def stage(name: str, **fields: Any) -> StageConfig:
        arguments = {"model": str(folder / name), "streams": streams, **settings}
        return StageConfig(name=name, process=name, factory=f"talker_stages:{name}", factory_args=arguments, **fields)

    edges = {"next": "talker", **({"stream_to": "talker"} if streams else {})}
    return PipelineConfig(name="talk", stages=[stage("thinker", **edges), stage("talker", terminal=True, **of_talker)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("streams", "settings"),
    [
        pytest.param(True, {}, id="streamed in the stage"),
        pytest.param(False, {"own_process": True}, id="whole own process"),
        pytest.param(False, {}, id="whole in the stage", marks=pytest.mark.nightly),
        pytest.param(True, {"own_process": True}, id="streamed own process", marks=pytest.mark.nightly),
    ],
)
async def test_a_talker_continues_from_the_hidden_rows_of_its_thinker(
    streams: bool, settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    checkpoints(tmp_path)
    async with running(pipeline_of(tmp_path, streams, settings), base) as pipeline, Client(pipeline.url) as client:
        bodies = await asyncio.gather(*(client.ask(text) for text in TEXTS * 3))
    assert [body.get("results", body).get("talker", body) for body in bodies] == [spoken(text) for text in TEXTS * 3]


@pytest.mark.timeout(300)
@pytest.mark.nightly  # test_tensor_parallel_language.py has two ranks each time
async def test_a_talker_of_two_ranks_continues_from_the_stream_of_its_thinker(base: Path, tmp_path: Path) -> None:
    checkpoints(tmp_path)
    spec = pipeline_of(tmp_path, True, {}, gpu=[0, 1], tp_size=2)
    async with running(spec, base, cpu=True) as pipeline, Client(pipeline.url) as client:
        bodies = await asyncio.gather(*(client.ask(text) for text in TEXTS * 3))
    assert [body.get("results", body).get("talker", body) for body in bodies] == [spoken(text) for text in TEXTS * 3]
