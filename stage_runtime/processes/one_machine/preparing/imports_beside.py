"""The groups whose code is in the files of a pipeline's folder: what a changed file concerns. Reads, never imports.

Called by `updating`. A file that cannot be parsed imports nothing; the group that imports it is found all the same.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from omnipipeline_spec.types.plan import StagePlan, UnitPlan

MOST: Final = 2_000  # files of a folder that are looked at
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages"})


def files(folder: Path) -> Iterator[Path]:
    """Its Python files, also in packages; not those of environments, of hidden folders, and of those that may not be
    read. A folder to which links lead is looked into once.
    """
    waiting, seen, count = [folder], set[tuple[int, int]](), 0
    while waiting:
        for entry in _entries(waiting.pop(), seen):
            if entry.name.startswith(".") or entry.name in _SKIPPED:
                continue
            if os.path.isdir(entry) and not os.path.exists(entry / "pyvenv.cfg"):
                waiting.append(entry)
            elif entry.suffix == ".py":
                count += 1
                if count > MOST:
                    return
                yield entry


def _entries(folder: Path, seen: set[tuple[int, int]]) -> list[Path]:
    try:
        facts = folder.stat()
        if (facts.st_dev, facts.st_ino) in seen:
            return []
        seen.add((facts.st_dev, facts.st_ino))
        return sorted(folder.iterdir())
    except OSError:
        return []


def concerned(units: Iterable[UnitPlan], folder: Path, changed: Iterable[Path]) -> set[str]:
    """Names of the units whose stages import one of the changed files, themselves or by other files of the folder."""
    imports = {file: _imports(file) for file in files(folder)}
    touched = set(changed)
    found = set()
    for unit in units:
        names = {name for stage in unit.stages for name in modules(stage)}
        if _reached(names, imports, folder) & touched:
            found.add(unit.name)
    return found


def modules(stage: StagePlan) -> Iterator[str]:
    """Those that have a stage's factory and hooks."""
    hooks = (stage.route_fn, stage.wait_for_fn, stage.merge_fn, stage.stream_done_to_fn)
    for place in (stage.factory, *hooks, *stage.project_payload.values()):
        if place:
            yield place.partition(":")[0]


def _reached(names: Iterable[str], imports: Mapping[Path, set[str]], folder: Path) -> set[Path]:
    waiting, reached = list(names), set[Path]()
    while waiting:
        for file in _files_of(waiting.pop(), folder):
            if file in imports and file not in reached:
                reached.add(file)
                waiting += imports[file]
    return reached


def _files_of(module: str, folder: Path) -> Iterator[Path]:
    """The files that an import of a module runs: its packages' and its own."""
    at = folder
    for part in module.split("."):
        at = at / part
        yield at / "__init__.py"
        yield at.with_name(f"{part}.py")


def _imports(file: Path) -> set[str]:
    """Names of modules in its import statements; of ``from a import b`` also ``a.b``."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: by the names of its folders
                found |= {
                    f"{_relative(file, node.level, base)}{one}" for one in ("", *(f".{n.name}" for n in node.names))
                }
            else:
                found |= {base, *(f"{base}.{one.name}" for one in node.names)}
    return found


def _relative(file: Path, level: int, base: str) -> str:
    parts = []
    folder = file.parent
    for _ in range(level - 1):
        folder = folder.parent
    while (folder / "__init__.py").exists():
        parts.append(folder.name)
        folder = folder.parent
    return ".".join([*reversed(parts), *([base] if base else [])])
