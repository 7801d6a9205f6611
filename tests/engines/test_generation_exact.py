"""Greedy answers are token for token those of transformers' ``generate`` in f32, however requests meet in steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from tests.engines.generation_kit import BACKENDS, CONFIGS, GREEDY, VOCABULARY, Answers, alone, core
from tests.thoroughness import crossed, examples

pytestmark = pytest.mark.usefixtures("each_way")


def prompts(lengths: list[int], seed: int = 3) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def check(answers: Answers, kind: str, asked: dict[str, list[int]], count: int = 12) -> None:
    assert answers.tokens == {name: alone(kind, prompt, count) for name, prompt in asked.items()}
    pool = answers.engine.scheduler.pool
    assert pool.free == pool.capacity


@pytest.mark.parametrize(("kind", "backend"), crossed(list(CONFIGS), BACKENDS))
def test_mixed_lengths_chunks_and_late_joins_give_the_tokens_of_each_alone(kind: str, backend: str) -> None:
    asked = {str(index): prompt for index, prompt in enumerate(prompts([3, 17, 40, 9, 26, 1]))}
    answers = Answers(core(kind, backend=backend))
    for name in "0123":
        answers.ask(name, asked[name])
    for _ in range(4):
        answers.step()
    for name in "45":
        answers.ask(name, asked[name])
    answers.run()
    assert answers.engine.scheduler.stats.preemptions == 0
    check(answers, kind, asked)


@pytest.mark.parametrize("overlapping", [False, True])
def test_short_prompts_first_give_the_same_tokens(overlapping: bool) -> None:
    asked = {str(index): prompt for index, prompt in enumerate(prompts([3, 17, 40, 9, 26, 1]))}
    answers = Answers(core(overlapping=overlapping, blocks=40, policy="shortest"))
    for name, prompt in asked.items():
        answers.ask(name, prompt)
        answers.step()
    answers.run()
    check(answers, "llama", asked)


@pytest.mark.parametrize(("kind", "backend"), crossed(["llama", "gemma2", "gpt2", "gpt_neox"], BACKENDS))
def test_preempted_requests_are_computed_again_to_the_same_tokens(kind: str, backend: str) -> None:
    asked = {str(index): prompt for index, prompt in enumerate(prompts([14, 13, 15, 12]))}
    answers = Answers(core(kind, backend=backend, blocks=18, prefix_caching=False))
    for name, prompt in asked.items():
        answers.ask(name, prompt)
    answers.run()
    assert answers.engine.scheduler.stats.preemptions > 0
    check(answers, kind, asked)


@pytest.mark.parametrize(("kind", "backend"), crossed(["llama", "gemma3", "qwen3", "phi"], BACKENDS))
def test_a_shared_prefix_is_found_and_the_tokens_stay_the_same(kind: str, backend: str) -> None:
    shared, *tails = prompts([21, 5, 8, 1])
    asked = {str(index): shared + tail for index, tail in enumerate(tails)}
    answers = Answers(core(kind, backend=backend))
    for name, prompt in asked.items():
        answers.ask(name, prompt)
        answers.run()
    assert answers.engine.scheduler.stats.hit_tokens == 40
    check(answers, kind, asked)


def test_requests_of_one_step_share_a_prefix_that_the_same_step_computes() -> None:
    (shared,) = prompts([16])
    asked = {"a": [*shared, 1], "b": [*shared, 2]}
    answers = Answers(core("llama", max_batched_tokens=64, max_chunk=64))
    for name, prompt in asked.items():
        answers.ask(name, prompt)
    answers.run()
    check(answers, "llama", asked)


def check_interleaved(data: st.DataObject, engine: EngineCore, kind: str, params: SamplingParams = GREEDY) -> None:
    """Requests come, step and are aborted as ``data`` chooses: each gets the tokens that it gets alone, up to its
    abort. No block is left in use.
    """
    answers, pool = Answers(engine), prompts([6, 19, 11, 28, 19, 3], seed=5)
    pool[4] = pool[1][:12] + pool[4][:7]
    waiting, asked, aborted = list(range(6)), dict[str, list[int]](), set[str]()
    while waiting or engine.has_work():
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "abort"]))
        if action == "add" and waiting:
            name = str(waiting[0])
            asked[name] = pool[waiting.pop(0)]
            answers.ask(name, asked[name], params)
        elif action == "abort" and asked:
            name = data.draw(st.sampled_from(sorted(asked)))
            if name not in answers.finish:
                aborted.add(name)
                engine.abort_requests([name])
        else:
            answers.step()
    for name, prompt in asked.items():
        whole = alone(kind, prompt, params.max_tokens)
        assert answers.tokens[name] == (whole[: len(answers.tokens[name])] if name in aborted else whole)
    assert engine.scheduler.pool.free == engine.scheduler.pool.capacity


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(5))
@given(data=st.data())
def test_any_interleaving_of_arrivals_and_aborts_gives_the_tokens_of_each_alone(
    backend: str, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["llama", "gemma2", "gpt2", "qwen3"]))
    blocks = data.draw(st.integers(14, 40))
    engine = core(
        kind,
        blocks=blocks,
        backend=backend,
        max_chunk=data.draw(st.sampled_from([3, 8, 32])),
    )
    check_interleaved(data, engine, kind)
    engine.executor.shutdown()


def test_a_seed_gives_the_same_answer_in_any_batch_and_after_a_preemption() -> None:
    sampled = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    asked = prompts([14, 13, 15, 12])
    lone = Answers(core())
    lone.ask("a", asked[3], sampled)
    lone.run()
    many = Answers(core(blocks=18, prefix_caching=False))
    for index, prompt in enumerate(asked[:3]):
        many.ask(str(index), prompt, SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True))
    many.ask("a", asked[3], sampled)
    many.run()
    assert many.engine.scheduler.stats.preemptions > 0
    assert many.tokens["a"] == lone.tokens["a"]
    assert lone.tokens["a"] != alone("llama", asked[3], 12)


def test_a_greedy_row_beside_sampled_ones_is_greedy() -> None:
    (prompt,) = prompts([10])
    answers = Answers(core())
    answers.ask("greedy", prompt)
    answers.ask("sampled", prompt, SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True))
    answers.run()
    assert answers.tokens["greedy"] == alone("llama", prompt, GREEDY.max_tokens)
