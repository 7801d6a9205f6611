"""Names of our code that the pages mention: something uses each, or the page says that it is for other programs.

A page that lists a class or a function says that the product has what it does. A page must not list what nothing calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs import reached_names
from tests.docs.blocks import ROOT

MENTIONED = re.compile(r"`(?:\w+\.)*([A-Za-z_]\w{3,})(?:\(\))?`")
#: The section of engine.md on what only programs that embed the engine call.
FOR_OTHERS = "## For programs that embed the engine"

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


def unused(names: Iterator[tuple[str, str]], besides: frozenset[str] = FOUNDING) -> list[str]:
    defined, used = reached_names.reached()
    found = []
    for page, name in names:
        place = defined.get(name)
        if place is not None and name not in used | besides and not name.startswith("test_"):
            found.append(f"{page}: {name} ({place}) is called by nothing")
    return found


def test_something_uses_each_name_of_our_code_that_a_page_mentions() -> None:
    assert len(list(mentioned())) > 200
    assert unused(mentioned()) == []


def test_a_name_that_nothing_uses_is_found() -> None:
    (found,) = unused(iter([("page.md", "get_async"), ("page.md", "put")]), besides=frozenset())
    assert found == "page.md: get_async (stage_runtime/relays/abstract.py) is called by nothing"
    assert FOR_OTHERS in (ROOT / "docs/engine.md").read_text()


def test_a_use_in_a_function_that_nothing_calls_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "pyproject.toml").write_text('begin = "our.code:begins"\n')
    (tmp_path / "examples" / "code.py").write_text(
        "def begins(): Class().called()\n"
        "def forgotten(): return also_forgotten()\n"
        "def also_forgotten(): return forgotten()\n"
        "def listed(): helper()\n"
        "def helper(): pass\n"
        "TABLE = [listed]\n"
        "class Class:\n"
        "    def called(self): pass\n"
        "    @property\n"
        "    def unread(self): return used_there()\n"
        "def used_there(): pass\n"
        "@app.command()\n"
        "def command(): pass\n"
    )
    defined, names = reached_names.reached(tmp_path)
    unreached = {"forgotten", "also_forgotten", "unread", "used_there"}
    assert {name for name in defined if name} - names == unreached
