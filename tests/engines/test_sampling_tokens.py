"""Choosing tokens: each parameter does what it says, and a row depends on nothing of its neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stage_runtime.engines.autoregressive.sampling.parameters import OutputKind, SamplingParams, from_params
from stage_runtime.engines.autoregressive.sampling.sampler import RowState, report, reports, sample, uniform
from stage_runtime.errors import InvalidRequest

LOGITS = [2.0, 1.0, 0.0, -1.0]


def row(prompt: tuple[int, ...] = (), seed: int = 1, **params: Any) -> RowState:
    return RowState(SamplingParams(**params), seed, frozenset({3}), prompt)


def tokens(state: RowState, count: int = 300, logits: list[float] = LOGITS) -> Counter[int | None]:
    found: Counter[int | None] = Counter()
    for place in range(count):
        found[sample(torch.tensor([logits]), [state], [place])[0].token] += 1
    return found


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        ({"temperature": 0.0}, {0}),
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),  # 0.64, 0.24, 0.09, 0.03
        ({"top_p": 0.8}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.2}, {0, 1}),
        ({"min_p": 0.2, "top_k": 3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),
        ({"temperature": 0.1}, {0}),
        ({"logit_bias": {0: -100.0}}, {1, 2, 3}),
        ({"temperature": 0.0, "logit_bias": {2: 5.0}}, {2}),
    ],
)
def test_only_what_the_parameters_allow_is_chosen(params: dict[str, Any], possible: set[int]) -> None:
    assert set(tokens(row(**params))) == possible


def test_a_top_k_of_minus_one_is_none_as_in_vllm() -> None:
    assert from_params({"top_k": -1}, SamplingParams(top_k=5)).top_k == 0
    for wrong in (-2, -1.5, True):
        with pytest.raises(InvalidRequest, match="top_k"):
            from_params({"top_k": wrong}, SamplingParams())


@pytest.mark.parametrize("others", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-38, 1e-36, 1e-10, 9e-6, 1.1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_at_a_very_low_temperature_the_likeliest_token_is_chosen(
    temperature: float, others: dict[str, Any], dtype: torch.dtype
) -> None:
    logits = 5 * torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    logits[0, 77], logits[0, 78] = 30.0, 29.0
    assert sample(logits.to(dtype), [row(temperature=temperature, **others)], [0])[0].token == 77
    huge = torch.tensor([[-3e38, 3e38, float("-inf"), 2e38]], dtype=dtype)
    assert sample(huge, [row(temperature=temperature, **others)], [0])[0].token == 1


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    found = tokens(row(), count=4000)
    expected = torch.tensor(LOGITS).softmax(-1).tolist()
    assert [found[token] / 4000 for token in range(4)] == pytest.approx(expected, abs=0.03)


def test_a_nucleus_wider_than_the_first_candidates_is_searched_in_the_whole_vocabulary() -> None:
    flat = [0.0] * 2000
    found = tokens(row(top_p=0.9), count=300, logits=flat)
    assert len(found) > 200  # 256 candidates alone hold 0.13
    narrow = tokens(row(top_p=0.05), count=300, logits=flat)
    assert len(narrow) <= 101


@given(seed=st.integers(0, 2**63 - 1), place=st.integers(0, 10**6), others=st.integers(0, 4), at=st.integers(0, 4))
def test_a_row_is_the_same_in_any_batch(seed: int, place: int, others: int, at: int) -> None:
    own = torch.randn(40, generator=torch.Generator().manual_seed(seed % 1000))
    alone = sample(own[None].clone(), [row(seed=seed, top_p=0.9)], [place])[0].token
    states = [row(seed=index, temperature=index / 2) for index in range(others)]
    states.insert(min(at, others), row(seed=seed, top_p=0.9))
    logits = torch.randn(others + 1, 40)
    logits[min(at, others)] = own
    assert sample(logits, states, [place] * (others + 1))[min(at, others)].token == alone


def test_random_numbers_are_a_function_of_seed_and_place() -> None:
    drawn = {(seed, place): uniform(seed, place) for seed in range(30) for place in range(30)}
    assert len(set(drawn.values())) == 900
    assert all(0 <= one < 1 for one in drawn.values())
    assert uniform(4, 7) == drawn[4, 7]


def test_penalties_count_the_prompt_or_the_answer() -> None:
    def greedy(**params: Any) -> list[int | None]:
        state = row(prompt=(0,), temperature=0.0, **params)
        return [sample(torch.tensor([[2.0, 1.9, 1.5, -9.0]]), [state], [place])[0].token for place in range(4)]

    assert greedy() == [0, 0, 0, 0]
    assert greedy(repetition_penalty=1.2) == [1, 0, 0, 0]  # 0 is in the prompt; then both are penalized alike
    assert greedy(presence_penalty=0.3) == [0, 1, 0, 0]
    assert greedy(frequency_penalty=0.3) == [0, 1, 0, 1]


def test_min_tokens_holds_back_what_would_end_the_answer() -> None:
    state = row(temperature=0.0, min_tokens=2, stop_token_ids=(2,))
    logits = [0.0, 1.0, 2.0, 3.0]
    assert [sample(torch.tensor([logits]), [state], [place])[0].token for place in (0, 1, 2)] == [1, 1, 3]


def test_a_grammar_that_allows_an_end_alone_is_followed_before_min_tokens() -> None:
    state = row(temperature=0.0, min_tokens=2, stop_token_ids=(2,))
    found = []
    for place, allowed in enumerate(([2], [1, 2], [2, 3])):
        state.mask = torch.ones(4, dtype=torch.bool)
        state.mask[allowed] = False
        found.append(sample(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), [state], [place])[0].token)
    assert found == [2, 1, 3]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> int:
    """The number of operations of a call after the first one."""
    call()
    counter: Any = Operations()  # type: ignore[no-untyped-call]
    with counter:
        call()
    return int(counter.count)


def test_a_step_costs_no_more_for_many_biases_and_stop_tokens_than_for_one() -> None:
    few = row(logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=(1,))
    many = row(logit_bias=dict.fromkeys(range(1000), 1.0), min_tokens=1, stop_token_ids=tuple(range(1000)))
    logits = torch.zeros(1000)
    assert operations(lambda: few.prepare(logits, 0)) == operations(lambda: many.prepare(logits, 0))


def test_biases_are_added_in_each_step_to_their_tokens_alone() -> None:
    state = row(logit_bias={2: 5.0, 0: -1.5})
    for _ in range(2):
        logits = torch.zeros(4)
        state.prepare(logits, 0)
        assert logits.tolist() == [-1.5, 0.0, 5.0, 0.0]


def test_log_probabilities_of_many_rows_are_those_of_each_and_cost_no_more_operations_than_those_of_two() -> None:
    logits = torch.randn(100, 50, generator=torch.Generator().manual_seed(2))
    tokens = [index % 50 for index in range(100)]
    expected = [report(logits[index].log_softmax(-1), token, 3) for index, token in enumerate(tokens)]
    assert reports(logits, tokens, 3) == expected
    assert reports(logits[:0], [], 3) == []
    two, many = (logits[:2], tokens[:2]), (logits[:50], tokens[:50])
    assert operations(lambda: reports(*two, 3)) == operations(lambda: reports(*many, 3))


def test_a_row_with_nan_fails_alone_and_infinities_of_masked_tokens_do_not() -> None:
    logits = torch.tensor([[1.0, float("nan"), 0.0], [1.0, 2.0, float("-inf")], [float("-inf")] * 3])
    found = sample(logits, [row(temperature=0.0), row(), row(temperature=0.0)], [0, 0, 0])
    assert [one.token is None for one in found] == [True, False, True]


def test_logprobs_are_those_before_bias_and_temperature() -> None:
    state = row(temperature=0.5, top_k=1, logprobs=2, logit_bias={1: 50.0})
    (found,) = sample(torch.tensor([LOGITS]), [state], [0])
    expected = torch.tensor(LOGITS).log_softmax(-1)
    assert found.token == 1
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _value in found.logprobs.top] == [0, 1]


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        ({"temperature": 1}, "temperature", 1.0),
        ({"max_tokens": 500}, "max_tokens", 64),
        ({"max_completion_tokens": 7}, "max_tokens", 7),
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": ["a", "", "b"]}, "stop", ("a", "b")),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs", 3),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": False}, "logprobs", None),
        ({"seed": -1}, "seed", 2**63 - 1),
        ({"logit_bias": {"5": -1}}, "logit_bias", {5: -1.0}),
        ({"logit_bias": dict.fromkeys(range(1024), 1)}, "logit_bias", dict.fromkeys(range(1024), 1.0)),
        ({"stop": "x" * 1024}, "stop", ("x" * 1024,)),
        ({"top_k": None, "voice": "joe"}, "top_k", 0),
    ],
)
def test_a_client_s_words_become_parameters(params: dict[str, Any], field: str, value: Any) -> None:
    defaults = SamplingParams(max_tokens=64, output_kind=OutputKind.DELTA)
    assert getattr(from_params(params, defaults), field) == value


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": "1"}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": 4}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": float("inf")}}, "logit_bias"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"seed": 1.0}, "seed"),
        ({"top_logprobs": 21, "logprobs": True}, "logprobs"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(params: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_params(params, SamplingParams())
    assert caught.value.param == names
