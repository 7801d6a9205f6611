"""Prints the index of the tests, ``tests/README.md``, from their markers: ``python -m tests.index > tests/README.md``.

The mark ``proves`` names promises of docs/architecture.md. Other marks say what a test needs. Read from the source:
nothing is imported. ``python -m tests.index long`` prints the files with a test of that mark instead: pytest takes half
a minute of a processor to import every file and find nothing in most.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

TESTS: Final = Path(__file__).parent
PAGE: Final = TESTS / "README.md"
ARCHITECTURE: Final = TESTS.parent / "docs" / "architecture.md"
#: Marks that say what a test needs, or when it runs.
NEEDS: Final = ("cluster", "voice", "gpu", "rdma", "netns", "nginx", "browser", "debian", "long", "nightly")
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

HEAD: Final = """\
# Tests

Made from the tests' marks: `.venv/bin/python -m tests.index > tests/README.md`. Do not edit. How tests are run and
written is in [CONTRIBUTING.md](../CONTRIBUTING.md#test-in-layers).

## Folders

| folder | some of its tests need |
|---|---|
"""
PROMISES: Final = """
## Promises

Each promise of [docs/architecture.md](../docs/architecture.md#promises), and the tests marked `proves` with its name.

| promise | proven by |
|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class Test:
    """A test function. marks: its own, its class's, its module's; each with the strings that it has."""

    path: Path
    name: str
    marks: frozenset[tuple[str, str]]


def _mark(expression: ast.expr) -> Iterator[tuple[str, str]]:
    """``pytest.mark.NAME`` or ``pytest.mark.NAME("a", "b")``; of a list, each."""
    if isinstance(expression, ast.List):
        for each in expression.elts:
            yield from _mark(each)
        return
    called = expression if isinstance(expression, ast.Call) else None
    named = ast.unparse(called.func if called else expression)
    if named.startswith("pytest.mark."):
        texts = [each.value for each in called.args if isinstance(each, ast.Constant)] if called else []
        for text in texts or [""]:
            yield named.removeprefix("pytest.mark."), str(text)
        if called and named.endswith(".parametrize"):
            for inner in (each for each in ast.walk(called) if isinstance(each, ast.keyword) and each.arg == "marks"):
                yield from _mark(inner.value)


def _marks(expressions: Iterable[ast.expr]) -> frozenset[tuple[str, str]]:
    return frozenset(mark for each in expressions for mark in _mark(each))


def _functions(
    body: Iterable[ast.stmt], marks: frozenset[tuple[str, str]]
) -> Iterator[tuple[Function, frozenset[tuple[str, str]]]]:
    for each in body:
        if isinstance(each, ast.ClassDef):
            yield from _functions(each.body, marks | _marks(each.decorator_list))
        elif isinstance(each, Function) and each.name.startswith("test_"):
            yield each, marks | _marks(each.decorator_list)


def _of_module(tree: ast.Module) -> frozenset[tuple[str, str]]:
    """Its ``pytestmark``."""
    assigned = (each for each in tree.body if isinstance(each, ast.Assign))
    return _marks(each.value for each in assigned if ast.unparse(each.targets[0]) == "pytestmark")


def tests(folder: Path = TESTS) -> tuple[Test, ...]:
    """Every test below the folder, in the order of their files."""
    return _read(folder.resolve())


@functools.cache  # a thousand files are parsed
def _read(folder: Path) -> tuple[Test, ...]:
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        functions = _functions(tree.body, _of_module(tree))
        found += [Test(path=path.relative_to(folder), name=each.name, marks=marks) for each, marks in functions]
    return tuple(found)


def marked(mark: str, folder: Path = TESTS) -> list[Path]:
    """The files with a test of this mark, in their order."""
    return sorted({folder / each.path for each in tests(folder) if mark in {name for name, _ in each.marks}})


def promises(page: Path = ARCHITECTURE) -> list[str]:
    """Their names, in the order of the page."""
    section = page.read_text().partition("## Promises")[2]
    return re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)


def proofs(found: Iterable[Test]) -> Mapping[str, list[Test]]:
    """The tests that prove each promise."""
    by_promise = defaultdict(list)
    for each in found:
        for mark, text in sorted(each.marks):
            if mark == "proves":
                by_promise[text].append(each)
    return by_promise


def _folder_row(folder: str, found: list[Test]) -> str:
    """A folder's row, without numbers of tests: they change each day."""
    needs = {mark for each in found for mark, _ in each.marks} & set(NEEDS)
    shown = ", ".join(f"`{each}`" for each in NEEDS if each in needs)
    return f"| `{folder}` | {shown} |\n"


def page() -> str:
    """The whole text of tests/README.md."""
    found = tests()
    by_folder = defaultdict(list)
    for each in found:
        by_folder[each.path.parts[0]].append(each)
    by_promise = proofs(found)
    rows = [_folder_row(folder, each) for folder, each in sorted(by_folder.items())]
    proven = [
        f"| `{name}` | {', '.join(f'[`{each.name}`]({each.path})' for each in by_promise[name])} |\n"
        for name in promises()
    ]
    return HEAD + "".join(rows) + PROMISES + "".join(proven)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*marked(sys.argv[1]), sep="\n")
    else:
        print(page(), end="")
