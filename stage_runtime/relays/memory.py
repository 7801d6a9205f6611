"""Raw memory: where a buffer lies, regions of a mapping whose last view's death can be seen, pages made ready or
given back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, Final

import numpy as np

MFD_NOEXEC_SEAL: Final = 0x0008  # Linux 6.3; without it some systems refuse or warn
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
NOGIL_NBYTES: Final = 64 << 10  # below, a copy is over before another thread could have used the GIL
LARGE_NBYTES: Final = 16 << 20  # from about half the last-level cache on, it matters how a copy lies to its source
PAGE: Final = 4096


MAP_FIXED: Final = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)


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


def remap(mapping_address: int, offset: int, nbytes: int, fd: int, *, private: bool) -> None:
    """Map ``nbytes`` at ``offset`` of a file anew where they are mapped already, whole pages.

    private: what is written there from now on is seen by this process alone; else by all who map the file.
    Raises:  OSError: the kernel takes no further mapping; nothing has changed.
    """
    flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | MAP_FIXED
    wanted = mapping_address + offset
    if _libc.mmap(wanted, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset) != wanted:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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
