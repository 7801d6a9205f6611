"""How much a process and its descendants have done, by what Linux counts anyway.

Here: reading /proc, and whether something happened between two readings. Not here: what to do when nothing
does (`instances`). Called by `instances` while a stage loads, and for the memory column of `omni up`.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")

# Beats and idle event loops cost far less than this; a loading model costs far more.
BUSY_CPU = 0.05  # of one core
BUSY_IO = 64 << 10  # bytes read or written per second


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the start of a process, its session included."""

    cpu_s: float = 0.0
    io_bytes: int = 0

    def goes_on(self, earlier: Activity, elapsed_s: float) -> bool:
        """Whether enough was done since ``earlier`` to call it progress."""
        busy_cpu = self.cpu_s - earlier.cpu_s >= BUSY_CPU * elapsed_s
        return busy_cpu or self.io_bytes - earlier.io_bytes >= BUSY_IO * elapsed_s


def of_session(leader: int) -> Activity | None:
    """The activity of the process ``leader`` and of what it has started and has not left its session.

    None: it is unknown, because this process has no descriptor left to look.
    """
    cpu, nbytes = 0.0, 0
    try:
        entries = os.listdir("/proc")
    except OSError:
        return None
    for entry in entries:
        if not entry.isdecimal():
            continue
        fields = _stat(int(entry))
        if fields is None or int(fields[3]) != leader:
            continue
        cpu += sum(map(int, fields[11:15])) / _TICKS  # user and system, own and of children waited for
        nbytes += _io_bytes(entry)
    return Activity(cpu_s=cpu, io_bytes=nbytes)


def resident_bytes(pid: int) -> int:
    """Memory of one process, 0 when it is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[21]) * _PAGE


def memory_kills() -> int:
    """Processes of this container that the kernel has killed because memory ran out."""
    try:
        events = MEMORY_EVENTS.read_text().split()
        return int(events[events.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):  # not in a control group of version 2
        return 0


def is_zombie_of(pid: int, parent: int) -> bool:
    """Whether ``pid`` has ended and waits for ``parent`` to take notice."""
    fields = _stat(pid)
    return fields is not None and fields[0] == "Z" and int(fields[1]) == parent


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the command's name may hold spaces and brackets


def _io_bytes(pid: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:  # gone, or not ours to look at
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
