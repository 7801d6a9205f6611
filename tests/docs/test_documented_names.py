"""Names of our code that the pages mention: something uses each, or the page says that it is for other programs.

A page that lists a class or a function says that the product has what it does. Where nothing calls it, that is not so.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from tests.docs.blocks import ROOT

PRODUCT = ("crds/omnipipeline_spec", "operator/omnipipeline_operator", "stage_runtime", "stage_models", "examples")
MENTIONED = re.compile(r"`(?:\w+\.)*([A-Za-z_]\w{3,})(?:\(\))?`")
#: The section of engine.md on what only programs that embed the engine call.
FOR_OTHERS = "## For programs that embed the engine"
#: Called by name: by kopf, by Python, by a file, or by authors, who subclass or call it.
BY_NAME = frozenset({"stage_runtime/api.py", "stage_runtime/testing.py", "stage_runtime/__init__.py"})

#: The founding documents name these forms of put and get; benchmarks and tests of relays call them.
FOUNDING = frozenset({"put_async", "get_async"})


def mentioned() -> Iterator[tuple[str, str]]:
    """(page, name) of all pages, without the section for other programs."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        begin = text.find(FOR_OTHERS)
        if begin >= 0:
            end = text.find("\n## ", begin + 1)
            text = text[:begin] + text[end:]
        for name in sorted(set(MENTIONED.findall(text))):
            yield page.name, name


@functools.cache
def code() -> tuple[dict[str, str], frozenset[str]]:
    """Where each public class, function and method is defined, and every name that some code uses."""
    defined: dict[str, str] = {}
    used: set[str] = set()
    for path in (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))):
        place = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    defined.setdefault(name, place)
                    # a decorator registers what it decorates; a property or an override is used as an attribute
                    if node.decorator_list:
                        used.add(name)
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    used.add(name)
                case ast.Constant(value=str(text)) if text.isidentifier():
                    used.add(text)
                case _:
                    pass
    return defined, frozenset(used)


def unused(names: Iterator[tuple[str, str]], besides: frozenset[str] = FOUNDING) -> list[str]:
    defined, used = code()
    found = []
    for page, name in names:
        place = defined.get(name)
        if place is not None and name not in used | besides and place not in BY_NAME and not name.startswith("test_"):
            found.append(f"{page}: {name} ({place}) is called by nothing")
    return found


def test_something_uses_each_name_of_our_code_that_a_page_mentions() -> None:
    assert len(list(mentioned())) > 200
    assert unused(mentioned()) == []


def test_a_name_that_nothing_uses_is_found() -> None:
    (found,) = unused(iter([("page.md", "get_async"), ("page.md", "put")]), besides=frozenset())
    assert found == "page.md: get_async (stage_runtime/relays/abstract.py) is called by nothing"
    assert FOR_OTHERS in (ROOT / "docs/engine.md").read_text()
