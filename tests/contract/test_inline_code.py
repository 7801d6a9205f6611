"""A process gets the inline files that its functions reach, and all where that cannot be known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec import planning
from omnipipeline_spec.loading import from_resource
from omnipipeline_spec.planning import inlinecode
from omnipipeline_spec.types.resource import API_VERSION, KIND
from tests.contract.rulecases import stage

FILES = {
    "front.py": "import words\ndef make(): return words.split\n",
    "words.py": '"""Splits a text into words."""\ndef split(payload): return payload.data.split()\n',
    "voice.py": "def make(): return print\n",
}


@pytest.mark.parametrize(
    "files, functions, values, used",
    [
        (FILES, ["front:make"], None, {"front.py", "words.py"}),
        (FILES, ["voice.make"], None, {"voice.py"}),
        (FILES, [], None, set()),
        (FILES, ["voice:make"], {"with": ["words:split"]}, {"voice.py", "words.py"}),
        (FILES, ["stage_models.voice:make", "voice:hook"], None, {"voice.py"}),
        # A module of the image may import any of them.
        (FILES, ["mine.stages:make"], None, set(FILES)),
        ({**FILES, "data.json": "{}"}, ["voice:make"], None, {"voice.py", "data.json"}),
        ({"a.py": "from b import x", "b.py": "from a import y", "c.py": ""}, ["a:f"], None, {"a.py", "b.py"}),
        ({"a.py": "f = 'b.g'", "b.py": "", "c.py": ""}, ["a:f"], None, {"a.py", "b.py"}),
        ({"a.py": "import importlib", "b.py": ""}, ["a:f"], None, {"a.py", "b.py"}),
        ({"a.py": "from importlib import import_module as i", "b.py": ""}, ["a:f"], None, {"a.py", "b.py"}),
        ({"a.py": "__import__('b')", "b.py": ""}, ["a:f"], None, {"a.py", "b.py"}),
        ({"a.py": "def broken(:", "b.py": ""}, ["a:f"], None, {"a.py", "b.py"}),
        ({"a.py": "x = '\0'", "b.py": ""}, ["a:f"], None, {"a.py", "b.py"}),
    ],
)
def test_a_process_gets_the_files_that_its_functions_reach(
    files: dict[str, str], functions: list[str], values: object, used: set[str]
) -> None:
    assert inlinecode.used(files, functions, values) == {name: files[name] for name in used}


names = st.sampled_from(["a", "b", "c", "d", "e"])


@given(st.dictionaries(names, st.sets(names), min_size=1), names)
def test_no_import_is_left_out(imports: dict[str, set[str]], entry: str) -> None:
    files = {f"{name}.py": "\n".join(f"import {each}" for each in sorted(of)) for name, of in imports.items()}
    needed, waiting = set(), {entry}
    while waiting:
        name = waiting.pop()
        if name in imports and name not in needed:
            needed.add(name)
            waiting |= imports[name]
    used = inlinecode.used(files, [f"{entry}:make"])
    assert {f"{name}.py" for name in needed} <= set(used)


def test_an_edit_of_a_file_changes_the_revisions_of_its_users_alone() -> None:
    def revisions(files: dict[str, str]) -> dict[str, str]:
        stages = [stage("front", factory="front:make", next=["voice"]), stage("voice", factory="voice:make")]
        spec = {"stages": stages, "code": {"inline": files}}
        loaded = from_resource({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "p"}, "spec": spec})
        plan = planning.plan(loaded.spec, name="p")
        return {unit.name: unit.revision for unit in plan.units} | {"coordinator": plan.coordinator.revision}

    before = revisions(FILES)
    after = revisions({**FILES, "words.py": FILES["words.py"] + "edited = True\n"})
    assert {name for name in before if before[name] != after[name]} == {"front"}
    assert revisions({**FILES, "words.py": "# a comment\n\n" + FILES["words.py"]}) == before


def meaning(text: str, name: str = "a.py") -> str:
    return inlinecode.meanings({name: text})[name]


DEEP = "-" * 30_000 + "1"


@pytest.mark.parametrize(
    "text, same",
    [
        ("x = 1\n", "# a comment\n\nx = (1)  # another\n"),
        ("x = 'a'\n", 'x = "a"\n'),
        ("x = {1: 2, 3: 4}", "x = {\n    1: 2,\n    3: 4,\n}\n"),
        ("def f():\n    return 1\n", "def f():\n  # why\n  return 1 # because\n"),
        ("x = 0x10", "x = 16"),
        ("x = 'a' 'b'", "x = 'ab'"),
        ("x = 1  # type: ignore\n", "x = 1\n"),
        ("x = 1\r\ny = 2", "x = 1\ny = 2\n"),
        ("", "# nothing\n"),
    ],
)
def test_comments_and_layout_mean_nothing(text: str, same: str) -> None:
    assert meaning(text) == meaning(same)


@pytest.mark.parametrize(
    "text, other",
    [
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = 0.0", "x = -0.0"),
        ("x = 'a'", "x = b'a'"),
        ("x = '# a'", "x = '# b'"),
        ('"""One."""', '"""Two."""'),  # a program can read it: a tool's description
        ('def f():\n    "One."\n    return 1', 'def f():\n    "Two."\n    return 1'),
        ("def f(x):\n    # type: (int) -> int\n    return x", "def f(x):\n    # type: (str) -> str\n    return x"),
        ("x = None", "x = ..."),
        ("x: int", "x: int = None"),
        ("f(a)", "f(*a)"),
        ("from a import b", "from .a import b"),
        ("async def f(): pass", "def f(): pass"),
        ("# coding: latin-1\nx = 'é'", "x = 'é'"),  # it changes what the file's bytes mean
        ("x = '\\udc80'", "x = '\\udc81'"),
        ("x = 0x" + "f" * 9000, "x = 0x" + "f" * 8999 + "e"),
        # Code that cannot be parsed is compared as text.
        ("def broken(:", "def broken(: # why"),
        ("x = '\0'", "x = '\0' # why"),
        (DEEP, DEEP + " # why"),
    ],
)
def test_whatever_a_program_can_notice_counts(text: str, other: str) -> None:
    assert meaning(text) != meaning(other)


def test_a_file_of_data_is_compared_as_it_is() -> None:
    assert meaning("# 1\n", "notes.txt") != meaning("# 2\n", "notes.txt")


def test_the_meaning_of_a_module_is_the_same_in_every_version_of_python() -> None:
    assert meaning("def f(a, *, b=1) -> int:\n    return f'{a!r:>{b}}'") == (
        "FunctionDef(name='f',args=arguments(args=[arg(arg='a')],kwonlyargs=[arg(arg='b')],kw_defaults=[int:0x1]),"
        "body=[Return(value=JoinedStr(values=[FormattedValue(value=Name(id='a',ctx=Load()),conversion=114,"
        "format_spec=JoinedStr(values=[str:'>',FormattedValue(value=Name(id='b',ctx=Load()),conversion=-1)]))]))],"
        "returns=Name(id='int',ctx=Load()))"
    )


@given(st.text())
def test_any_text_has_a_meaning(text: str) -> None:
    assert meaning(text) == meaning(text)
