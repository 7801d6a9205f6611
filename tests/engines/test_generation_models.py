"""Models: what cannot be run is refused when it is loaded, and a row that goes wrong ends its request alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as untyped

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor
from stage_runtime.engines.autoregressive.model.attention import GatherAttention, LayerShape
from stage_runtime.engines.autoregressive.model.model_runner import NAN, ModelRunner
from stage_runtime.engines.autoregressive.model.models import PagedModel, UnsupportedModel
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
    return EngineCore(Scheduler(limits, BlockPool(64)), InlineExecutor(runner), vocab_size=VOCABULARY)


def test_a_model_that_attends_by_itself_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match="0 of 2 layers"):
        PagedModel(model)


def test_what_a_layer_caches_is_found_by_a_pass() -> None:
    assert PagedModel(tiny_model("llama")).layers == {0: LayerShape(2, 8, 8), 1: LayerShape(2, 8, 8)}
    assert PagedModel(tiny_model("gpt2")).layers == {0: LayerShape(4, 8, 8), 1: LayerShape(4, 8, 8)}


def test_a_prompt_that_gives_nan_ends_alone_and_its_blocks_are_not_cached() -> None:
    model = copy.deepcopy(tiny_model("llama"))
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
    model = copy.deepcopy(tiny_model("llama"))
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
