"""A file that others write while this process runs: a mounted ConfigMap or Secret, a list that `omni up` writes.

Here: whether its content has changed, by one `stat` where it has not. Not here: what the content means, and the timer.
Called by `coordinator_process`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

JUST_WRITTEN_S: Final = 1.0  # far above the step in which a file system counts the time of a write

_Facts: TypeAlias = tuple[int, int, int, int]  #: Device, inode, time of the last write and size.


class WatchedFile:
    """The content of one file, as it was read last."""

    def __init__(self, path: Path, known: bytes | None = None, *, clock: Callable[[], float] = time.time) -> None:
        """known: what was read of it before; None: what is in it now. Raises: OSError: it cannot be read."""
        self.path = path
        self._clock = clock
        self._content = path.read_bytes() if known is None else known
        self._facts: _Facts | None = None  #: The facts at the time of the last read; None: the next look reads it.

    def changed(self) -> bytes | None:
        """The content, if it is another one than at the last call; a file that cannot be read has not changed."""
        before = self._content
        with contextlib.suppress(OSError):  # the symlink of a ConfigMap or Secret is being swapped, or it is not there
            facts = self._look()
            if facts is None or facts != self._facts:
                self._content, self._facts = self.path.read_bytes(), facts
        return None if self._content == before else self._content

    def _look(self) -> _Facts | None:
        """The facts that change with each write; None: the last write was just now, and the next may leave them."""
        facts = self.path.stat()
        if self._clock() - facts.st_mtime < JUST_WRITTEN_S:
            return None
        return facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size
