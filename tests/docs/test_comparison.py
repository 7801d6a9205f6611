"""The README's table of other systems: each cell stands in docs/comparison.md, with a source."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT, section

PAGE = "docs/comparison.md"
README = "README.md"


def rows(text: str) -> list[list[str]]:
    """The cells of each line of the first table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def compared() -> dict[str, dict[str, str]]:
    """System -> question -> answer, from the README."""
    head, _, *systems = rows(section(README, "## Why"))
    found = {}
    for link, *answers in systems:
        named = re.fullmatch(r"\[(.+)\]\(docs/comparison\.md#.+\)", link)
        assert named is not None, link
        found[named.group(1)] = dict(zip(head[1:], answers, strict=True))
    return found


def explained(system: str) -> dict[str, tuple[str, str]]:
    """Question -> answer and source, from the page."""
    _, _, *answers = rows(section(PAGE, f"## {system}"))
    return {question: (answer, source) for question, answer, source in answers}


def test_every_cell_of_the_table_stands_on_the_page() -> None:
    page = {system: {question: answer for question, (answer, _) in explained(system).items()} for system in compared()}
    assert compared() == page


def test_an_answer_has_a_source_and_no_source_means_no_answer() -> None:
    for system in compared():
        for question, (answer, source) in explained(system).items():
            assert bool(answer) == bool(source), f"{system}: {question}"


def test_tests_that_are_named_as_sources_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / PAGE).read_text()))
    written = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert named - written == set()
    assert named
