"""Which inline files a process needs: those that its functions reach, and all where that cannot be known."""

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
    after = revisions({**FILES, "words.py": FILES["words.py"] + "# edited\n"})
    assert {name for name in before if before[name] != after[name]} == {"front"}
