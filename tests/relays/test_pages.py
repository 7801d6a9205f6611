"""`relays.pages`: what the C library keeps of freed memory, counted in page faults of a fresh process."""

from __future__ import annotations

import subprocess
import sys

from stage_runtime.payloads.buffers import PAGE

PAYLOADS, NBYTES, ROUNDS = 64, 64 << 10, 50

#: Frees as many payloads as may be under way together, again and again, in a thread as engines have.
FAULTS = f"""
import resource, threading
from stage_runtime.relays import pages

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def work():
    def once():
        held = [bytearray({NBYTES}) for _ in range({PAYLOADS})]
        for one in held:
            one[::{PAGE}] = bytes(len(one) // {PAGE})
    once()
    before = faults()
    for _ in range({ROUNDS}):
        once()
    print(faults() - before)

thread = threading.Thread(target=work)
pages.keep_freed()
thread.start()
thread.join()
"""


def test_pages_of_freed_payloads_are_used_again_without_a_fault() -> None:
    """Without `pages.keep_freed` each round faults nearly all of its pages in."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < PAYLOADS * NBYTES // PAGE  # of one round
