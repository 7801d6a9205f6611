"""Parts of layers compiled by torch: the same answers, and the same again where nothing can be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.loading import compiling
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.model.paged_attention.attention import GatherAttention
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits
from tests.engines.generation_kit import VOCABULARY, Answers, alone, tiny_model
from tests.thoroughness import rows

PROMPTS = {"a": [1, 2, 3], "b": list(range(40)), "c": [9] * 17}


def engine(model: Any) -> EngineCore:
    limits = SchedulerLimits(block_size=4, max_requests=8, max_batched_tokens=32, max_chunk=16, max_model_len=120)
    runner = ModelRunner(PagedModel(model), GatherAttention(), num_blocks=64, block_size=4)
    return EngineCore(Scheduler(limits, BlockPool(64)), InlineExecutor(runner), ModelFacts(VOCABULARY))


def answers_of(model: Any) -> dict[str, list[int]]:
    answers = Answers(engine(model))
    for name, prompt in PROMPTS.items():
        answers.ask(name, prompt)
    answers.run()
    return answers.tokens


def expected(kind: str) -> dict[str, list[int]]:
    return {name: alone(kind, prompt, 12) for name, prompt in PROMPTS.items()}


@pytest.mark.long
@pytest.mark.timeout(600)  # it runs a C++ compiler, where there is one
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_a_compiled_model_answers_token_for_token_as_generate_does() -> None:
    model = tiny_model("llama")
    parts = compiling.compile_parts(model)
    assert parts.count == 6, "feed-forward network and two norms of two layers"
    assert answers_of(model) == expected("llama")


@pytest.mark.parametrize("kind", rows(["llama", "gemma2", "gpt2", "gpt_neox", "phi"], each_run=2))
def test_what_cannot_be_compiled_is_computed_as_it_was_and_not_tried_again(kind: str) -> None:
    tried: list[str] = []

    def broken(function: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            tried.append(str(function))
            raise RuntimeError("no compiler")

        return compiled

    model = tiny_model(kind)
    parts = compiling.compile_parts(model, broken)
    assert answers_of(model) == expected(kind)
    assert len(tried) == 1 and parts.eager == "RuntimeError: no compiler"


def test_an_error_of_the_part_itself_is_raised_and_the_others_stay_compiled() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = nn.Identity()
            self.mlp = nn.Linear(4, 4)

    layer = Layer()
    parts = compiling.compile_parts(layer, lambda function: function)
    with pytest.raises(RuntimeError):
        layer.mlp(torch.zeros(1, 3))
    assert parts.eager is None and parts.count == 1
    assert layer.mlp(torch.zeros(1, 4)).shape == (1, 4)
