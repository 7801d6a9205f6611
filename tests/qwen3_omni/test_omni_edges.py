"""Edges of examples/qwen3_omni: streamed or at the end, by each relay, the answers are those of the whole model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import stage_runtime as omni
from omnipipeline_spec.loading.reading import load
from stage_models.qwen3_omni import checkpoint, values
from stage_models.qwen3_omni.preparing import Preparer
from stage_runtime import testing
from tests.qwen3_omni.omni_cases import CASES, Case, request
from tests.qwen3_omni.test_omni_answers import EXAMPLE, TOGETHER, ask, check, pipeline
from tests.thoroughness import rows

pytestmark = pytest.mark.long

BY_NAME = {case.name: case for case in CASES}
#: Talkers that end before and after their thinker, pictures and sounds.
SOME = [BY_NAME[name] for name in ("long-answer", "short-answer", "picture-and-sound", "text")]
STREAMS = [(stage.name, target) for stage in load(EXAMPLE).spec.stages for target in stage.stream_to]


def test_the_streams_of_the_pipeline_are_known() -> None:
    assert STREAMS == [("thinker", "decode"), ("thinker", "talker"), ("talker", "code2wav")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "switched",
    rows([STREAMS, *([one] for one in STREAMS)], each_run=1),
    ids=lambda given: " and ".join(f"{source} to {target}" for source, target in given),
)
async def test_an_edge_gives_the_same_answers_when_it_is_sent_at_the_end(
    tiny_omni: str, oracle: dict[str, Any], switched: list[tuple[str, str]]
) -> None:
    """The talker's steps are in the stage's own thread; elsewhere they have one of their own."""
    at_end = {source: [target for one, target in switched if one == source] for source, _target in switched}
    changed = [f"stages.{source}.streamAtEnd=[{', '.join(targets)}]" for source, targets in at_end.items()]
    changed.append("stages.talker.factoryArgs.overlap=false")
    async with pipeline(tiny_omni, *TOGETHER, *changed) as client:
        leaving = [asyncio.create_task(ask(client, case)) for case in SOME[:2]]
        answers = [asyncio.create_task(ask(client, case)) for case in SOME]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        for case, answer in zip(SOME, await asyncio.gather(*answers), strict=True):
            check(tiny_omni, oracle, case, answer)
        await asyncio.gather(*leaving, return_exceptions=True)
        check(tiny_omni, oracle, SOME[0], await ask(client, SOME[0]))


@pytest.mark.nightly  # tcp each time: test_omni_replicas.py
@pytest.mark.timeout(600)
@pytest.mark.parametrize("relay", ["tcp", "nixl"])
async def test_each_relay_gives_the_answers_of_the_whole_model(
    tiny_omni: str, oracle: dict[str, Any], relay: str
) -> None:
    """shm is the default, by which `test_omni_answers` asks."""
    async with pipeline(tiny_omni, f"relayBackend={relay}") as client:
        for case, answer in zip(CASES, await asyncio.gather(*(ask(client, case) for case in CASES)), strict=True):
            check(tiny_omni, oracle, case, answer)


def test_after_the_prompt_the_talker_gets_rows_of_new_tokens_alone(tiny_omni: str) -> None:
    """However long the prompt is, and however many pictures are in it."""
    small = _crossed(tiny_omni, Case("small", ("hi",), tokens=12))
    large = _crossed(tiny_omni, Case("large", ("x" * 200,), tokens=12))
    assert large[0] > 5 * small[0], "the prompt's rows cross once, in the first chunk"
    assert large[1:] == small[1:]
    assert sum(small[1:]) == 11 * 64 * 4, "of each token one row of 64 numbers; the last one's is not needed"


def _crossed(folder: str, case: Case) -> list[int]:
    """Bytes of tensors in each chunk to the talker, in order; those of new tokens added up where a step gives many."""
    prepared, _pictures, _sounds = Preparer(folder, checkpoint.config_of(folder)).prepare(request(case))
    asked = request(case)
    payload = omni.StagePayload(
        request=omni.OmniRequest(
            id=asked.id,
            kind=asked.kind,
            inputs=asked.inputs,
            params={**asked.params, "min_tokens": case.tokens},
            modalities=asked.modalities,
        ),
        data=values.Understood(prepared=prepared),
    )
    (found,) = testing.run_stage("stage_models.qwen3_omni.stages:thinker", [payload], model=folder, threads=1)
    chunks = [chunk.data for chunk in found.chunks if chunk.to == "talker"]
    return [sum(one.nbytes for one in vars_of(data) if isinstance(one, torch.Tensor)) for data in chunks]


def vars_of(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__struct_fields__]
