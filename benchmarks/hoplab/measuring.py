"""The use of processes: processor time and voluntary context switches, read from outside of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

SCHEDULED = 2  # Linux's clock of what a process was scheduled for: user and system time, in nanoseconds


class Used(msgspec.Struct, frozen=True):
    """cpu_s: user and system. waits: how often a thread went to sleep, and so was woken again."""

    cpu_s: float
    waits: int

    def __sub__(self, other: Used) -> Used:
        return Used(self.cpu_s - other.cpu_s, self.waits - other.waits)


def used(pids: Sequence[int]) -> Used:
    """The use of all these processes and their threads since they began."""
    return Used(sum(map(_cpu_s, pids)), sum(map(_waits, pids)))


def _cpu_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | SCHEDULED)


def _waits(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    total += int(line.split()[1])
    return total


class Visits(msgspec.Struct, frozen=True):
    """The cost of one request, on average. cpu_us, waits: per visit of a stage. wall_us: of the whole request."""

    cpu_us: float
    waits: float
    wall_us: float


async def visits(once: Callable[[], Awaitable[None]], pids: Sequence[int], rounds: int) -> Visits:
    """Ask ``rounds`` times, one after the other."""
    before, began = used(pids), time.perf_counter()
    for _ in range(rounds):
        await once()
    wall_s = time.perf_counter() - began
    spent = used(pids) - before
    visited = rounds * len(pids)
    return Visits(spent.cpu_s / visited * 1e6, spent.waits / visited, wall_s / rounds * 1e6)


async def rate(once: Callable[[], Awaitable[None]], concurrency: int, total: int) -> float:
    """Requests per second with ``concurrency`` under way at any time."""
    left = total

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await once()

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return total / (time.perf_counter() - began)
