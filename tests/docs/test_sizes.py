"""Bounds of functions, constructors and modules of the product: what is larger is split by a subject that it has."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("crds", "operator", "stage_runtime", "stage_models")
FUNCTION_LINES = 60
CONSTRUCTOR_ARGUMENTS = 9
MODULE_LINES = 450
#: Functions that are compiled as one.
KERNELS = "stage_runtime/engines/autoregressive/kernels/"
#: A longer module says in its docstring why it is one.
REASON = re.compile(r"\b[Oo]ne (room|module|file)\b")


def _modules() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", *PRODUCT], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in listed.stdout.split() if name.endswith(".py") and (ROOT / name).exists()]
    assert len(names) > 500
    return {name: (ROOT / name).read_text() for name in names}


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


def too_large(name: str, text: str) -> list[str]:
    tree, found = ast.parse(text), []
    for one in _functions(tree):
        lines = (one.end_lineno or one.lineno) - one.lineno + 1
        if lines > FUNCTION_LINES and not name.startswith(KERNELS):
            found.append(f"{name}:{one.lineno}: {one.name} has {lines} lines, at most {FUNCTION_LINES}")
        arguments = len([*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]) - 1
        if one.name == "__init__" and arguments > CONSTRUCTOR_ARGUMENTS:
            found.append(f"{name}:{one.lineno}: {arguments} arguments, at most {CONSTRUCTOR_ARGUMENTS}")
    lines = text.count("\n")
    if lines > MODULE_LINES and REASON.search(ast.get_docstring(tree) or "") is None:
        found.append(f"{name}: {lines} lines, at most {MODULE_LINES}, or its docstring says why it is one module")
    return found


def test_no_function_constructor_or_module_is_larger_than_its_bound() -> None:
    assert [fault for name, text in _modules().items() for fault in too_large(name, text)] == []


LONG = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
WIDE = (
    f"class A:\n    def __init__(self, {', '.join(f'a{number}' for number in range(CONSTRUCTOR_ARGUMENTS + 1))}): ...\n"
)
TALL = "x = 1\n" * (MODULE_LINES + 1)


@pytest.mark.parametrize("text", [LONG, WIDE, TALL, f'"""One of many."""\n{TALL}'])
def test_a_part_above_its_bound_is_found(text: str) -> None:
    assert len(too_large("stage_runtime/x.py", text)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stage_runtime/x.py", LONG.removesuffix("    x = 1\n")),
        (f"{KERNELS}x.py", LONG),
        ("stage_runtime/x.py", f'"""One module, because it is a list."""\n{TALL}'),
    ],
)
def test_a_part_within_its_bound_is_not(name: str, text: str) -> None:
    assert too_large(name, text) == []
