"""Phrases that code, pages and errors do not use, because a reader who does not know the house stumbles over them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What is not used, and what is written instead. Messages to clients and bytes of tests count, too.
AVOIDED = {
    r"(?<![Tt]here )\b(is|are|was|were) no (?!longer|(more|less|later) than|newer|older|(one|way|use)\b)": "is not a",
    r"(?<![Tt]here )\b(is|are|was|were) none\b(?! (now|on|so|when)\b)": "is not one",
    r"\bto blame\b": "caused by",
    r"\bhas no ear\b": "does not receive",
    r"\basks? for nothing\b": "has its default",
    r"\bWhat it holds to\b": "Guarantees",
}
PREPOSITIONS = (
    "About Above After Against Among As At Before Below Beside Between Beyond By During For From In Into Like Of On "
    "Over Per Through To Under Until With Within Without"
)
#: A docstring or a field's comment has a subject. This holds all Python code.
WITHOUT_SUBJECT = {
    rf'^\s*r?"""({"|".join(PREPOSITIONS.split())})\b': "the noun or the verb: As `add` -> The same as `add`",
    r"^\s*#:\s*(Of|By) ": "what it is",
    r'(^\s*r?"""|#:\s*)(What|Which|Who|Whose)\b': "the noun: what a process answers -> the answer of a process",
}
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


def test_no_file_has_a_phrase_that_is_avoided() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md", "*.yaml"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in listed.stdout.split() if name not in OTHERS and (ROOT / name).exists()]
    assert len(names) > 500
    places = []
    for name in names:
        text = (ROOT / name).read_text()
        python = name.endswith(".py")
        places += [f"{name}:{number}: {what}" for number, what in found(text, WITHOUT_SUBJECT if python else {})]
        places += [f"{name}:{number}: {what}" for number, what in found(text)]
    assert places == []


@pytest.mark.parametrize("text", ["5 is no number", "they are no members", "a handle that is none", "that is to blame"])
def test_an_avoided_phrase_is_found(text: str) -> None:
    assert len(found(text)) == 1


def test_a_docstring_without_a_subject_is_found() -> None:
    comments, docstrings = (
        "    #: By name.\n    x: int  #: Who knows.",
        ("Of one request.", "As `add`.", "Until it ends."),
    )
    text = "\n".join([comments, *(f'    """{one}"""' for one in docstrings)])
    assert len(found(text, WITHOUT_SUBJECT)) == 5


@pytest.mark.parametrize(
    "text", ['    """The same as `add`."""', '    """Waits until it ends."""', "    #: All, whatever it is."]
)
def test_a_docstring_with_one_is_not(text: str) -> None:
    assert found(text, WITHOUT_SUBJECT) == []


@pytest.mark.parametrize(
    "text", ["there is no room", "None: there is none", "it is no longer here", "5 is not a number"]
)
def test_other_words_are_not(text: str) -> None:
    assert found(text) == []
