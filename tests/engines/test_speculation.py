"""Speculative decoding: drafts change no token of any request, and save steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.sampling.sampler import RowState
from stage_runtime.engines.autoregressive.speculation.proposing import NgramProposer
from stage_runtime.engines.autoregressive.speculation.settings import checked
from stage_runtime.rules.autoregressive.steps import Row
from tests.engines.generation_kit import BACKENDS, CONFIGS, END, VOCABULARY, Answers, alone, core
from tests.engines.test_generation_exact import check_interleaved, prompts
from tests.thoroughness import crossed, examples, rows

pytestmark = pytest.mark.usefixtures("each_way")

NGRAM = checked({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1})
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def speculating(kind: str = "llama", **options: Any) -> EngineCore:
    """A core whose requests have drafts of the tokens that followed their last one before."""
    return core(kind, proposer=NgramProposer(NGRAM), **{"num_speculative_tokens": 4, **options})


class Foreseeing:
    """Drafts of known answers, the last token of each of which is wrong: all others are right."""

    def __init__(self, answers: Mapping[str, Sequence[int]]) -> None:
        self._answers = answers
        self.proposed = 0

    def add(self, request_id: str, state: RowState) -> None: ...

    def propose(self, rows: Sequence[Row]) -> Mapping[str, Sequence[int]]:
        found = {}
        for row in rows:
            if not row.spare:
                continue
            draft = list(self._answers[row.request.id][row.place : row.place + row.spare])
            found[row.request.id] = [*draft[:-1], (draft[-1] + 1) % VOCABULARY] if draft else []
            self.proposed += len(draft)
        return found

    def take(self, row: Row, tokens: Sequence[int]) -> None: ...

    def drop(self, request_id: str) -> None: ...


@pytest.mark.parametrize(("kind", "backend"), rows(crossed(list(CONFIGS), BACKENDS), each_run=5))
def test_greedy_answers_are_those_of_generate(kind: str, backend: str) -> None:
    asked = {str(index): prompt for index, prompt in enumerate(prompts([3, 17, 40, 9, 26, 1]))}
    answers = Answers(speculating(kind, backend=backend, max_batched_tokens=64, blocks=100))
    for name in "0123":
        answers.ask(name, asked[name], LONG)
    for _ in range(4):
        answers.step()
    for name in "45":
        answers.ask(name, asked[name], LONG)
    answers.run()
    assert answers.tokens == {name: alone(kind, prompt, 40) for name, prompt in asked.items()}
    pool, stats = answers.engine.scheduler.pool, answers.engine.scheduler.stats
    assert pool.free == pool.capacity and stats.preemptions == 0
    assert 0 < stats.accepted_tokens <= stats.draft_tokens <= 4 * stats.drafts


@pytest.mark.parametrize("backend", BACKENDS)
def test_right_drafts_save_their_steps_and_wrong_tokens_are_written_over(backend: str) -> None:
    (prompt,) = prompts([10])
    whole = alone("llama", prompt, 41)
    steps = {}
    for drafts in (0, 4):
        proposer = Foreseeing({"a": whole[:41]})
        answers = Answers(core(backend=backend, proposer=proposer, num_speculative_tokens=drafts))
        answers.ask("a", prompt, LONG)
        answers.run()
        assert answers.tokens["a"] == whole[:40]
        steps[drafts] = answers.engine.steps
    assert steps[0] == 40
    stats = answers.engine.scheduler.stats
    assert stats.draft_tokens == proposer.proposed and stats.accepted_tokens == proposer.proposed - stats.drafts
    assert steps[4] <= 14  # four tokens in each: three of a draft, and one after them


def test_preempted_requests_are_computed_again_to_the_same_tokens() -> None:
    asked = {str(index): prompt for index, prompt in enumerate(prompts([14, 13, 15, 12]))}
    answers = Answers(speculating(blocks=24, prefix_caching=False))
    for name, prompt in asked.items():
        answers.ask(name, prompt, LONG)
    answers.run()
    stats = answers.engine.scheduler.stats
    assert stats.preemptions > 0 and stats.accepted_tokens > 0
    assert answers.tokens == {name: alone("llama", prompt, 40) for name, prompt in asked.items()}


def test_a_request_with_the_id_of_one_that_has_just_ended_begins_anew() -> None:
    first, second = prompts([10, 13])
    proposer = Foreseeing({"a": alone("llama", first, 41)})
    answers = Answers(core(proposer=proposer, num_speculative_tokens=4))
    answers.ask("a", first, LONG)
    while not answers.engine.scheduler.stats.accepted_tokens:
        answers.step()
    answers.engine.abort_requests(["a"])
    answers.ask("a", second, LONG)
    answers.run()
    assert answers.tokens["a"] == alone("llama", second, 40)


def test_a_prefix_of_tokens_of_drafts_is_found_by_later_prompts() -> None:
    (prompt,) = prompts([10])
    whole = alone("llama", prompt, 41)
    answers = Answers(core(proposer=Foreseeing({"a": whole, "b": []}), num_speculative_tokens=4))
    answers.ask("a", prompt, LONG)
    answers.run()
    answers.ask("b", [*prompt, *whole[:40]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    answers.run()
    assert answers.tokens["b"] == whole[40:]
    assert answers.engine.scheduler.stats.hit_tokens >= 44  # all but the blocks of the last draft


SAMPLED: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 1.0, "seed": 11},
    "nucleus": {"temperature": 0.7, "top_p": 0.8, "seed": 3},
    "penalties": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "greedy with penalties": {"temperature": 0.0, "presence_penalty": 0.2, "logit_bias": {7: 2.0}},
    "end": {"temperature": 0.6, "seed": 4, "ignore_eos": False, "min_tokens": 5, "logit_bias": {END: 6.0}},
    "stop token": {"temperature": 0.0, "stop_token_ids": (217,), "min_tokens": 3, "logit_bias": {217: 3.0}},
    "log probabilities": {"temperature": 0.3, "seed": 9, "logprobs": 3},
    "cut": {"temperature": 0.0, "max_tokens": 7},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_every_parameter_gives_the_tokens_that_it_gives_without_drafts(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **SAMPLED[name]})
    asked = prompts([14, 5, 20])
    found = {}
    whole: dict[str, list[int]] = {}
    for drafts in (0, 4):
        answers = Answers(core(proposer=Foreseeing(whole), num_speculative_tokens=drafts, max_batched_tokens=64))
        for index, prompt in enumerate(asked):
            answers.ask(str(index), prompt, params)
        logprobs: dict[str, list[Any]] = {}
        while answers.engine.has_work():
            for output in answers.step():
                assert len(output.logprobs) == (len(output.new_token_ids) if params.logprobs is not None else 0)
                logprobs.setdefault(output.request_id, []).extend(output.logprobs)
        whole = answers.tokens
        found[drafts] = answers.tokens, answers.finish, logprobs
    assert found[4][:2] == found[0][:2]
    assert answers.engine.scheduler.stats.accepted_tokens > 0
    for one, ones in found[0][2].items():
        assert [each.logprob for each in found[4][2][one]] == pytest.approx([each.logprob for each in ones], abs=1e-4)
        assert [[token for token, _value in each.top] for each in found[4][2][one]] == [
            [token for token, _value in each.top] for each in ones
        ]


@hypothesis_settings(max_examples=examples(3))
@given(data=st.data())
def test_any_interleaving_of_arrivals_and_aborts_gives_the_tokens_of_each_alone(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["llama", "gemma2", "gpt2", "qwen3"]))
    engine = speculating(kind, blocks=data.draw(st.integers(16, 40)), max_chunk=data.draw(st.sampled_from([3, 8, 32])))
    check_interleaved(data, engine, kind, SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True))
    engine.executor.shutdown()


def test_a_model_that_is_not_finite_at_a_draft_fails_that_request_alone() -> None:
    asked = prompts([10, 11])
    whole = {name: alone("llama", prompt, 12) for name, prompt in zip("ab", asked, strict=True)}
    engine = core(
        proposer=Foreseeing({**whole, "a": [*whole["a"][:1], *[VOCABULARY - 1] * 9]}), num_speculative_tokens=2
    )
    poisoned = engine.executor._runner.model.model  # type: ignore[attr-defined]
    embedding = poisoned.get_input_embeddings()
    hook = embedding.register_forward_hook(
        lambda _module, given, rows: rows.masked_fill((given[0] == VOCABULARY - 1)[..., None], math.nan)
    )
    try:
        answers = Answers(engine)
        for name, prompt in zip("ab", asked, strict=True):
            answers.ask(name, prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        answers.run()
    finally:
        hook.remove()
    assert answers.tokens["b"] == whole["b"]
    assert answers.finish["a"][0].value == "error" and "not finite" in answers.finish["a"][1]
