"""The names of our code that some use reaches from where programs begin.

Begins: the code of modules that runs when they are imported, what authors call, and what files name as
``module:name``. A use inside of a function counts once something that is reached names that function. Names are not
resolved: a use of ``close`` reaches all that are called so.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.docs.blocks import ROOT

PRODUCT = ("crds/omnipipeline_spec", "operator/omnipipeline_operator", "stage_runtime", "stage_models", "examples")
#: Subclassed, imported or called by authors.
AUTHORS = frozenset(
    {
        "stage_runtime/api.py",
        "stage_runtime/testing.py",
        "stage_runtime/__init__.py",
        "stage_runtime/profiler/__init__.py",
    }
)
NAMED = re.compile(r"[\w.]+:([A-Za-z_]\w*)")  # an entry point, a factory, a hook, a decoder
#: These decorators keep no list of what they decorate: something else must call it.
PLAIN = frozenset(
    """abstractmethod asynccontextmanager cache cached_property classmethod contextmanager final inference_mode
    lru_cache no_grad overload override property runtime_checkable setter staticmethod wraps""".split()
)


class Definition:
    """A class or function, or a module, and the names that its own code uses."""

    def __init__(self, name: str, place: str) -> None:
        self.name = name
        self.place = place
        self.uses: set[str] = set()


@functools.cache
def reached(root: Path = ROOT) -> tuple[dict[str, str], frozenset[str]]:
    """The place where each class and function is defined, and every name that is reached."""
    known = defaultdict[str, list[Definition]](list)
    waiting: list[str] = []
    for path in (path for folder in PRODUCT for path in sorted((root / folder).rglob("*.py"))):
        module = Definition("", path.relative_to(root).as_posix())
        for found in list(_definitions(ast.parse(path.read_text()), module)):  # all uses are known at the end
            known[found.name].append(found)
            if found is module or found.place in AUTHORS:
                waiting += found.uses
                waiting += [found.name] if found.place in AUTHORS else []
    waiting += _named_by_files(root)
    names: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            for found in known.get(name, ()):
                waiting += found.uses
    return {name: found[0].place for name, found in known.items()}, frozenset(names)


def _named_by_files(root: Path) -> Iterator[str]:
    files = [root / "pyproject.toml", *(root / "examples").rglob("*.yaml"), *(root / "operator").rglob("*.toml")]
    for path in files:
        yield from NAMED.findall(path.read_text().replace('"', ""))


def _definitions(node: ast.AST, within: Definition) -> Iterator[Definition]:
    """``within``, if it is a module, and all that are defined inside of it."""
    if isinstance(node, ast.Module):
        yield within
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                inner = Definition(name, within.place)
                decorators = [_last_name(one) for one in child.decorator_list]
                if name.startswith("__") or not PLAIN.issuperset(decorators):  # Python, or a list, calls it
                    within.uses.add(name)
                yield from _definitions(child, inner)
                yield inner
            case ast.Assign(targets=[ast.Name(id="__all__")]) if within.place not in AUTHORS:
                pass
            case _:
                match child:
                    case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                        within.uses.add(name)
                    case ast.Constant(value=str(text)) if text.isidentifier():
                        within.uses.add(text)
                    case ast.Constant(value=str(text)) if (named := NAMED.fullmatch(text)) is not None:
                        within.uses.add(named[1])
                    case _:
                        pass
                yield from _definitions(child, within)


def _last_name(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
