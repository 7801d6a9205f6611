"""Frees memory of an idle process: it allocates nothing, so neither its garbage collector nor its allocator would
run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Final

from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.memory import pages
from stage_runtime.stage.stage import Stage

LAST_TRIM: Final = 64  # calm beats


class IdleTrimming:
    """Checks at every beat whether the process was idle since the one before."""

    def __init__(self, stages: Iterable[Stage], give_back: Callable[[], None] = pages.give_back) -> None:
        """give_back: gives free memory of this process back to the system."""
        self._stages = tuple(stages)
        self._give_back = give_back
        self._pinned: list[int] = []  #: Transfers that were pinned at the last beat.
        self._searched_for: list[int] = []  #: Those of them for which garbage was collected in vain.
        self._taken = 0  #: The number of events that the engines had taken at the last beat.
        self._dropped = 0  #: Requests that had ended while they waited, at the last beat.
        self._free = False  #: Some have since memory was given back.
        self._calm = LAST_TRIM  #: Beats in a row without anything; a process that has done nothing yet is past it all.

    def beat(self, relays: Relays) -> None:
        busy = any(stage.busy for stage in self._stages)
        self._free_forgotten([int(pin.transfer) for pin in relays.pins()], busy=busy)
        self._give_memory_back(sum(stage.inbox.taken for stage in self._stages), busy=busy)
        self._give_dropped_back(sum(stage.inbox.dropped for stage in self._stages))

    def _free_forgotten(self, pins: list[int], *, busy: bool) -> None:
        """Look for slots that only unreachable cycles still hold (a user's exception with its traceback is one)."""
        if pins and pins == self._pinned and not busy:
            if pins != self._searched_for:  # what is held on purpose is not looked for again and again
                gc.collect()
            self._searched_for = pins
        self._pinned = pins

    def _give_memory_back(self, taken: int, *, busy: bool) -> None:
        """Gives free memory back at the first calm beat, the second, the fourth, the eighth…: memory that peers still
        hold becomes free late.
        """
        self._calm = self._calm + 1 if taken == self._taken and not busy else 0
        if 0 < self._calm <= LAST_TRIM and self._calm.bit_count() == 1:
            self._give_back()
        self._taken = taken

    def _give_dropped_back(self, dropped: int) -> None:
        """Memory is trimmed after requests that ended in the queue of a busy stage. It may be busy for long."""
        if dropped != self._dropped:
            self._free, self._dropped = True, dropped
        elif self._free:
            self._free = False
            self._give_back()
