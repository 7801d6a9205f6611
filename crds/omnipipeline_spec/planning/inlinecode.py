"""Which files of ``code.inline`` a process needs, so that an edit of a file restarts only the units that use it.

Here: one rule over names and texts. It may keep unneeded files and never drops a needed one. A module is needed when a
needed file imports it or contains its name in a string. All files are kept when code finds modules by computed names,
and when a function comes from a module of the image, which may import any of them. Files that are not Python modules
are always kept. Not here: writing files (the runtime does). Called by `planning`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

#: Names by which Python code finds modules and files that it does not name.
_DYNAMIC: Final = frozenset(
    {"__import__", "eval", "exec", "glob", "importlib", "iterdir", "listdir", "pkgutil", "runpy", "walk"}
)
_OURS: Final = frozenset({"stage_models", "stage_runtime"})  # they import no code of a pipeline by themselves


def used(files: Mapping[str, str], functions: Iterable[str], values: Any = None) -> dict[str, str]:
    """The files that a process with these functions needs, by name.

    functions: ``module:function`` or ``module.function`` of every factory and hook of the process.
    values:    factory arguments, which may name modules, too.
    """
    modules = {name.removesuffix(".py"): name for name in files if name.endswith(".py")}
    waiting = {_root(name) for name in functions}
    if not waiting:
        return {}
    if waiting - set(modules) - _OURS:
        return _sorted(files, files)
    waiting.update(_root(text) for text in _strings(values))
    kept = {name for name in files if not name.endswith(".py")}
    while waiting:
        name = modules.get(waiting.pop())
        if name is None or name in kept:
            continue
        kept.add(name)
        named = _named(files[name])
        if named is None:
            return _sorted(files, files)
        waiting |= named
    return _sorted(files, kept)


def _named(text: str) -> set[str] | None:
    """The modules that a file may import; None: any."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the process that imports it reports the error
    named: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                named.update(_root(alias.name) for alias in names)
            case ast.ImportFrom(module=str() as module):
                named.add(_root(module))
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _DYNAMIC:
                return None
            case ast.Constant(value=str() as value):
                named.add(_root(value))
    return None if named & _DYNAMIC else named


def _root(name: str) -> str:
    """The module at the beginning of ``module:function`` or ``module.function``."""
    return name.partition(":")[0].partition(".")[0]


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for item in value.values():
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)


def _sorted(files: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: files[name] for name in sorted(names)}
