"""The time for which an observer has watched something, without the time for which it was stopped itself. Pure: the
caller passes the time.

A process is stopped by SIGSTOP, by a machine that pauses, or by a call that blocks its loop. When it goes on, all its
deadlines have passed, and it has not read yet what its peers did meanwhile. So an observer looks several times within a
deadline. A look that comes late does not count: at the next one, whatever had come was read.
"""

from __future__ import annotations

from typing import Final

LOOKS: Final = 5  # within a deadline, of those who have no other reason to look
LATE_S: Final = 0.25  # a loop under load is late by less


class WatchedTime:
    """The looks of one observer."""

    def __init__(self, now: float, look_s: float) -> None:
        """look_s: the time between two looks, as the observer asks for it."""
        self._look_s = look_s
        self._looked_at = now
        self._was_late = False

    def look(self, now: float) -> float:
        """How many of the seconds since the last look count: all, or 0 when this look is late.

        A late look after a late one counts: else an observer that is always late would never find anything.
        """
        passed_s, self._looked_at = now - self._looked_at, now
        was_late, self._was_late = self._was_late, passed_s > self._look_s + LATE_S
        return 0.0 if self._was_late and not was_late else passed_s
