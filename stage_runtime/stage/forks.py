"""Processes that a stage's function or factory has forked, and that come back to the runtime as if they were the stage.

They have none of its threads, so that nothing they give could be sent, and they would wait for requests for ever, with
the memory of its models. Called by `stage` and `outputs.stage_output`. Not here: children that end by themselves, as
those of multiprocessing and subprocess do.
"""

from __future__ import annotations

import functools
import os
from typing import NoReturn

from stage_runtime import diagnostics
from stage_runtime.errors import describe, format_traceback

#: Whether this process is such a one. Read before each use: `os.fork` sets it.
in_child = False


@functools.cache
def watch() -> None:
    """Have children that are forked from now on know it: this process runs stages."""
    os.register_at_fork(after_in_child=_mark)


def end(stage: str, error: BaseException | None) -> NoReturn:
    """End this process, with 1 for an error, as Python ends a program; exit handlers are its parent's."""
    if error is not None:
        diagnostics.write_line(
            f"a process that the stage {stage} has forked ends: {describe(error)}\n{format_traceback(error).rstrip()}"
        )
    os._exit(0 if error is None else 1)


def _mark() -> None:
    global in_child
    in_child = True
