"""The output to which a process writes its stacks, its own log lines and its last words.

It is a duplicate of descriptor 2 as the process was started with. Authors' code may replace or close `sys.stderr` and
descriptor 2 at any time, for a noisy library for example: neither reaches this one. Called by `__main__`, `processes`
and the programs that run authors' code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os


@functools.cache
def descriptor() -> int:
    """Not inherited by programs that the process starts. It is called first, before any author's code runs."""
    try:
        return os.dup(2)
    except OSError:  # started without one
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def write(text: str) -> None:
    """Write lines whole, at once. Raises: OSError."""
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        left = left[os.write(descriptor(), left) :]


def write_line(line: str) -> None:
    """Write a line; no effect when the descriptor has no reader."""
    with contextlib.suppress(OSError):
        write(line + "\n")


def enable() -> None:
    """Has a crash print the stacks of all threads, from now on."""
    faulthandler.enable(file=descriptor())


def print_stacks() -> None:
    """Print the stacks of all threads now."""
    faulthandler.dump_traceback(file=descriptor())


def end_later(after_s: float) -> None:
    """Print the stacks of all threads and exit with code 1 after ``after_s`` seconds, unless this is called again or
    `cancel_end` before. C code does so, whatever keeps the GIL.
    """
    with contextlib.suppress(RuntimeError):  # the limit of threads
        faulthandler.dump_traceback_later(after_s, exit=True, file=descriptor())


def cancel_end() -> None:
    faulthandler.cancel_dump_traceback_later()
