"""Times that stages report, as SubRip and WebVTT."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import RequestError
from stage_runtime.web.translating.audio import subtitles
from stage_runtime.web.translating.audio.subtitles import Cue


def made(**given: Any) -> list[Cue]:
    return subtitles.cues(**{"segments": None, "words": None, "text": "", "duration": None, "by_word": False, **given})


WORDS = [{"word": f"w{at}", "start": at / 2, "end": at / 2 + 0.4} for at in range(30)]


def test_times_are_written_in_hours_minutes_and_thousandths() -> None:
    shown = [Cue(0, 1.2346, "a --> b <i> & c"), Cue(3599.9996, 36_000.5, "d")]
    assert subtitles.srt(shown) == (
        "1\n00:00:00,000 --> 00:00:01,235\na -> b <i> & c\n\n2\n01:00:00,000 --> 10:00:00,500\nd\n"
    )
    assert subtitles.vtt(shown) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.235\na --&gt; b &lt;i&gt; &amp; c\n\n01:00:00.000 --> 10:00:00.500\nd\n"
    )


def test_segments_are_cues_on_one_line_and_never_end_before_they_begin() -> None:
    given = [{"text": " a\n\nb ", "start": 1, "end": 0.5, "id": 7}, {"text": "c", "start": 2, "end": 3.0}]
    assert made(segments=given, words=WORDS) == [Cue(1.0, 1.0, "a b"), Cue(2.0, 3.0, "c")]


def test_words_without_segments_are_joined_to_readable_cues() -> None:
    pause = [{"word": "late", "start": 60.0, "end": 60.5}]
    found = made(words=[*WORDS, *pause])
    assert " ".join(one.text for one in found) == " ".join(str(one["word"]) for one in [*WORDS, *pause])
    assert all(len(one.text) <= subtitles.LINE and one.end - one.start <= subtitles.LONG_S for one in found)
    assert found[-1] == Cue(60.0, 60.5, "late")


@pytest.mark.parametrize(
    ("first", "second", "cues"),
    [
        (("a" * 41, 0.0, 1.0), ("b" * 42, 1.0, 2.0), 1),  # 84 letters with the blank
        (("a" * 41, 0.0, 1.0), ("b" * 43, 1.0, 2.0), 2),
        (("a", 0.0, 1.0), ("b", 2.0, 7.0), 1),  # a pause of a second, seven in all
        (("a", 0.0, 1.0), ("b", 2.0, 7.1), 2),
        (("a", 0.0, 1.0), ("b", 2.1, 3.0), 2),
    ],
)
def test_words_are_one_cue_up_to_its_length_its_time_and_a_pause(
    first: tuple[str, float, float], second: tuple[str, float, float], cues: int
) -> None:
    words = [{"word": text, "start": start, "end": end} for text, start, end in (first, second)]
    assert len(made(words=words)) == cues


def test_each_word_is_a_cue_where_that_is_asked_for() -> None:
    assert len(made(words=WORDS, segments=[{"text": "a", "start": 0, "end": 1}], by_word=True)) == 30
    with pytest.raises(RequestError, match="no stage gave an omni"):
        made(by_word=True, text="a", duration=3)


def test_without_times_all_is_one_cue_as_long_as_the_file() -> None:
    assert made(text=" hi\nthere", duration=2.5) == [Cue(0.0, 2.5, "hi there")]
    assert made(text=" ") == []
    with pytest.raises(RequestError, match="got none, and the file has no length"):
        made(text="hi")


@pytest.mark.parametrize("wrong", [
    "x", {"a": 1}, [1], [{"text": "a"}], [{"text": "a", "start": -1, "end": 2}], [{"text": 5, "start": 1, "end": 2}],
    [{"text": "a", "start": float("nan"), "end": 2}], [{"text": "a", "start": "0", "end": 2}],
    [{"text": "a", "start": True, "end": 2}], [{"text": "a", "start": 1, "end": 10**400}],
])  # fmt: skip
def test_what_is_not_a_time_is_the_stages_fault(wrong: Any) -> None:
    with pytest.raises(RequestError, match="Note segments") as caught:
        made(segments=wrong)
    assert caught.value.code == "stage_failed"


@given(st.lists(st.tuples(st.floats(0, 300_000), st.floats(0, 300_000), st.text()), max_size=5))
def test_no_text_breaks_a_cue(pieces: list[tuple[float, float, str]]) -> None:
    found = made(segments=[{"start": start, "end": end, "text": text} for start, end, text in pieces])
    assert subtitles.srt(found).count(" --> ") == subtitles.vtt(found).count(" --> ") == len(pieces)
    assert all("\n" not in one.text and one.end >= one.start for one in found)
