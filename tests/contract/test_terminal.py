"""How both command lines write on a terminal: texts of anybody are shown as they are."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from omnipipeline_spec import consoles, terminal

ROOT = Path(__file__).parents[2]
PROGRAMS = ("crds/omnipipeline_spec", "operator/omnipipeline_operator", "stage_runtime")
MARKUP = "[shout] [/] [red]x[/red] :smile:"
_CODES = (*range(10), *range(11, 32), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E, 0x2066, 0xD800)
OBEYED = "".join(map(chr, _CODES))


def printed(*shown: RenderableType) -> str:
    file = io.StringIO()
    consoles.console(file=file, width=10_000).print(*shown)
    return file.getvalue()


def every_place(text: str) -> Iterator[RenderableType]:
    table = Table("head", title="title")
    table.add_row(text)
    table.add_row(Text(text))
    tree = Tree(Text(text))
    tree.add(text)
    yield from (text, Text(text), table, tree, Group(text, Text(text)))


def test_markup_and_names_of_emoji_are_shown_wherever_they_stand() -> None:
    for shown in every_place(MARKUP):
        assert MARKUP in printed(shown)


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_no_text_sends_a_control_character_to_the_terminal(text: str) -> None:
    for shown in every_place(f"{text}{OBEYED}"):
        assert not set(printed(shown)) & set(OBEYED)


def test_letters_of_all_languages_and_joined_emoji_are_shown() -> None:
    text = "日本語\u3000\xa0é \U0001f469\u200d\U0001f4bb"
    assert terminal.plain(text) == text
    assert text in printed(Text(text))


def test_lines_for_people_are_plain_and_documents_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.echo("a\x1b\nb")
    terminal.document("c\x1b\n")
    assert capsys.readouterr().out == "a\ufffd\nb\nc\x1b\n"


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_every_command_prints_by_these_functions_alone() -> None:
    forbidden = {"Console", "rich.print", "click.echo", "click.secho", "Text.from_markup", "rich.console.Console"}
    found = {
        f"{file.relative_to(ROOT)}: {call}"
        for program in PROGRAMS
        for file in (ROOT / program).rglob("*.py")
        if file.name not in ("consoles.py", "terminal.py")
        for call in _calls(ast.parse(file.read_text()))
        if call in forbidden
    }
    assert found == set()
