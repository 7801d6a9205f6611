"""Ends a program whose role is over, though its authors' code has left threads, calls or child processes that go on.

The interpreter waits for them without a bound when it ends. It also looks for garbage among all objects of all imported
packages, several times: 1.4 s of processor time with transformers. Called by the programs that run authors' code:
`__main__` and the engine process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import time
from typing import Final, NoReturn

from stage_runtime import diagnostics

DRAINED_S: Final = 5.0  # for threads of authors to finish what they write, after a role that ended in order
FAILED_S: Final = 1.0  # after one that failed: people wait for the reason
#: The deadline without the GIL, which a thread may hold, and whatever holds the lock of an output. The exit code is
#: then 1.
FORCED_S: Final = 10.0
_BUFFERED: Final = frozenset({io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom})


def prepare() -> None:
    """Have the interpreter look for garbage once when it ends. Objects of modules stay; files are written.

    The program calls this first: exit handlers run in the reverse order, so this one runs after all others.
    """
    atexit.register(_look_once)


def _look_once() -> None:
    for one in gc.get_objects():
        if type(one) in _BUFFERED:
            with contextlib.suppress(Exception):
                one.flush()
    gc.collect()
    gc.freeze()


def exit_soon(code: int) -> None:
    """Exit with ``code`` in a few seconds, if the program has not ended by then; the log gets all stacks.

    Call it when nothing is left to do but to return from the main module.
    """
    diagnostics.end_later(FORCED_S)
    within_s = FAILED_S if code else DRAINED_S
    try:
        threading.Thread(target=_exit_within, args=(code, within_s), name="exit", daemon=True).start()
    except RuntimeError:  # the limit of threads: no time can be given
        _exit(code)


def _exit_within(code: int, within_s: float) -> NoReturn:
    time.sleep(within_s)
    left = "threads or child processes of the stages' code did not end"
    diagnostics.write_line(f"exiting with code {code}: {left} within {within_s:g} s")
    diagnostics.print_stacks()
    _exit(code)


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
