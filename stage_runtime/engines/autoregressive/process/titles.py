"""The name of a process, as `ps`, `top` and `pstree` show it. Linux only."""

from __future__ import annotations

import ctypes
from typing import Final

MOST: Final = 15  # bytes that Linux keeps

_PR_SET_NAME: Final = 15  # linux/prctl.h; of the calling thread, which is the process's if it is the main one


def take(name: str) -> None:
    """Names the process in ``ps`` and ``top``. The main thread calls it.

    A longer name than `MOST` bytes is cut; the arguments of the process have it whole.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:MOST]), 0, 0, 0)
