"""Drafts are verified by sampling: tokens come with the probabilities of the model, whatever a draft says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.sampling.sampler import RowState, sample
from stage_runtime.engines.autoregressive.speculation.verifying import DraftedRow, verify
from stage_runtime.rules.autoregressive.requests import Request, TokenLimits
from stage_runtime.rules.autoregressive.steps import Row

LOGITS = torch.tensor([[1.0, 0.5, 0.0, -1.0], [0.0, 1.5, -0.5, 0.3], [0.4, 0.4, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("draft", "params"), [([0, 1], {}), ([3, 3], {"temperature": 0.6}), ([0, 1], {"top_k": 3}), ([1], {"top_p": 0.9})]
)
def test_tokens_come_as_often_as_their_probabilities_say_whatever_the_draft(
    draft: list[int], params: dict[str, Any]
) -> None:
    """Chi-square over the answers of many seeds, always the same ones: one token, or as many as the draft gives."""
    request = Request("a", [1], TokenLimits(max_tokens=10))
    count, found = 2000, Counter[tuple[int | None, ...]]()
    for seed in range(count):
        state = RowState(SamplingParams(**params), seed, frozenset())
        first = sample(LOGITS[:1].clone(), [state], [0])
        row = Row(request, 0, 1, True, [])
        (tokens,) = verify([DraftedRow(row, state, draft, 0)], first, LOGITS[1 : 1 + len(draft)].clone())
        found[tuple(one.token for one in tokens)] += 1
    expected = expected_answers(draft, params)
    assert set(found) <= set(expected)
    statistic = sum((found[one] - count * p) ** 2 / (count * p) for one, p in expected.items())
    freedom = len(expected) - 1
    # The Wilson-Hilferty approximation of the point that one in 10,000 samples exceeds.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def expected_answers(draft: Sequence[int], params: Mapping[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of each answer of one step: each token has that of the model after the tokens before it."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for at in range(len(draft) + 1):
        scaled = (LOGITS[at].double() / params.get("temperature", 1.0)).softmax(-1)
        order = scaled.argsort(descending=True)
        before = scaled[order].cumsum(-1) - scaled[order]
        kept = order[: params.get("top_k", 4)][before[: params.get("top_k", 4)] < params.get("top_p", 1.0)]
        total = float(scaled[kept].sum())
        going = {one: p for one, p in found.items() if len(one) == at and list(one) == list(draft[:at])}
        for one, p in going.items():
            del found[one]
            found |= {(*one, int(token)): p * float(scaled[token]) / total for token in kept}
    return found


def test_nothing_is_verified_beyond_a_token_that_ends_the_answer() -> None:
    request = Request("a", [1], TokenLimits(max_tokens=10, min_tokens=1, end_ids=frozenset({1})))
    logits = torch.eye(4)[[1, 2]]
    state = RowState(SamplingParams(temperature=0.0), 0, frozenset({1}))
    first = sample(torch.eye(4)[:1], [state], [0])
    (tokens,) = verify([DraftedRow(Row(request, 0, 1, True, []), state, [0, 1], 0)], first, logits)
    assert [one.token for one in tokens] == [0, 1]
