"""The folder of a pipeline's file, ahead of everything else in the import path of its processes.

Here: which folder that is, and which of its modules would be imported in place of one that the processes need
(``numpy.py`` beside the pipeline). Not here: inline files, whose names the contract checks. Called by `local` and
`cli.files.validate`.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from typing import Final

from omnipipeline_spec.validation import deployment
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine.preparing import imports_beside

#: Modules of Python that nothing of ours, and nothing that we depend on, imports: such a name is harmless.
UNUSED: Final = frozenset(
    "aifc antigravity asynchat asyncore audioop cgitb chunk compileall crypt ensurepip idlelib imaplib imghdr lib2to3 "
    "mailbox mailcap modulefinder msilib nis nntplib ossaudiodev pipes poplib pyclbr rlcompleter sched shelve smtpd "
    "sndhdr spwd sunau symtable syslog tabnanny telnetlib this tkinter trace turtle turtledemo uu venv winsound xdrlib "
    "zipapp".split()
)
DISTRIBUTION: Final = "omnipipeline"
EXTRAS: Final = ("runtime", "otel", "engine", "numba")  #: Those that a pipeline's processes import, if installed.


def of(source: str) -> Path | None:
    """The folder of ``pipeline.yaml``, ``pipeline.py`` or ``pipeline.py:name``; None for a module's name."""
    file = Path(source if os.path.exists(source) else source.rpartition(":")[0])
    return file.resolve().parent if file.is_file() else None


def check(folder: Path | None) -> None:
    """Raises: ConfigurationError: a file in it would be imported in place of a module that processes need, or none can
    be imported from there.
    """
    if folder is None:
        return
    if os.pathsep in str(folder) and any(imports_beside.files(folder)):
        raise ConfigurationError(
            f"{folder}: Python imports nothing from a folder with {os.pathsep!r} in its path: give it another name"
        )
    # Processes are started with -P, so without the folder that Python puts ahead of its path for this program.
    for name, file in shadowing(folder, sys.path if sys.flags.safe_path else sys.path[1:]):
        raise ConfigurationError(
            f"{file} would be imported in place of the module {name}, which the pipeline's processes need: "
            "give it another name"
        )


def shadowing(folder: Path, path: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Names of modules that processes need, and the files of ``folder`` that would be imported instead.

    path: where modules are imported from without it. A folder without ``__init__.py`` gives way to a real module, so
    it is not one; nor is the module itself, for example of a pipeline in this repository's root.
    """
    try:
        entries = {entry.name.partition(".")[0] for entry in os.scandir(folder)}
    except OSError:
        return
    for name in sorted(filter(str.isidentifier, entries)):
        found = PathFinder.find_spec(name, [str(folder)])
        if found is None or found.loader is None or found.origin is None:
            continue
        if BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name):  # they come before any folder
            continue
        if name in sys.stdlib_module_names - UNUSED or _is_needed(name, found, path):
            yield name, Path(found.origin)


def _is_needed(name: str, found: ModuleSpec, path: Sequence[str]) -> bool:
    """Whether there is another module of the name, ours or of a package that ours depend on."""
    real = PathFinder.find_spec(name, path)
    if real is None or real.loader is None or real.origin is None or real.origin == found.origin:
        return False
    if name in deployment.TAKEN_MODULES - sys.stdlib_module_names - {"sitecustomize", "usercustomize"}:
        return True
    installed = tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
    return real.origin.startswith(installed) and any(
        _normal(owner) in _dependencies() for owner in importlib.metadata.packages_distributions().get(name, ())
    )


def _dependencies() -> set[str]:
    """All distributions that ours requires, and that they require."""
    found: set[str] = set()
    left = [DISTRIBUTION]
    while left:
        name = _normal(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            required = importlib.metadata.distribution(name).requires
        except importlib.metadata.PackageNotFoundError:
            continue
        extras = EXTRAS if name == DISTRIBUTION else ()
        left += [_named(one) for one in required or () if _extra(one) is None or _extra(one) in extras]
    return found


def _named(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0] if found else ""


def _extra(requirement: str) -> str | None:
    """Such as ``dev`` of ``pytest>=9; extra == 'dev'``."""
    found = re.search(r"extra\s*==\s*['\"]([\w.-]+)", requirement)
    return found[1] if found else None


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
