"""The Debian packages that some tests need: which they are, whether they are here, how to install them.

A test names its packages by the mark ``debian``; one that is run for the relay `mooncake` needs that relay's.
`conftest` skips the test where one is missing, with the line that installs it, or fails it under CI: there nothing is
skipped.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import pytest

LIST: Final = Path(__file__).with_name("debian_packages.txt")
MOONCAKE: Final = ("libibverbs1", "libnuma1", "libcurl4")  # what its extension module links


def program(name: str) -> str | None:
    """Its path. Debian has some programs in a folder that only root searches."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def faketime() -> str | None:
    """The path of its library for programs with threads; $OMNI_FAKETIME: a folder that has it."""
    roots = [root for root in (os.environ.get("OMNI_FAKETIME"), "/usr/lib") if root]
    found = (path for root in roots for path in sorted(Path(root).rglob("libfaketimeMT.so.1")))
    return next((str(path) for path in found if path.stat().st_size), None)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


Probes: TypeAlias = Mapping[str, Callable[[], object]]

PROBES: Final[Probes] = {
    "chromium": lambda: program("chromium"),
    "curl": lambda: program("curl"),
    "iproute2": lambda: program("ip") and program("tc"),
    "libcurl4": lambda: _loads("libcurl.so.4"),
    "libfaketime": faketime,
    "libibverbs1": lambda: _loads("libibverbs.so.1"),
    "libnuma1": lambda: _loads("libnuma.so.1"),
    "nginx-light": lambda: program("nginx"),
    "prometheus": lambda: program("promtool"),
}


def listed() -> list[str]:
    return [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]


def missing(packages: Iterable[str], probes: Probes = PROBES) -> list[str]:
    return sorted(name for name in set(packages) if not probes[name]())


def usable(relays: Iterable[str]) -> tuple[str, ...]:
    """Those of the relays that can be opened here."""
    without = missing(MOONCAKE)
    return tuple(name for name in relays if not (without and name == "mooncake"))


def needed(item: pytest.Item) -> set[str]:
    """The packages without which a test cannot pass."""
    named = {str(name) for mark in item.iter_markers("debian") for name in mark.args}
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return named | set(MOONCAKE if "mooncake" in [value for value in parameters.values() if type(value) is str] else ())


def require(item: pytest.Item, *, ci: bool, probes: Probes = PROBES) -> None:
    """Skip a test whose packages are missing; ci: fail it."""
    absent = missing(needed(item), probes)
    if absent:
        end = pytest.fail if ci else pytest.skip
        end(f"missing of Debian: apt-get install {' '.join(absent)} (make packages installs all that tests need)")
