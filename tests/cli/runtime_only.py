"""An interpreter that has what the extra ``runtime`` brings and nothing else: all other packages are hidden from it.

`environ` gives the variables of such an interpreter; its children have them, too. The names of the hidden modules come
from the metadata of what is installed here, and of it the extra's closure stays.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

OURS: Final = "omnipipeline"
ROOT: Final = Path(__file__).parents[2]
HIDES: Final = """\
import sys


class Hidden:
    \"\"\"Finds nothing, and says so, for the modules of packages that are not of the extra.\"\"\"

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


NAMES = frozenset(%r)
sys.meta_path.insert(0, Hidden())
"""


def environ(folder: Path, extra: str = "runtime") -> dict[str, str]:
    """Variables with which Python hides all modules but the extra's and its own; ``folder`` gets a file for that."""
    (folder / "sitecustomize.py").write_text(HIDES % sorted(hidden(extra)))
    return {**os.environ, "PYTHONPATH": str(folder)}


def hidden(extra: str) -> set[str]:
    """Modules of installed packages that this extra of omnipipeline does not bring."""
    kept = closure(OURS, extra)
    modules = metadata.packages_distributions()
    return {name for name, owners in modules.items() if kept.isdisjoint(map(canonical, owners))} - {
        name for name in sys.stdlib_module_names if name.isidentifier()
    }


def closure(package: str, extra: str) -> set[str]:
    """The packages that pip would install, by their canonical names."""
    found: set[str] = set()
    left = [(package, extra)]
    asked: set[tuple[str, str]] = set()
    while left:
        name, wanted = each = left.pop()
        found.add(canonical(name))
        if each in asked:
            continue
        asked.add(each)
        left += list(_needs(name, wanted))
    return found


def _needs(name: str, extra: str) -> Iterator[tuple[str, str]]:
    for requirement in map(Requirement, _lines(name, extra)):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield from ((requirement.name, more) for more in ("", *requirement.extras))


def _lines(name: str, extra: str) -> Sequence[str]:
    """The requirements of a package. Ours are those of the checkout, which may be newer than what was installed."""
    if name == OURS:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        return [*project["dependencies"], *project["optional-dependencies"].get(extra, [])]
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []  # a package of another platform


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
