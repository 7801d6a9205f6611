"""Importing large packages without the garbage collector, which finds little then and takes a part of the time.

Here: the pause. Called around the imports of a process's role, of authors' modules and of torch and transformers; not
around loading, which leaves garbage. The first collection after a pause would look through all that was imported, 0.3 s
with transformers: the objects are old at once instead.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

#: Objects made in a pause from which on they count as old: a look through fewer takes some milliseconds.
MANY: Final = 100_000


class _Pause:
    """The collector of this process. Several threads may import at once: the last one to end starts it again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._enabled = False  #: It was when the first user came.
        self._frozen = 0  #: Objects that `freeze` has frozen; some may be gone since.

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
                if gc.get_count()[0] > MANY and gc.get_freeze_count() <= self._frozen:  # or others froze more
                    self._age()
                gc.enable()

    def freeze(self) -> None:
        with self._lock:
            gc.freeze()
            self._frozen = gc.get_freeze_count()

    def _age(self) -> None:
        """Make all objects old, without a look at them."""
        gc.freeze()
        gc.unfreeze()
        self._frozen = 0


_pause = _Pause()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected while this lasts; uses nest."""
    with _pause:
        yield


def freeze() -> None:
    """Leave all objects of now out of collections, until a later pause has imported large packages."""
    _pause.freeze()
