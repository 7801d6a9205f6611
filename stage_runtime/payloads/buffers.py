"""The address of a buffer, and a copy of it. Used by `payloads` and by every relay."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

NOGIL_NBYTES: Final = 64 << 10  # below, a copy is over before another thread could have used the GIL
LARGE_NBYTES: Final = 16 << 20  # from half the last-level cache on, the offset between a copy and its source matters
PAGE: Final = 4096


def view(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a flat array of bytes."""
    return memoryview(array)  # type: ignore[arg-type]  # numpy's annotations make it a Buffer from Python 3.12 on


def copied(part: memoryview) -> memoryview:
    """The same bytes in memory of their own. Long copies run without the GIL, half a page beside their source: see
    `arena`.
    """
    nbytes = len(part)
    if nbytes < NOGIL_NBYTES:
        return memoryview(bytes(part))
    shift = 0
    room: np.ndarray[Any, Any] = np.empty(nbytes + (PAGE if nbytes >= LARGE_NBYTES else 0), np.uint8)
    if nbytes >= LARGE_NBYTES:
        shift = (address(part) + PAGE // 2 - address(view(room))) % PAGE
    room = room[shift : shift + nbytes]
    room[:] = np.frombuffer(part, np.uint8)
    return view(room)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0
