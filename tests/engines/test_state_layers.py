"""Models with state beside attention: exact however requests meet in steps, and their states end with them."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.model.paged_attention.attention import GatherAttention
from stage_runtime.engines.autoregressive.model.states import STATES_KEPT, StateSlots
from stage_runtime.errors import ConfigurationError
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.requests import FinishReason
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits
from tests.engines.generation_kit import (
    STATEFUL,
    VOCABULARY,
    Answers,
    alone,
    core,
    tiny_model,
    tiny_tokenizer,
)

LENGTHS = (3, 17, 40, 9, 26, 1)


def prompts(*lengths: int) -> dict[str, list[int]]:
    draw = random.Random(5)
    return {str(index): [draw.randrange(VOCABULARY) for _ in range(length)] for index, length in enumerate(lengths)}


def wanted(kind: str, asked: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: alone(kind, prompt, 12) for name, prompt in asked.items()}


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in STATEFUL), ("lfm2", {"overlapping": True}), ("lfm2", {"backend": "pages"})],
)
def test_states_go_on_through_chunks_and_late_joins(kind: str, options: dict[str, Any]) -> None:
    asked = prompts(*LENGTHS)
    answers = Answers(core(kind, prefix_caching=False, **options))
    for name in "0123":
        answers.ask(name, asked[name])
    for _ in range(4):
        answers.step()
    for name in "45":
        answers.ask(name, asked[name])
    answers.run()
    assert answers.tokens == wanted(kind, asked)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "mamba2"])
def test_a_preempted_request_is_computed_again_from_no_state(kind: str) -> None:
    asked = prompts(14, 13, 15, 12)
    answers = Answers(core(kind, blocks=18, prefix_caching=False))
    for name, prompt in asked.items():
        answers.ask(name, prompt)
    answers.run()
    assert answers.engine.scheduler.stats.preemptions > 0
    assert answers.tokens == wanted(kind, asked)


def held_nbytes(runner: ModelRunner) -> int:
    """Bytes of all tensors that states keep, also of those of which they are a part."""
    assert runner._states is not None
    kept = (states for slots in runner._states._slots.values() for _tokens, states in slots)
    tensors = [tensor for states in kept for state in states.values() for tensor in state.values()]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize("overlapping", [False, True])
def test_states_take_no_more_memory_than_is_kept_free_for_them_however_many_are_preempted(overlapping: bool) -> None:
    asked = prompts(*range(4, 16))
    answers = Answers(core("lfm2", blocks=26, prefix_caching=False, max_requests=12, overlapping=overlapping))
    runner: ModelRunner = answers.engine.executor.call(lambda one: one).result()
    for name, prompt in asked.items():
        answers.ask(name, prompt)
    most = 0
    while answers.engine.has_work():
        answers.step()
        answers.engine.executor.call(lambda one: None).result()
        most = max(most, held_nbytes(runner))
    assert answers.engine.scheduler.stats.preemptions > 3
    assert answers.tokens == wanted("lfm2", asked)
    assert most <= runner.model.state_bytes * STATES_KEPT * 12
    answers.engine.shutdown()


class Failing(GatherAttention):
    """Fails each pass over several rows at its last layer, after the states of the others were computed."""

    failures = 0

    def forward(self, call: Any, plan: Any) -> Any:
        groups, _slots = plan
        if sum(len(group.lengths) for group in groups) > 1:
            self.failures += 1
            raise MemoryError("no room for two")
        return super().forward(call, plan)


def test_rows_of_a_failed_pass_are_computed_again_from_the_states_before_it() -> None:
    limits = SchedulerLimits(block_size=4, max_batched_tokens=32, max_chunk=16, max_model_len=120, prefix_caching=False)
    backend = Failing()
    runner = ModelRunner(PagedModel(tiny_model("lfm2")), backend, num_blocks=64, block_size=4)
    answers = Answers(EngineCore(Scheduler(limits, BlockPool(64)), InlineExecutor(runner), ModelFacts(VOCABULARY)))
    asked = prompts(9, 21)
    for name, prompt in asked.items():
        answers.ask(name, prompt)
    answers.run()
    assert backend.failures > 0 and answers.tokens == wanted("lfm2", asked)


def test_states_end_with_their_requests() -> None:
    paged = PagedModel(tiny_model("mamba2"))
    runner = ModelRunner(paged, GatherAttention(), num_blocks=64, block_size=4)
    limits = SchedulerLimits(block_size=4, max_model_len=120, prefix_caching=False)
    answers = Answers(EngineCore(Scheduler(limits, BlockPool(64)), InlineExecutor(runner), ModelFacts(VOCABULARY)))
    slots: Any = runner._states
    for name, prompt in prompts(9, 21).items():
        answers.ask(name, prompt)
    answers.step()
    assert slots.count == 2
    answers.engine.abort_requests(["0"])
    answers.run()
    answers.ask("last", [1])
    answers.run()  # the ends of the others reach the runner with the next step
    assert slots.count <= 1 and answers.finish["1"][0] is FinishReason.LENGTH


def test_a_state_that_is_not_kept_is_not_taken_for_zeros() -> None:
    slots = StateSlots()
    with pytest.raises(RuntimeError, match="request a after 7 tokens"):
        slots.begin(["a"], [0, 1], [7], "cpu")


def test_a_stage_of_such_a_model_has_no_prefix_cache_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = Autoregressive(model="unused", max_requests=4, max_chunk=16, kv_cache_bytes=1 << 20)
    with caplog.at_level(logging.INFO):
        loaded = loader.assemble(spec, tiny_model("lfm2"), tiny_tokenizer())
    said = [one.getMessage() for one in caplog.records if "prefix cache" in one.getMessage()]
    assert said == ["a lfm2 model keeps state beside attention, of each request alone: the prefix cache is off"]
    answers = Answers(loaded.core)
    asked = dict.fromkeys("ab", prompts(40)["0"])
    for name, prompt in asked.items():
        answers.ask(name, prompt)
        answers.run()
    assert answers.tokens == wanted("lfm2", asked) and loaded.core.scheduler.stats.hit_tokens == 0


@pytest.mark.parametrize("kind", STATEFUL)
def test_the_memory_of_states_is_known_before_there_are_requests(kind: str) -> None:
    engine = core(kind, prefix_caching=False, overlapping=False)
    answers = Answers(engine)
    answers.ask("a", prompts(9)["0"])
    answers.step()
    answers.step()
    runner: ModelRunner = engine.executor._runner  # type: ignore[attr-defined]
    assert runner._states is not None
    kept = runner._states._slots["a"]
    assert len(kept) == STATES_KEPT
    for _tokens, by_layer in kept:
        nbytes = sum(value.nbytes for state in by_layer.values() for value in state.values())
        assert nbytes == runner.model.state_bytes > 0


def test_states_come_out_of_the_memory_for_keys_and_values() -> None:
    def blocks(**settings: Any) -> int:
        spec = Autoregressive(model="unused", max_chunk=16, max_model_len=64, linears="plain", **settings)
        return loader.assemble(spec, tiny_model("qwen3_5"), tiny_tokenizer()).num_blocks

    paged = PagedModel(tiny_model("qwen3_5"))
    states = 4 * STATES_KEPT * paged.state_bytes
    block = 16 * loader.token_bytes(paged.layers.values(), paged.dtype)
    assert blocks(max_requests=4, kv_cache_bytes=states + 3 * block) == 1 + 3  # the padding, too
    with pytest.raises(ConfigurationError, match=rf"max_requests=4\).* keeps {states} bytes of state"):
        blocks(max_requests=4, kv_cache_bytes=states + block - 1)
    assert blocks(max_requests=4) == 1 + 4 * 4  # as many as the requests need
