"""Memory that is free goes back to the system, and the collector leaves out what is there to stay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

#: Blocks as the texts of pages are, each with a small one after it in glibc's heap; then the large ones go.
FILL_AND_EMPTY = """
import gc
from pathlib import Path
from omnipipeline_operator.handlers import free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def filled(large):
    pairs = [(b"x" * large, b"x" * 20_000) for _ in range((64 << 20) // large)]
    return [small for _, small in pairs]

"""


def printed(program: str) -> Sequence[int]:
    done = subprocess.run([sys.executable, "-c", FILL_AND_EMPTY + program], stdout=subprocess.PIPE, check=True)
    return [int(each) for each in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_large_blocks_that_are_freed_leave_nothing_behind() -> None:
    [grown] = printed(
        """
free_memory.bound()
b"x" * (8 << 20)  # glibc would put all smaller ones into its heap from now on
before = resident()
kept = filled(1 << 20)
print(resident() - before)
"""
    )
    assert grown <= 8, "MiB of 64"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_holes_of_small_blocks_are_given_back() -> None:
    holes, left = printed(
        """
free_memory.bound()
before = resident()
kept = filled(64 << 10)
print(resident() - before)
free_memory.give_back()
print(resident() - before)
"""
    )
    assert holes >= 48 and left <= 24, "MiB of 64"


def test_what_is_there_to_stay_is_left_out_of_collections() -> None:
    [newer] = printed(
        """
store = [[number] for number in range(100_000)]
free_memory.keep_out_of_collections()
print(len(gc.get_objects(generation=2)))
"""
    )
    assert newer < 1000
