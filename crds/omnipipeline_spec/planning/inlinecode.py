"""The files of ``code.inline`` that a process needs, and their meaning: only an edit of it restarts a unit.

Here: two rules over names and texts. It may keep unneeded files and never drops a needed one. A module is needed when a
needed file imports it or contains its name in a string. All files are kept when code finds modules by computed names,
and when a function comes from a module of the image, which may import any of them. Files that are not Python modules
are always kept. Comments, blank lines and layout of a Python module mean nothing; docstrings do, because a program can
read them. Not here: writing files (the runtime does). Called by `planning`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

#: Names by which Python code finds modules and files that it does not name.
_DYNAMIC: Final = frozenset(
    {"__import__", "eval", "exec", "glob", "importlib", "iterdir", "listdir", "pkgutil", "runpy", "walk"}
)
_OURS: Final = frozenset({"stage_models", "stage_runtime"})  # they import no code of a pipeline by themselves

CACHED_CHARACTERS: Final = 16_384  # of a file; an edit of a pipeline mostly leaves its files as they are
CACHED_FILES: Final = 128  # trees as text have some ten times the length of the file


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
        text = files[name]
        named = _named_again(text) if len(text) <= CACHED_CHARACTERS else _named(text)
        if named is None:
            return _sorted(files, files)
        waiting |= named
    return _sorted(files, kept)


def meanings(files: Mapping[str, str]) -> dict[str, str]:
    """File -> a text that is equal for two versions of it if no program behaves otherwise; for hashing."""
    return {
        name: text
        if not name.endswith(".py")
        else (_meaning_again(text) if len(text) <= CACHED_CHARACTERS else _meaning(text))
        for name, text in files.items()
    }


def _meaning(text: str) -> str:
    """The syntax tree of a module without positions; of what cannot be parsed, the text.

    Type comments belong to the tree, because TorchScript reads them.
    """
    if any(map(_DECLARES_ENCODING, text.splitlines()[:2])):
        return text  # it changes what the bytes of the file mean
    try:
        tree = ast.parse(text, type_comments=True)
        return "".join(_dumped(each) for each in tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


_meaning_again = functools.lru_cache(maxsize=CACHED_FILES)(_meaning)


def _dumped(node: Any) -> str:
    """A tree as ASCII text. It does not change, as that of `ast.dump` does, when a version of Python adds a field."""
    match node:
        case ast.Constant(value=value):
            return _constant(value)
        case ast.AST():
            fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
            return f"{type(node).__name__}({','.join(f'{name}={_dumped(value)}' for name, value in fields)})"
        case list():
            return f"[{','.join(map(_dumped, node))}]"
        case _:
            return ascii(node)


def _constant(value: Any) -> str:
    """A literal with its type: 1, 1.0 and True are equal, and mean three things."""
    shown = hex(value) if type(value) is int else ascii(value)  # `repr` refuses a number of 5,000 digits
    return f"{type(value).__name__}:{shown}"


#: PEP 263.
_DECLARES_ENCODING: Final = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*[-\w.]+").match


def _named(text: str) -> frozenset[str] | None:
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
    return None if named & _DYNAMIC else frozenset(named)


_named_again = functools.lru_cache(maxsize=CACHED_FILES)(_named)


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
