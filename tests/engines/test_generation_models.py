"""Models: what cannot be run is refused when it is loaded, and a row that goes wrong ends its request alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as untyped

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.model.model_runner import NAN, ModelRunner
from stage_runtime.engines.autoregressive.model.models import (
    PagedModel,
    UnsupportedModel,
    load_model,
    load_plain,
)
from stage_runtime.engines.autoregressive.model.paged_attention.attention import GatherAttention, LayerShape
from stage_runtime.engines.autoregressive.model.positions import positions_of
from stage_runtime.engines.autoregressive.model.refusals import check_config
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.requests import FinishReason
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits
from tests.engines.generation_kit import VOCABULARY, Answers, alone, tiny_model

transformers: Any = untyped

POISON = 61  # a token whose embedding is NaN; none of the answers here has it


def engine(model: Any, backend: GatherAttention | None = None) -> EngineCore:
    limits = SchedulerLimits(block_size=4, max_requests=8, max_batched_tokens=64, max_chunk=64, max_model_len=120)
    runner = ModelRunner(PagedModel(model), backend or GatherAttention(), num_blocks=64, block_size=4)
    return EngineCore(Scheduler(limits, BlockPool(64)), InlineExecutor(runner), ModelFacts(VOCABULARY))


def test_a_model_that_attends_by_itself_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM, a bloom model: 0 of 2 layers"):
        PagedModel(model)


QUANTISED: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "bitsandbytes": {"load_in_4bit": True},  # as older versions wrote it
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8": {"quant_method": "fp8"},
}


@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("place", ["whole", "text part"])
def test_a_quantised_checkpoint_is_refused_by_the_name_of_its_form(form: str, place: str, tmp_path: Path) -> None:
    """The folder has no weights: it is refused before they are read."""
    quantised = {"quantization_config": QUANTISED[form]}
    config = {"model_type": "llama", **quantised}
    if place == "text part":
        config = {"model_type": "llava", "text_config": config, "vision_config": {"model_type": "clip_vision_model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = config["model_type"]
    for load in (load_model, load_plain):
        with pytest.raises(UnsupportedModel, match=f"a {kind} model with weights quantised by {form};"):
            load(str(tmp_path))


@pytest.mark.parametrize("alibi", [False, True])
def test_a_falcon_checkpoint_is_refused_in_one_sentence(alibi: bool, tmp_path: Path) -> None:
    config = transformers.FalconConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=alibi
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="its class of transformers has attention that cannot be replaced"):
        load_model(str(tmp_path))


def test_layers_of_a_kind_that_is_not_computed_are_named() -> None:
    config = transformers.DeepseekV4Config()
    with pytest.raises(UnsupportedModel, match=r"here: a deepseek_v4 model, with layers of .*compressed_sparse"):
        check_config("here", config)


def test_a_pass_that_a_model_cannot_do_refuses_it_by_name() -> None:
    config = transformers.LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    del model.model.norm
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM, a llama model: AttributeError: .*norm"):
        PagedModel(model)


def test_a_request_is_no_longer_than_a_chunk_of_chunked_attention() -> None:
    config = transformers.Llama4TextConfig(max_position_embeddings=1000, attention_chunk_size=64)
    assert positions_of(config) == 64


def test_what_a_layer_caches_is_found_by_a_pass() -> None:
    assert PagedModel(tiny_model("llama")).layers == {0: LayerShape(2, 8, 8), 1: LayerShape(2, 8, 8)}
    assert PagedModel(tiny_model("gpt2")).layers == {0: LayerShape(4, 8, 8), 1: LayerShape(4, 8, 8)}


def test_a_prompt_that_gives_nan_ends_alone_and_its_blocks_are_not_cached() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
    answers = Answers(engine(model))
    good, bad = list(range(1, 14)), [*range(20, 30), POISON, 3, 4]
    answers.ask("good", good)
    answers.ask("bad", bad)
    answers.ask("neighbour", good[:9])
    answers.run()
    assert answers.finish["bad"] == (FinishReason.ERROR, NAN)
    assert answers.tokens == {"good": alone("llama", good, 12), "bad": [], "neighbour": alone("llama", good[:9], 12)}
    pool = answers.engine.scheduler.pool
    assert pool.free == pool.capacity
    hits = answers.engine.scheduler.stats.hit_tokens  # of the neighbour, which begins as `good` does
    answers.ask("same beginning", [*bad[:8], 1, 2])
    answers.run()
    assert answers.engine.scheduler.stats.hit_tokens == hits
    assert answers.tokens["same beginning"] == alone("llama", [*bad[:8], 1, 2], 12)


@pytest.mark.parametrize("aborted", [False, True])
def test_nan_in_freed_blocks_reaches_no_later_request(aborted: bool) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
    answers = Answers(engine(model))
    answers.ask("bad", [POISON] * 90)  # two chunks: nothing is sampled from the first one
    answers.step()
    if aborted:
        answers.engine.abort_requests(["bad"])
    answers.run()
    prompts = {str(length): list(range(1, length)) for length in range(3, 14)}
    for name, prompt in prompts.items():
        answers.ask(name, prompt)
    answers.run()
    assert {name: answers.tokens[name] for name in prompts} == {
        name: alone("llama", prompt, 12) for name, prompt in prompts.items()
    }


class Fragile(GatherAttention):
    """Cannot plan a batch in which a row has seven tokens to compute."""

    def plan(self, batch: Any) -> Any:
        counts = [end - start for start, end in zip(batch.starts, batch.starts[1:], strict=False)]
        if 7 in counts:
            raise MemoryError("no room for seven")
        return super().plan(batch)


def test_a_pass_that_raises_is_computed_row_by_row_and_the_rows_that_raise_end() -> None:
    answers = Answers(engine(tiny_model("llama"), Fragile()))
    prompts = {"a": [1, 2, 3], "seven": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8, 7, 6]}
    for name, prompt in prompts.items():
        answers.ask(name, prompt)
    answers.run()
    assert answers.finish["seven"][0] is FinishReason.ERROR
    assert "no room for seven" in str(answers.finish["seven"][1])
    assert answers.tokens == {"a": alone("llama", [1, 2, 3], 12), "seven": [], "b": alone("llama", prompts["b"], 12)}
