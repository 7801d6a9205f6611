"""Loops compiled by numba for this processor, run on torch's own threads.

A loop is divided into parts. Each thread takes the next part until none is left, so a thread that another process
delays holds up one part, not the whole loop. libgomp's threads, which torch has started for its own operators, run it:
a second pool would compete with theirs, since they spin for a while after each operator.

numba is an optional dependency (extra ``numba``): `available` says whether it is there.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

log = logging.getLogger(__name__)

DTYPES: Final = (torch.float32, torch.bfloat16)
PARTS: Final = 4  # for each thread: more balance better, fewer cost less
Call = Callable[[int, int], None]


@functools.cache
def available() -> bool:
    """Whether numba is installed and compiles on this machine."""
    try:
        import numba

        numba.cfunc(numba.types.void(numba.types.voidptr))(_nothing)
    except ImportError:
        return False
    except Exception as error:  # of LLVM, or of a broken installation: torch's operators do instead
        log.warning("numba %s cannot compile here: %s", numba.__version__, error)
        return False
    log.debug("loops are compiled by numba %s", numba.__version__)
    return True


def _nothing(data: int) -> None:
    return


@functools.cache
def _gomp_parallel() -> Any:
    """libgomp's entry for parallel regions, of the copy that torch uses; None: this torch has another pool."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libgomp.so.1"))
        found = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    found.restype = None
    return found


class Loop:
    """A compiled loop: ``kernel(data)``, where data are 64-bit words: next part, number of parts, then arguments."""

    def __init__(self, address: int, keeps: Any) -> None:
        """keeps: what holds the machine code."""
        self._keeps = keeps
        self._address = address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        self._parallel = _gomp_parallel()

    def __call__(self, parts: int, *arguments: int) -> None:
        data = (ctypes.c_int64 * (len(arguments) + 2))(0, parts, *arguments)
        threads = min(parts, torch.get_num_threads())
        if threads > 1 and self._parallel is not None:
            self._parallel(self._address, ctypes.addressof(data), threads, 0)
        else:
            self._alone(ctypes.addressof(data))


def bits(value: float) -> int:
    """A float as an argument of a loop."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def parts_for(work: int, least: int) -> int:
    """How many parts ``work`` is divided into, when a part of less than ``least`` is not worth a thread."""
    return max(1, min(work // least, PARTS * torch.get_num_threads()))
