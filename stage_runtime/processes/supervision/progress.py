"""The progress of loading processes: whether they do something (output, processor time, input or output), and the share
that they report as done. Called by `instances`, and by what shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from stage_runtime.processes.supervision import activity
from stage_runtime.processes.supervision.children import Child
from stage_runtime.rules.flow.watched_time import WatchedTime

LOOK_MOST_S: Final = 1.5  # between two looks (`instances.WATCH_S`, to a tick)
BYTES: Final = "B"


class ProgressWatch:
    """The time for which each loading process has done nothing. Times are of `time.monotonic`."""

    def __init__(self, children: Sequence[Child], now: float) -> None:
        self._watched = WatchedTime(now, LOOK_MOST_S)
        self._seen = {child: (activity.of_session(child.pid), now, 0.0) for child in children}

    def idlest(self, now: float) -> tuple[Child, float] | None:
        """The unready process that has done nothing for longest, and for how many seconds in which this one ran: a
        container that is paused stops both.
        """
        passed_s = self._watched.look(now)
        idle: dict[Child, float] = {}
        for child, (before, looked, idle_s) in self._seen.items():
            if child.ready:
                continue
            done = activity.of_session(child.pid)
            busy = done is None or before is None or done.goes_on(before, now - looked)
            idle_s = 0.0 if busy else max(min(idle_s + passed_s, now - child.last_sign), 0.0)
            self._seen[child] = (done, now, idle_s)
            idle[child] = idle_s
        return max(idle.items(), key=lambda item: item[1], default=None)


class LoadedShare(msgspec.Struct, frozen=True):
    """How much of something a loading stage has done. total: 0: not known. unit: ``B``: bytes."""

    done: float
    total: float
    unit: str = ""

    @property
    def percent(self) -> int | None:
        """A whole number from 0 to 100; None: the total is not known."""
        return int(min(max(100 * (self.done / self.total), 0), 100)) if self.total > 0 else None

    def __str__(self) -> str:
        """The share in words: ``43 % of 2.8 GB``, ``43 % (126 of 290)`` or ``1.2 GB``."""
        if self.percent is None:
            return _amount(self.done) if self.unit == BYTES else f"{self.done:g}"
        if self.unit == BYTES:
            return f"{self.percent} % of {_amount(self.total)}"
        return f"{self.percent} % ({self.done:g} of {self.total:g})"


def _amount(nbytes: float) -> str:
    """Bytes in words, ``1.4 GB``: in powers of ten as downloads are counted."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


class LoadingLines:
    """Chooses the changes of loading processes that are worth a line: every ten per cent of the same thing."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, int]] = {}  #: Process -> message and tens of per cent of its last line.

    def is_due(self, process: str, message: str, share: LoadedShare | None) -> bool:
        if share is None:
            self._said.pop(process, None)
            return True
        said = (message, (share.percent or 0) // 10)
        if self._said.get(process) == said:
            return False
        self._said[process] = said
        return True
