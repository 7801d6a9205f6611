from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_models.voice import detection
from stage_models.voice.detection import WINDOW, Rule

#: No padding: one score is exactly one window of the result.
PLAIN = Rule(padding_s=0.0, min_speech_s=0.0, min_pause_s=4 * WINDOW / 16_000)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ("....", []),
        ("..##......", [(2, 4)]),
        ("..##..##......", [(2, 8)]),  # a short pause stays inside
        ("##......##", [(0, 2), (8, 10)]),
        ("##++++++++", [(0, 10)]),  # a middling score neither opens nor closes
        ("++++", []),
        ("...#", [(3, 4)]),
    ],
)
def test_scores_become_spans_with_hysteresis(scores: str, expected: list[tuple[int, int]]) -> None:
    values = [{".": 0.1, "+": 0.4, "#": 0.9}[mark] for mark in scores]
    found = detection.spans(values, PLAIN, length=len(scores) * WINDOW)
    assert [(begin // WINDOW, end // WINDOW) for begin, end in found] == expected


def test_a_click_is_no_speech() -> None:
    rule = Rule(padding_s=0.0, min_speech_s=3 * WINDOW / 16_000)
    assert detection.spans([0.0, 0.9, 0.9, *[0.0] * 30], rule, length=33 * WINDOW) == []


def test_padding_joins_spans_instead_of_repeating_sound() -> None:
    rule = Rule(min_pause_s=2 * WINDOW / 16_000, min_speech_s=0.0, padding_s=3 * WINDOW / 16_000)
    scores = [0.9, 0.0, 0.0, 0.0, 0.0, 0.9, 0.0, 0.0]
    assert detection.spans(scores, rule, length=8 * WINDOW) == [(0, 8 * WINDOW)]


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(0, WINDOW - 1))
def test_spans_are_in_order_disjoint_and_inside(scores: list[float], short: int) -> None:
    length = max(0, len(scores) * WINDOW - short)
    found = detection.spans(scores, Rule(), length=length)
    edges = [edge for span in found for edge in span]
    assert edges == sorted(set(edges))
    assert all(0 <= edge <= length for edge in edges)


def test_what_is_not_speech_is_cut_off() -> None:
    samples = np.arange(10 * WINDOW, dtype=np.float32)
    scores = [0.0] * 4 + [0.9] * 2 + [0.0] * 4
    heard = detection.speech_only(samples, lambda _: scores, PLAIN)
    assert np.array_equal(heard, samples[4 * WINDOW : 6 * WINDOW])
    assert detection.speech_only(samples, lambda _: [0.0] * 10, PLAIN).size == 0
