"""Pages of memory: regions of a mapping whose last view's death can be seen, pages made ready or given back."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, Final

import numpy as np

from stage_runtime.payloads.buffers import PAGE

MFD_NOEXEC_SEAL: Final = 0x0008  # Linux 6.3; without it some systems refuse or warn
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14


MAP_FIXED: Final = 0x10
M_ARENA_MAX: Final = -8
HEAPS: Final = 4  # threads that compute allocate under the GIL mostly, one at a time

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)


def region(mapping: mmap.mmap, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
    """``nbytes`` of ``mapping`` as an object that all views of it keep alive: weak references to it see them die.

    Its base must be the mapping itself and no array: numpy's views skip bases of their own kind.
    """
    return np.ndarray((nbytes,), np.uint8, mapping, offset)


def fresh(nbytes: int) -> np.ndarray[Any, Any]:
    """A `region` of a new mapping, so that it begins at a page."""
    return region(mmap.mmap(-1, max(nbytes, 1)), 0, nbytes)


def remap(mapping_address: int, offset: int, nbytes: int, fd: int, *, private: bool) -> None:
    """Map ``nbytes`` at ``offset`` of a file anew where they are mapped already, whole pages.

    private: what is written there from now on is seen by this process alone; else by all who map the file.
    Raises:  OSError: the kernel takes no further mapping; nothing has changed.
    """
    flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | MAP_FIXED
    wanted = mapping_address + offset
    if _libc.mmap(wanted, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset) != wanted:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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


def limit_heaps() -> None:
    """Have glibc share a few heaps among all threads. Called before any is started; does nothing without glibc.

    It makes up to eight for each processor, and keeps the free end of each of them, twice the largest block of several
    MiB that was ever freed: `give_back` does not reach it. A process with 16 heaps kept 120 MiB, with 9 MiB in use.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, HEAPS)


def give_back() -> None:
    """Return the allocator's free pages to the system; milliseconds. Does nothing where libc is not glibc.

    Values of a mebibyte leave glibc's heaps full of holes that it keeps: 480 MiB were seen, with nothing in them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
