"""How far a fetch is: counted by its threads, and logged with each further twentieth of the model.

Here: the counts and their lines. Not here: who fetches (`cache`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import msgspec

STEPS: Final = 20  # lines of a whole fetch


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a model is here."""

    bytes_done: int = 0
    bytes_total: int = 0


class Progress:
    """Counts of one fetch; its methods may be called by several threads."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._lock = threading.Lock()
        self._say = say
        self._report = Report()

    @property
    def report(self) -> Report:
        return self._report

    def expect(self, total: int, *, done: int) -> None:
        """The bytes that the model has, and how many of them are here already."""
        with self._lock:
            self._report = Report(bytes_done=done, bytes_total=total)

    def add(self, nbytes: int) -> None:
        """More bytes are here; a negative number: bytes that must be fetched again."""
        with self._lock:
            before = self._report
            self._report = msgspec.structs.replace(before, bytes_done=before.bytes_done + nbytes)
            if _step(self._report) > _step(before):
                now = self._report
                self._say(f"{now.bytes_done} of {now.bytes_total} bytes ({100 * now.bytes_done // now.bytes_total} %)")


def _step(report: Report) -> int:
    return STEPS * report.bytes_done // max(report.bytes_total, 1)
