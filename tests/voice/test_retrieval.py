from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stage_models.voice.conversation import Fact
from stage_models.voice.retrieval import FactBook, Vectors, read_facts

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """Embeds a text by the letters it holds; remembers what it was asked."""

    def __init__(self) -> None:
        self.embedded: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> Vectors:
        self.embedded.append(list(texts))
        counts = np.array([[text.count(letter) for letter in LETTERS] for text in texts], np.float32)
        return np.asarray(counts / np.linalg.norm(counts, axis=1, keepdims=True), np.float32)


def test_comments_blank_lines_and_repetitions_are_no_facts() -> None:
    assert read_facts("# title\n\n a fact \nanother\na fact\n") == ["a fact", "another"]


def test_facts_come_best_first_and_only_if_they_are_close(tmp_path: Path) -> None:
    file = tmp_path / "facts.txt"
    file.write_text("aaab\nzzz\naab\n")
    book = FactBook(file, Letters())
    assert book.find("aaa", limit=3, min_score=0.5) == [Fact(text="aaab", score=0.9487), Fact(text="aab", score=0.8944)]
    assert book.find("aaa", limit=1, min_score=0.5) == [Fact(text="aaab", score=0.9487)]
    assert book.find("qqq", limit=3, min_score=0.5) == []
    assert book.find("", limit=3, min_score=-1.0) == []


def test_an_edited_file_is_read_again_and_only_new_lines_are_embedded(tmp_path: Path) -> None:
    file, embed = tmp_path / "facts.txt", Letters()
    file.write_text("aaa\nbbb\n")
    book = FactBook(file, embed)
    file.write_text("bbb\nccc\nddd\n")
    os.utime(file, ns=(1, 1))  # a clock of another resolution must not hide the edit
    assert [fact.text for fact in book.find("ccc", limit=1, min_score=0.5)] == ["ccc"]
    assert embed.embedded == [["aaa", "bbb"], ["ccc", "ddd"], ["ccc"]]
    assert book.find("aaa", limit=3, min_score=0.5) == []


@pytest.mark.parametrize("broken", [None, b"aaa\n\xff\n"])
def test_a_file_that_cannot_be_read_for_a_while_costs_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: bytes | None
) -> None:
    file = tmp_path / "facts.txt"
    file.write_text("aaa\n")
    book = FactBook(file, Letters())
    file.unlink()
    if broken is not None:
        file.write_bytes(broken)
    for _ in range(2):
        assert [fact.text for fact in book.find("aaa", limit=1, min_score=0.5)] == ["aaa"]
    assert caplog.text.count("the facts of before stay") == 1
    file.write_text("aab\nbbb\n")
    assert [fact.text for fact in book.find("bbb", limit=1, min_score=0.5)] == ["bbb"]


def test_an_empty_file_knows_nothing(tmp_path: Path) -> None:
    file = tmp_path / "facts.txt"
    file.write_text("# nothing yet\n")
    assert FactBook(file, Letters()).find("a", limit=3, min_score=-1.0) == []


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.txt"):
        FactBook(tmp_path / "gone.txt", Letters())
