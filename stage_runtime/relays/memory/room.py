"""A put that found no room waits until some may have come back.

Called by `dispatch.Relays`. The reports come from relays, or from a timer: nothing reports that an author's tensor has
died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class RoomWaiting:
    """One caller that waits for room; a later one takes its place."""

    def __init__(self, loop: asyncio.AbstractEventLoop, room_s: float) -> None:
        """room_s: after so long the caller tries again without a report."""
        self._loop = loop
        self._room_s = room_s
        self._waiting: Callable[[], None] | None = None  #: The function that `wait` was given, until it is called.
        self._looking: asyncio.TimerHandle | None = None

    def wait(self, again: Callable[[], None]) -> None:
        """Call ``again`` once, on the loop, at the next report or after ``room_s``. Any thread may call this."""
        self._waiting = again
        self._on_loop(self._look_later)

    def freed(self) -> None:
        """A relay reports room. Any thread may call it."""
        if self._waiting is not None:
            self._on_loop(self._look)

    def close(self) -> None:
        self._waiting = None
        if self._looking is not None:
            self._looking.cancel()

    def _look_later(self) -> None:
        if self._looking is None and self._waiting is not None:
            self._looking = self._loop.call_later(self._room_s, self._look)

    def _look(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        again, self._waiting = self._waiting, None
        if again is not None:
            again()

    def _on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # it is closed: nothing is sent any more
            pass
