"""Times of one answer, from its events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.web.exchanges.answer_times import AnswerTimes
from stage_runtime.wire.values import Audio, Note, OmniRequest, Text, Usage
from tests.web.scripted_manager import chunk

STREAMED = OmniRequest(id="r", stream=True)


def sound(seconds: float) -> Audio:
    return Audio(np.zeros(int(seconds * 1000), np.float32), 1000)


def test_first_token_gaps_and_usage() -> None:
    times = AnswerTimes(10.0, STREAMED)
    times.note(chunk(Note("transcript", "x")), 10.1)
    times.note(chunk(Text("a")), 10.5)
    times.note(chunk([Text("b"), Usage(prompt_tokens=7, completion_tokens=1)]), 10.75)
    times.note(chunk(Text("c")), 11.75)
    times.note(ResultEvent(stage="talk", data=Usage(completion_tokens=2)), 12.0)
    assert times.first_token_s == 0.5
    assert times.token_gaps_s == [0.25, 1.0]
    assert times.tokens.total == Usage(7, 3)
    assert (times.first_audio_s, times.audio_s, times.real_time_factor, times.underruns) == (None, 0.0, None, 0)


@pytest.mark.parametrize(
    ("pieces", "underruns", "factor"),
    [
        ([(1.0, 1.0), (1.5, 1.0), (2.5, 2.0)], 0, 2.5 / 4),  # each comes while an earlier one plays
        ([(1.0, 0.5), (1.6, 0.5), (2.2, 0.5)], 2, 2.2 / 1.5),  # each comes after silence
        ([(1.0, 0.5), (1.5, 0.5)], 0, 1.5),  # just in time
        ([(1.0, 0.5), (3.0, 5.0), (3.5, 0.1), (8.0, 0.1)], 1, 8.0 / 5.7),  # one gap, made up for
    ],
)
def test_a_client_that_plays_what_it_gets_runs_out_of_sound(
    pieces: list[tuple[float, float]], underruns: int, factor: float
) -> None:
    times = AnswerTimes(0.0, STREAMED)
    for at, seconds in pieces:
        times.note(chunk(sound(seconds)), at)
    assert times.first_audio_s == 1.0
    assert times.underruns == underruns
    assert times.real_time_factor == pytest.approx(factor)


def test_values_of_other_types_and_broken_sound_change_nothing() -> None:
    times = AnswerTimes(0.0, STREAMED)
    values: list[Any] = [None, "text", {"a": 1}, 7, Audio(None, 0), []]
    for value in values:
        times.note(chunk(value), 1.0)
    assert (times.first_token_s, times.audio_s, times.token_gaps_s) == (None, 0.0, [])


def test_the_whole_that_a_stage_returns_behind_its_pieces_counts_no_second_time() -> None:
    times = AnswerTimes(0.0, STREAMED)
    times.note(chunk([Text("a"), sound(1.0)]), 1.0)
    times.note(chunk(sound(1.0)), 1.5)
    times.note(ResultEvent(stage="talk", data=[Text("a"), sound(2.0), Usage(1, 2)]), 9.0)
    assert (times.audio_s, times.underruns, times.real_time_factor) == (2.0, 0, 0.75)
    assert (times.token_gaps_s, times.tokens.total) == ([], Usage(1, 2))
    times.note(ResultEvent(stage="other", data=sound(3.0)), 9.0)
    assert times.audio_s == 5.0


@pytest.mark.parametrize(
    ("kind", "modalities", "text", "audio"),
    [
        ("chat", ["text"], True, False),
        ("chat", ["audio"], False, True),
        ("chat", ["text", "audio"], True, True),
        ("speech", ["audio"], False, True),
        ("transcription", ["text"], True, False),
        ("pipeline", [], True, True),
        ("pipeline", ["smell"], True, True),
    ],
)
def test_text_and_audio_that_the_client_did_not_ask_for_are_not_counted(
    kind: Any, modalities: list[str], text: bool, audio: bool
) -> None:
    times = AnswerTimes(0.0, OmniRequest(id="r", kind=kind, modalities=modalities, stream=True))
    times.note(chunk([Text("a"), sound(1.0), Usage(1, 2)]), 1.0)
    assert (times.first_token_s, times.first_audio_s, times.audio_s) == (
        1.0 if text else None,
        1.0 if audio else None,
        1.0 if audio else 0.0,
    )
    assert times.tokens.total == Usage(1, 2)
