"""Phrases that code, pages and errors do not use, and sentences without a subject: both stop a new reader."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs import sentences

ROOT = Path(__file__).parents[2]
#: What is not used, and what is written instead. Messages to clients and bytes of tests count, too.
AVOIDED = {
    r"(?<![Tt]here )\b(is|are|was|were) no (?!longer|(more|less|later) than|newer|older|(one|way|use)\b)": "is not a",
    r"(?<![Tt]here )\b(is|are|was|were) none\b(?! (now|on|so|when)\b)": "is not one",
    r"\b[Tt]here (is|are|was|were) (no|none|nothing)\b": "it has no, it is missing, no x exists",
    r"\bto blame\b": "caused by",
    r"\bcannot travel\b": "cannot be encoded",
    r"\bhas no ear\b": "does not receive",
    r"\basks? for nothing\b": "has its default",
    r"\bWhat it holds to\b": "Guarantees",
}
#: A sentence has a subject, so it begins with none of these. "Where X, Y" -> "Y where X"; "Of X, Y" -> "Y of X".
WITHOUT_SUBJECT = frozenset(
    "About Above Across After Against Along Among Around As At Before Behind Below Beside Between Beyond By Despite "
    "During Except For From In Inside Into Like Of On Outside Over Per Since Through To Toward Under Unlike Until Upon "
    "Via With Within Without What Whatever Where Which Who Whoever Whom Whomever Whose".split()
)
ANY = re.compile(rf"\b({'|'.join(sorted(WITHOUT_SUBJECT))})\b")
#: A sentence's first word, behind quotes or a mark of Markdown.
FIRST = re.compile(r"[\"'(*`_]*([A-Z][a-z]+)\b")
#: Made by a program, or of words that somebody else wrote.
OTHERS = ("CHANGELOG.md", "tests/docs/test_words.py", "benchmarks/RESULTS.md")


def found(text: str, avoided: Mapping[str, str] = AVOIDED) -> list[tuple[int, str]]:
    here = {phrase: better for phrase, better in avoided.items() if re.search(phrase, text, re.MULTILINE)}
    return [
        (number, f"{line.strip()[:100]!r}: write {better!r}")
        for number, line in enumerate(text.split("\n") if here else (), 1)
        for phrase, better in here.items()
        if re.search(phrase, line)
    ]


def subjectless(name: str, text: str) -> list[tuple[int, str]]:
    """The sentences without a subject: line, and the sentence's beginning."""
    if ANY.search(text) is None:  # most files: nothing is parsed
        return []
    paragraphs = sentences.of_python(text) if name.endswith(".py") else sentences.of_page(text)
    return [
        (paragraph.line, f"{one[:100]!r}: begin with the subject")
        for paragraph in paragraphs
        for one in paragraph.sentences()
        if (first := FIRST.match(one)) is not None and first[1] in WITHOUT_SUBJECT
    ]


def _files(*patterns: str) -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in listed.stdout.split() if name not in OTHERS and (ROOT / name).exists()]
    assert len(names) > 500
    return {name: (ROOT / name).read_text() for name in names}


def test_no_file_has_a_phrase_that_is_avoided() -> None:
    files = _files("*.py", "*.md", "*.yaml")
    assert [f"{name}:{line}: {what}" for name, text in files.items() for line, what in found(text)] == []


def test_each_sentence_of_docstrings_comments_and_pages_begins_with_its_subject() -> None:
    files = _files("*.py", "*.md")
    assert [f"{name}:{line}: {what}" for name, text in files.items() for line, what in subjectless(name, text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "5 is no number",
        "they are no members",
        "a handle that is none",
        "that is to blame",
        "None: there is none",
        "There was nothing to wait for",
    ],
)
def test_an_avoided_phrase_is_found(text: str) -> None:
    assert len(found(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""Of one request."""',
        '"""One.\n\nAll of it. As `add`.\n"""',
        "x = 1  #: By name.",
        "# It is here. Whoever\n# calls it knows.",
        'def f():\n    """Until it ends."""',
    ],
)
def test_a_sentence_without_a_subject_is_found(text: str) -> None:
    assert len(subjectless("x.py", text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""The same as `add`, of one request: Of is a word."""',
        "x = '# By name.'",
        "# It waits until\n# In is read.",
        "#: All, whatever it is. It waits. (None: until it ends.)",
    ],
)
def test_a_sentence_with_one_is_not(text: str) -> None:
    assert subjectless("x.py", text) == []


def test_cells_items_and_paragraphs_of_a_page_are_read_and_its_code_is_not() -> None:
    page = "# What\n\nIt is. With it,\nall is.\n- By name\n\n| a | Of it |\n\n```sh\n# For all\n```\nFor\nall."
    assert [line for line, _ in subjectless("x.md", page)] == [3, 5, 7, 12]


@pytest.mark.parametrize(
    "text", ["no room is left", "if there is not None", "it is no longer here", "5 is not a number"]
)
def test_other_words_are_not(text: str) -> None:
    assert found(text) == []
