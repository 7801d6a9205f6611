"""Importing large packages without the garbage collector, which finds little then and takes a part of the time.

Here: the pause. Called around the imports of a process's role, of authors' modules and of torch and transformers; not
around loading, which leaves garbage.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Pause:
    """The collector of this process. Several threads may import at once: the last one to end starts it again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._enabled = False  #: It was when the first user came.

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._enabled = gc.isenabled()
                gc.disable()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._enabled:
                gc.enable()


_pause = _Pause()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected while this lasts; uses nest."""
    with _pause:
        yield
