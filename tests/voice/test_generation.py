from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stage_models.voice.generation import Detokeniser, Stopper


def test_a_character_of_several_tokens_is_told_once_it_is_whole() -> None:
    raw = "né €".encode()
    detokeniser = Detokeniser(lambda tokens: bytes(tokens).decode(errors="replace"))
    assert [detokeniser.feed(byte) for byte in raw] == ["n", "", "é", " ", "", "", "€"]
    assert detokeniser.flush() == ""


def test_half_a_character_at_the_end_is_told_by_flush() -> None:
    detokeniser = Detokeniser(lambda tokens: bytes(tokens).decode(errors="replace"))
    assert [detokeniser.feed(byte) for byte in "a€".encode()[:-1]] == ["a", "", ""]
    assert detokeniser.flush() == "\N{REPLACEMENT CHARACTER}"


def test_text_ends_before_the_stop_string_though_it_comes_in_pieces() -> None:
    stopper = Stopper(["\nUser:"])
    assert stopper.feed("Hello\n") == ("Hello", False)
    assert stopper.feed("Us") == ("", False)
    assert stopper.feed("er: hi") == ("", True)


def test_what_only_looked_like_a_stop_string_is_told() -> None:
    stopper = Stopper(["STOP"])
    assert stopper.feed("a ST") == ("a ", False)
    assert stopper.feed("AR") == ("STAR", False)
    assert stopper.feed(" ST") == (" ", False)
    assert stopper.flush() == "ST"


@given(st.lists(st.text(alphabet="abc", max_size=4)), st.lists(st.text(alphabet="abc", min_size=1, max_size=3)))
def test_stopping_does_not_depend_on_how_the_text_was_cut(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    told, stopper = "", Stopper(stops)
    for piece in pieces:
        new, stopped = stopper.feed(piece)
        told += new
        if stopped:
            break
    else:
        told += stopper.flush()
    if ends:
        # Whichever stop string ends first is seen first; nothing from its beginning on is told.
        assert text.startswith(told)
        assert not any(stop in told for stop in stops)
    else:
        assert told == text
