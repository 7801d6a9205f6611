"""How late the kernel may wake a thread for a timer, so that timers that are due soon after each other wake it once.

A thread begins with the slack of the one that starts it. Called by `opening`, around the start of libzmq's threads.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Final

_SET_SLACK: Final = 29  # Linux's prctl
_GET_SLACK: Final = 30
_NS: Final = 1_000_000_000

_prctl = ctypes.CDLL(None).prctl
_prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_prctl.restype = ctypes.c_int


def current_s() -> float:
    """The slack of this thread; 0: unknown."""
    return max(int(_prctl(_GET_SLACK, 0, 0, 0, 0)), 0) / _NS


@contextlib.contextmanager
def slack(seconds: float) -> Iterator[None]:
    """Set the slack of the threads that this thread starts meanwhile, where the system allows it."""
    before = int(_prctl(_GET_SLACK, 0, 0, 0, 0))
    _prctl(_SET_SLACK, round(seconds * _NS), 0, 0, 0)
    try:
        yield
    finally:
        if before > 0:
            _prctl(_SET_SLACK, before, 0, 0, 0)
