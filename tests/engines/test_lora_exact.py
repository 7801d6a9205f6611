"""Requests with adapters, several and none in one batch, get the tokens of models with merged weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stage_runtime.engines.autoregressive.core import engine_operations
from stage_runtime.engines.autoregressive.kernels import native
from stage_runtime.engines.autoregressive.loading import compiling
from stage_runtime.engines.autoregressive.lora import sites
from stage_runtime.engines.autoregressive.lora.layers import LoRALayers
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.model.paged_attention.attention import GatherAttention
from stage_runtime.engines.autoregressive.model.rows.input_batch import Pass
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.errors import RequestError
from tests.engines.generation_kit import GREEDY, VOCABULARY, Answers, alone, alone_with, tiny_model
from tests.engines.lora_kit import adapter, merged
from tests.engines.rank_threads import ranked

KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2", "gpt_neox", "phi"]
NUMBA = pytest.mark.skipif(not native.available(), reason="needs numba")


def prompts(lengths: list[int]) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def answered(engine: Any, asked: list[tuple[str, list[int]]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Requests that come one step after the other, each with its adapter."""
    answers = Answers(engine)
    for index, (name, prompt) in enumerate(asked):
        answers.ask(str(index), prompt, params, adapter=name)
        answers.step()
    answers.run()
    assert engine.scheduler.pool.free == engine.scheduler.pool.capacity
    return [answers.tokens[str(index)] for index in range(len(asked))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("numba", marks=NUMBA)])
def test_each_row_of_a_batch_gets_the_tokens_of_its_own_merged_weights(kind: str, kernels: str, tmp_path: Path) -> None:
    folders = {"one": adapter(tmp_path / "1", kind), "two": adapter(tmp_path / "2", kind, seed=2, rank=3)}
    models = {"": tiny_model(kind), **{name: merged(kind, path) for name, path in folders.items()}}
    asked = list(zip(["one", "", "two", "one", "", "two"], prompts([3, 40, 9, 17, 5, 33]), strict=True))
    expected = [alone_with(models[name], prompt, 12) for name, prompt in asked]
    assert expected != [alone_with(models[""], prompt, 12) for _name, prompt in asked]
    linears = "numba" if kernels == "numba" else "plain"
    with ranked(kind, 1, kernels=kernels, linears=linears, lora_modules=folders) as engine:
        assert answered(engine, asked) == expected


@pytest.mark.parametrize("settings", [{"max_chunk": 4}, {"overlap": True}], ids=str)
def test_adapters_go_with_small_chunks_and_overlapping_steps(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    asked = list(zip(["one", "", "one"], prompts([30, 20, 7]), strict=True))
    models = {"": tiny_model("llama"), "one": merged("llama", folder)}
    with ranked("llama", 1, lora_modules={"one": folder}, **settings) as engine:
        assert answered(engine, asked) == [alone_with(models[name], prompt, 12) for name, prompt in asked]


def test_preempted_requests_are_computed_again_with_their_adapter(tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    asked = list(zip(["one", "", "one"], prompts([10, 9, 8]), strict=True))
    models = {"": tiny_model("llama"), "one": merged("llama", folder)}
    with ranked("llama", 1, lora_modules={"one": folder}, kv_cache_bytes=12 << 10) as engine:
        assert answered(engine, asked) == [alone_with(models[name], prompt, 12) for name, prompt in asked]
        assert engine.scheduler.stats.preemptions > 0


def test_parts_that_torch_compiles_stand_aside_in_passes_with_adapters(tmp_path: Path) -> None:
    model, called = tiny_model("llama"), 0

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*given: Any, **named: Any) -> Any:
            nonlocal called
            called += 1
            return function(*given, **named)

        return compiled

    shapes = sites.shapes_of(model)
    assert compiling.compile_parts(model, compiler).count > 0
    paged = PagedModel(model)
    where: dict[str, Any] = {"most_rank": 8, "dtype": paged.dtype, "device": paged.device}
    paged.adapters = LoRALayers(sites.sites_of(model, shapes), shapes, **where)
    runner = ModelRunner(paged, GatherAttention(), num_blocks=64, block_size=4)
    folder = adapter(tmp_path)
    runner.read_adapter(1, folder)
    runner.keep_adapter(1)
    prompt = prompts([9])[0]
    counts, logits = [], []
    for adapters in ([], [1]):
        before = called
        numbers = list(range(9))
        batch = Pass(prompt, numbers, [4 + at for at in numbers], [0, 9], [0], [[1, 2, 3]], [8], adapters=adapters)
        logits.append(runner.compute(batch).logits)
        counts.append(called - before)
    assert counts[0] > 0 and counts[1] == 0
    for found, expected in zip(logits, (tiny_model("llama"), merged("llama", folder)), strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(found, expected(torch.tensor([prompt])).logits[0, -1:], atol=1e-3, rtol=1e-3)


def test_drafts_of_a_request_with_an_adapter_are_verified_with_it(tmp_path: Path) -> None:
    folder = adapter(tmp_path, "gpt_neox")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    asked = list(zip(["one", ""], prompts([8, 9]), strict=True))
    models = {"": tiny_model("gpt_neox"), "one": merged("gpt_neox", folder)}
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with ranked("gpt_neox", 1, lora_modules={"one": folder}, speculative_config=drafts) as engine:
        found = answered(engine, asked, params)
        assert engine.scheduler.stats.accepted_tokens > 0
    assert found == [alone_with(models[name], prompt, 60) for name, prompt in asked]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_two_ranks_have_their_shares_of_each_adapter(kind: str, tmp_path: Path) -> None:
    folders = {"one": adapter(tmp_path / "1", kind), "two": adapter(tmp_path / "2", kind, seed=2)}
    asked = list(zip(["one", "", "two"], prompts([30, 20, 7]), strict=True))
    models = {"": tiny_model(kind), **{name: merged(kind, path) for name, path in folders.items()}}
    expected = [alone_with(models[name], prompt, 12) for name, prompt in asked]
    with ranked(kind, 2, lora_modules={"one": folders["one"]}, max_loras=2) as engine:
        assert engine_operations.load_adapter(engine, "two", folders["two"]) == ["one", "two"]
        assert answered(engine, asked) == expected
        with pytest.raises(RequestError, match="expected a rank of 1 to 16"):
            engine_operations.unload_adapter(engine, "two")
            engine_operations.load_adapter(engine, "large", adapter(tmp_path / "3", kind, rank=17))
        assert answered(engine, asked[:2]) == expected[:2]


def test_log_probabilities_are_those_of_the_merged_weights(tmp_path: Path) -> None:
    folder = adapter(tmp_path, use_rslora=True)
    prompt = prompts([21])[0]
    with ranked("llama", 1, lora_modules={"one": folder}) as engine:
        answers = Answers(engine)
        answers.ask("a", prompt, SamplingParams(temperature=0.0, max_tokens=1, logprobs=3), adapter="one")
        outputs = [one for _turn in range(4) for one in answers.step()]
    model = merged("llama", folder)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert [one.logprobs[0].logprob for one in outputs] == pytest.approx([float(logits.max())], abs=1e-4)


def test_base_rows_are_bit_for_bit_those_of_a_stage_without_adapters(tmp_path: Path) -> None:
    prompt = prompts([30])[0]
    with ranked("llama", 1, lora_modules={"one": adapter(tmp_path)}) as engine:
        assert answered(engine, [("", prompt)]) == [alone("llama", prompt, 12)]
