"""`relays.memory.pages`: what the C library keeps of freed memory, as glibc reports it of a fresh process."""

from __future__ import annotations

import subprocess
import sys

from stage_runtime.relays.memory import pages

#: Threads that allocate while all the others live, each in a heap of its own where it may have one.
HEAPS = """
import ctypes, threading
from stage_runtime.relays.memory import pages

pages.limit_heaps()
all_there = threading.Barrier(64)

def work():
    held = ctypes.create_string_buffer(4096)
    all_there.wait()

threads = [threading.Thread(target=work) for _ in range(64)]
for one in threads:
    one.start()
for one in threads:
    one.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


def test_many_threads_share_a_few_heaps() -> None:
    done = subprocess.run([sys.executable, "-c", HEAPS], capture_output=True, text=True, check=True)
    assert 1 <= done.stdout.count("<heap nr=") <= pages.HEAPS
