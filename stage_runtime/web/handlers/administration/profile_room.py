"""How many bytes of profiles' files a coordinator may hold on its disk at once, while clients fetch them.

Stages report the sizes of their files, and a stage runs an author's code: what it reports is checked before a byte is
written. Used by `profiling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stage_runtime.errors import ConfigurationError

BLOCK: Final = 4096  # of a disk, which a file without content takes as well
FREE_SHARE: Final = 2  # a file may take half of what is free


class Room:
    """The room of one coordinator."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self._held_nbytes = 0

    @contextmanager
    def part(self) -> Iterator[RoomPart]:
        """The files of one answer; they are gone at the end of the block."""
        made = RoomPart(self)
        try:
            yield made
        finally:
            self._held_nbytes -= made.nbytes

    def take(self, nbytes: int, free: int) -> None:
        left = min(self._limit_nbytes - self._held_nbytes, free // FREE_SHARE)
        if nbytes > left:
            where = "copy it from its pod (kubectl cp)"
            raise ConfigurationError(f"{nbytes} bytes, and the coordinator has room for {max(left, 0)}: {where}")
        self._held_nbytes += nbytes


class RoomPart:
    """The bytes of one answer in a `Room`."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.nbytes = 0

    def take(self, nbytes: int, *, free: int) -> None:
        """Hold a file of ``nbytes``. free: bytes that the disk has.

        Raises: ConfigurationError: it finds no room; nothing is held.
        """
        taken = max(nbytes, BLOCK)
        self._room.take(taken, free)
        self.nbytes += taken
