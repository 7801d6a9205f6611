"""Raw memory: where a buffer lies, regions of a mapping whose last view's death can be seen, pages made ready or
given back.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final

import numpy as np

MFD_NOEXEC_SEAL: Final = 0x0008  # Linux 6.3; without it some systems refuse or warn
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
NOGIL_NBYTES: Final = 64 << 10  # below, a copy is over before another thread could have used the GIL
PAGE: Final = 4096


def region(mapping: mmap.mmap, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
    """``nbytes`` of ``mapping`` as an object that all views of it keep alive: weak references to it see them die.

    Its base must be the mapping itself and no array: numpy's views skip bases of their own kind.
    """
    return np.ndarray((nbytes,), np.uint8, mapping, offset)


def view(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a flat array of bytes."""
    return memoryview(array)  # type: ignore[arg-type]  # numpy says that it is a Buffer from Python 3.12 on


def fresh(nbytes: int) -> np.ndarray[Any, Any]:
    """As `region`, of memory of its own that begins at a page."""
    return region(mmap.mmap(-1, max(nbytes, 1)), 0, nbytes)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


def populate(mapping: mmap.mmap, nbytes: int) -> None:
    """Fault the first ``nbytes`` in now, so that no transfer has to."""
    nbytes -= nbytes % PAGE
    if not nbytes:
        return
    try:
        mapping.madvise(MADV_POPULATE_WRITE, 0, nbytes)
    except OSError:
        pages: np.ndarray[Any, Any] = np.frombuffer(mapping, np.uint8, nbytes)[::PAGE]
        pages |= 0  # a write that changes nothing


def give_back() -> None:
    """Return the allocator's free pages to the system; milliseconds. Does nothing where libc is not glibc.

    Values of a mebibyte leave glibc's heaps full of holes that it keeps: 480 MiB were seen, with nothing in them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
