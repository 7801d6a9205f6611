"""The limits of a process that peers use up: descriptors and memory. Raised at start, checked before each new peer.

The new peer is refused at a limit, with the limit's name and what to do; connected peers are served. libzmq does not do
that: at the limit of descriptors its thread tries to accept the same connection for ever, so some are kept free.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from stage_runtime.errors import LimitReached

KEPT_FREE: Final = 64  # descriptors: for connections that peers open to us, files and refusals
#: Descriptors that peers with a connection leave free: fewer than new ones must, so that they are answered while
#: strangers use up the rest. Doors are shut before so few are left.
KEPT_FROM_CONNECTED: Final = 16
MEMORY_FREE: Final = 32 << 20  # bytes; a link and its relays take less than one MiB
MEMORY_EVERY_S: Final = 1.0  # how often the memory of the container is read
RAISE_DESCRIPTORS: Final = "raise the hard limit (ulimit -Hn, or LimitNOFILE of the container runtime)"
UNLIMITED: Final = 1 << 62  # bytes; control groups of version 1 write a number for "unlimited"
_FDS: Final = "/proc/self/fd"
_SIZE_IS_COUNT: Final = os.stat(_FDS).st_size == len(os.listdir(_FDS)) - 1  # since Linux 6.2
_CGROUP: Final = Path("/sys/fs/cgroup")


class MemoryFiles(NamedTuple):
    """The files of a control group, and which line of ``stat`` is cache that the kernel gives back."""

    limit: str
    usage: str
    stat: str
    cache: str


VERSIONS: Final = (
    MemoryFiles("memory.max", "memory.current", "memory.stat", "inactive_file"),
    MemoryFiles(
        "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"
    ),
)


def raise_limits() -> int:
    """Allow this process as many descriptors as it may have. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):
            pass  # a kernel whose nr_open is below the hard limit: the soft one stays, and `check` reports it
    return soft


def check(*, connected: bool = False) -> None:
    """Called before a peer is connected to. Raises: LimitReached: no descriptors or no memory are left for one.

    connected: the peer has a connection to this process already.
    """
    _descriptors(KEPT_FROM_CONNECTED if connected else KEPT_FREE)
    _memory()


def allowed_descriptors() -> int:
    """How many this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def descriptors() -> tuple[int, int]:
    """How many this process may open, and how many of them are left; below 0 where the limit was lowered."""
    allowed = allowed_descriptors()
    if _SIZE_IS_COUNT:
        return allowed, allowed - os.stat(_FDS).st_size
    try:
        return allowed, allowed - len(os.listdir(_FDS)) + 1
    except OSError:  # no descriptor is left to list them
        return allowed, 0


def _descriptors(kept: int) -> None:
    allowed = allowed_descriptors()
    kept = min(kept, allowed * kept // (4 * KEPT_FREE))
    # Counted where that is cheap: `_taken` leaves none for a connection that comes meanwhile.
    left = descriptors()[1] if _SIZE_IS_COUNT else _taken(kept)
    if left < kept:
        raise LimitReached(
            f"the process may open {allowed} descriptors (RLIMIT_NOFILE), and fewer than {kept} are left: "
            f"{RAISE_DESCRIPTORS}"
        )


def _taken(most: int) -> int:
    """How many can be opened, up to so many. They are closed again."""
    taken: list[int] = []
    try:
        # The numbers that are free need not follow each other.
        taken.extend(os.dup(0) for _ in range(most))
    except OSError:
        pass
    finally:
        for descriptor in taken:
            os.close(descriptor)
    return len(taken)


class _Memory:
    """The memory that the container may use and uses, read now and then."""

    def __init__(self) -> None:
        self._read_at = -MEMORY_EVERY_S
        self._problem: str | None = None

    def problem(self, now: Callable[[], float] = time.monotonic) -> str | None:
        if now() - self._read_at >= MEMORY_EVERY_S:
            self._read_at = now()
            self._problem = memory_problem(_CGROUP)
        return self._problem


_container = _Memory()


def _memory() -> None:
    problem = _container.problem()
    if problem is not None:
        raise LimitReached(problem)


def memory_limit(cgroup: Path = _CGROUP) -> int | None:
    """Bytes that the container may use; None: it has no limit."""
    found = _limited(cgroup)
    return None if found is None else found[0]


def memory_problem(cgroup: Path) -> str | None:
    """Why the container of ``cgroup`` has no memory for another peer; None: it has."""
    found = _limited(cgroup)
    if found is None:
        return None
    limit, files = found
    try:
        used = int((cgroup / files.usage).read_text())
        lines = (cgroup / files.stat).read_text().splitlines()
        cache = next((int(line.split()[1]) for line in lines if line.startswith(f"{files.cache} ")), 0)
    except (OSError, ValueError):
        return None
    if limit - (used - cache) >= min(MEMORY_FREE, limit // 16):
        return None
    return (
        f"the container may use {limit >> 20} MiB of memory, and {(used - cache) >> 20} MiB are in use: raise "
        "resources.limits.memory"
    )


def _limited(cgroup: Path) -> tuple[int, MemoryFiles] | None:
    for files in VERSIONS:
        try:
            limit = int((cgroup / files.limit).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        if limit < UNLIMITED:
            return limit, files
    return None
