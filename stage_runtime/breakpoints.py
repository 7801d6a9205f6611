"""The effect of ``breakpoint()`` in a process of a pipeline: nothing has a terminal there, but with `omni up --debug`.

`processes.starting.launching` names `stop` in PYTHONBREAKPOINT. The debugged process has the terminal's descriptors; in
all others the line is logged and passed. Not here: which process that is (`processes.one_machine.launcher`).
"""

from __future__ import annotations

import logging
import os
import sys
from types import FrameType
from typing import Any, Final

TERMINAL: Final = "OMNI_TERMINAL"  # descriptors of the terminal, ``in,out``
HOOK: Final = f"{__name__}.stop"
#: How long a request, and a stage without progress, may take where somebody looks at it: a week.
PATIENCE_S: Final = 7 * 24 * 3600

log = logging.getLogger(__name__)
_passed: set[tuple[str, int]] = set()  #: Lines that the log has.


def stop(*_: Any, **__: Any) -> None:
    """Debug the caller on the terminal that this process was given; without one, log the line once and go on."""
    caller = sys._getframe(1)
    terminal = os.environ.get(TERMINAL)
    if terminal is None:
        _pass(caller)
        return
    from stage_runtime.debugger import Debugger

    reads, writes = map(int, terminal.split(","))
    Debugger(reads, writes).set_trace(caller)


def _pass(caller: FrameType) -> None:
    place = (caller.f_code.co_filename, caller.f_lineno)
    if place not in _passed:
        _passed.add(place)
        log.warning("%s:%d: breakpoint() is passed: `omni up --debug STAGE` stops there", *place)
