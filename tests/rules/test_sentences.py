from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules import sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The spider has eight legs. Paris is in France!", ["The spider has eight legs.", "Paris is in France!"]),
        ("Dr. Smith met J. Bach. They talked.", ["Dr. Smith met J. Bach.", "They talked."]),
        ("It costs 3.50 euros. Really?", ["It costs 3.50 euros.", "Really?"]),
        ('He said "Go!" Then he left.', ['He said "Go!"', "Then he left."]),
        ("First line\nsecond line", ["First line", "second line"]),
        ("First line\r\nsecond\n\nthird", ["First line", "second", "third"]),
        ("…\nHello\n🙂\n---\n5 €", ["Hello", "🙂", "5 €"]),
        ("  \n\n", []),
        ("*** Well. ***", ["*** Well."]),
        ("no end", ["no end"]),
        ("今天很好。明天呢？我不知道", ["今天很好。", "明天呢？", "我不知道"]),  # noqa: RUF001
        ("他说「走吧。」然后走了。", ["他说「走吧。」", "然后走了。"]),
    ],
)
def test_a_text_is_cut_where_sentences_end(text: str, expected: list[str]) -> None:
    assert list(sentences.split(text)) == expected


def test_a_text_is_split_as_its_sentences_are_asked_for() -> None:
    """A stage speaks the first ones of megabytes, and stops where its request is cancelled."""
    text = "It is so. " * 1000
    found = sentences.split(text)
    assert next(found) == "It is so."
    assert list(found) == ["It is so."] * 999


@given(st.text(alphabet="ab .,!?\n\"'1。，」", min_size=20, max_size=200))  # noqa: RUF001
def test_a_text_is_split_into_the_sentences_of_one_that_is_fed_at_once(part: str) -> None:
    text = part * (3 * sentences.TAKEN // len(part))
    splitter = sentences.Splitter()
    assert list(sentences.split(text)) == splitter.feed(text) + splitter.flush()


def test_a_sentence_is_given_once_what_follows_has_begun_and_not_before() -> None:
    splitter = sentences.Splitter()
    assert splitter.feed("It is 3.") == []
    assert splitter.feed("5 metres.") == []
    assert splitter.feed(" Next") == ["It is 3.5 metres."]
    assert splitter.flush() == ["Next"]
    assert splitter.flush() == []


def test_a_sentence_without_end_is_cut_at_its_last_comma() -> None:
    text = "one two three, four five six, seven eight nine"
    splitter = sentences.Splitter(max_chars=32)
    assert splitter.feed(text) + splitter.flush() == ["one two three, four five six,", "seven eight nine"]


def test_clauses_sound_sooner_than_sentences() -> None:
    text = "Well, I think so; but 1,000 is a lot: let me see. 好，走吧。"  # noqa: RUF001
    splitter = sentences.Splitter(clauses=True)
    expected = ["Well,", "I think so;", "but 1,000 is a lot:", "let me see.", "好，", "走吧。"]  # noqa: RUF001
    assert splitter.feed(text) + splitter.flush() == expected


@given(st.text(alphabet="ab .,!?\n\"'1。，」", max_size=400), st.integers(1, 40), st.booleans())  # noqa: RUF001
def test_no_word_is_lost_and_pieces_do_not_change_the_result(text: str, size: int, clauses: bool) -> None:
    splitter = sentences.Splitter(max_chars=60, clauses=clauses)
    found = [piece for at in range(0, len(text), size) for piece in splitter.feed(text[at : at + size])]
    found += splitter.flush()
    assert "".join(_letters(piece) for piece in found) == _letters(text)
    assert all(piece.strip() == piece and 0 < len(piece) <= 60 for piece in found)


def _letters(text: str) -> str:
    return "".join(character for character in text if character.isalnum())
