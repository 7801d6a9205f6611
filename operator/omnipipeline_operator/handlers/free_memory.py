"""The process's free memory: what glibc and Python's collector keep is bounded, and what a list leaves is given back.

Here: settings of both for a process that holds thousands of parsed objects. Not here: which objects are kept
(`cluster.store`). Called by `cli` at the start, and by `lifecycle` after each complete list.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

#: Thresholds of `gc`. The store's objects are trees and need no collector; only kopf's views of an object are a cycle,
#: of 40 small objects an event. The collector walked the whole store so often with Python's third threshold that it
#: took a quarter of all processor time; a single collection took 60 to 160 ms with a first one of 50,000.
COLLECTING: Final = (5_000, 20, 20)
M_MMAP_THRESHOLD: Final = -3  # of mallopt
#: glibc raises its own threshold to the largest block that was freed, the text of a page. Such blocks then lie in its
#: heap, whose end is not given back.
SEPARATE_BYTES: Final = 128 * 1024

_libc = ctypes.CDLL(None)


def bound() -> None:
    """Set when memory is collected and where large blocks lie. Called before the first request."""
    gc.set_threshold(*COLLECTING)
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:  # it is glibc
        mallopt(M_MMAP_THRESHOLD, SEPARATE_BYTES)


def give_back() -> None:
    """Return glibc's free pages to the system; milliseconds. Does nothing without glibc."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_out_of_collections() -> None:
    """Have the collector never look at what is in memory now: modules, and the store of the first list.

    It is called once. A cycle among what is there stays for good, so another call might keep what ends later.
    """
    gc.collect()
    gc.freeze()
