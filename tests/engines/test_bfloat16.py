"""bfloat16: only where the processor computes it, and then as near to float32 as transformers' own."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import stage_runtime as omni
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.kernels import fusing
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.model import dtypes
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.errors import ConfigurationError
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits
from tests.engines.generation_kit import VOCABULARY, attention, tiny_model, tiny_tokenizer

PROMPT = [(7 * at * at + 3) % 250 for at in range(60)]
NEW = 40


def answered(model: Any, backend: str, fused: bool) -> tuple[list[int], list[float]]:
    """The tokens of prompt and answer, and the log probability of each but the first."""
    limits = SchedulerLimits(block_size=4, max_requests=4, max_batched_tokens=32, max_chunk=16, max_model_len=200)
    paged = PagedModel(model)
    if fused:
        fusing.fuse(paged.model)
    runner = ModelRunner(paged, attention(backend), num_blocks=64, block_size=4)
    core = EngineCore(Scheduler(limits, BlockPool(64)), InlineExecutor(runner), ModelFacts(VOCABULARY))
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    core.add_request(EngineCoreRequest(request_id="one", prompt_token_ids=PROMPT, params=params))
    tokens, found = list(PROMPT), list[float]()
    while core.has_work():
        for one in core.step_fn()[0]:
            tokens += one.new_token_ids
            found += [each.logprob for each in (*one.prompt_logprobs, *one.logprobs)]
    return tokens, found


def by_transformers(model: Any, tokens: list[int]) -> torch.Tensor:
    """The log probability of each token but the first."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        all_of_them = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return torch.stack([all_of_them[place, token] for place, (_before, token) in enumerate(itertools.pairwise(tokens))])


@pytest.mark.long
@pytest.mark.parametrize(("backend", "fused"), [("gather", False), ("pages", True)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_log_probabilities_in_bf16_are_as_near_to_f32_as_those_of_transformers(
    kind: str, backend: str, fused: bool
) -> None:
    model = tiny_model(kind).to(torch.bfloat16)
    tokens, found = answered(copy.deepcopy(model), backend, fused)
    assert len(tokens) == len(found) + 1 == len(PROMPT) + NEW
    exact = by_transformers(copy.deepcopy(model).float(), tokens)
    theirs = (by_transformers(model, tokens) - exact).square().mean().sqrt()
    ours = (torch.tensor(found) - exact).square().mean().sqrt()
    assert 0 < ours <= 2 * theirs


@pytest.mark.parametrize(
    ("dtype", "device", "flags", "expected"),
    [
        ("auto", "cpu", {"avx512f"}, "float32"),
        ("auto", "cpu", {"avx512f", "avx512_bf16"}, "bfloat16"),
        ("auto", "cpu", {"amx_bf16", "amx_tile"}, "bfloat16"),
        ("auto", "cpu", {"asimd", "bf16"}, "bfloat16"),
        ("auto", "cuda:0", set(), "bfloat16"),
        ("bfloat16", "cpu", {"avx512_bf16"}, "bfloat16"),
        ("bfloat16", "cuda:0", set(), "bfloat16"),
        ("float32", "cpu", {"avx512_bf16"}, "float32"),
        ("float16", "cpu", set(), "float16"),
    ],
)
def test_auto_takes_bf16_where_there_are_instructions_for_it(
    dtype: str, device: str, flags: set[str], expected: str
) -> None:
    assert dtypes.chosen(dtype, device, frozenset(flags)) == expected


def test_a_processor_without_instructions_refuses_bf16_and_names_the_cure() -> None:
    with pytest.raises(ConfigurationError, match=r"dtype='bfloat16'.*dtype='auto' takes float32"):
        dtypes.chosen("bfloat16", "cpu", frozenset({"avx2"}))


def test_a_stage_is_loaded_in_the_dtype_that_auto_chooses(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = loader.load(omni.Autoregressive(model=str(tmp_path), dtype="auto", kernels="torch", linears="plain"))
    assert str(loaded.runner.model.dtype) == f"torch.{dtypes.chosen('auto', 'cpu')}"
    with pytest.raises(ConfigurationError, match="dtype='float8'"):
        loader.check(omni.Autoregressive(model="", dtype="float8"))
