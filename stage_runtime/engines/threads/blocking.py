"""Names the call that blocks a stage's event loop: while it lasts, no other request of the stage proceeds.

Here: a thread beside the loop that reads its stack when the loop has not run for a second; where a task waits. Not
here: the loop (`loops`), the watchdog that ends a process without progress (`processes.stages.watchdog`). Called by
`loops`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback as tracebacks
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, cast

from stage_runtime.errors import is_ours

log = logging.getLogger(__name__)

TURN_S: Final = 0.5  # between two steps of a loop with requests, and between two checks: each wakes a thread
HELD_S: Final = 1.0  # a call that lasts longer is named
COMPUTES: Final = 0.1  # of a processor: far more than a frozen thread has, and what is left to one of many
_MOST: Final = 32  # functions that the log names: a reader needs no more of them
_STDLIB: Final = sysconfig.get_paths()["stdlib"]
_INSTALLED: Final = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})


class ClockReading(NamedTuple):
    """The clocks at one look, in seconds."""

    now: float  # monotonic
    computed: float  # processor time of the loop's thread so far
    runnable: bool = False  # whether that thread has, or waits for, a processor; where that can't be read, no


def is_blocked(before: ClockReading, last: ClockReading, turned: float, *, held_s: float, turn_s: float) -> bool:
    """Whether code on the loop's thread blocks the loop, by the last two looks and the time of its last turn.

    A thread that could not look in time was held up as well: by the loop's thread, if it is that which computed (and
    kept the GIL); otherwise the process was frozen, or another thread of it computed. A thread that does not compute
    although it could run waits for a processor: a busy machine holds it up, and no call.
    """
    waited = last.now - before.now
    late = waited > 2 * turn_s
    if (late or last.runnable) and last.computed - before.computed <= waited * COMPUTES:
        return False
    return last.now - turned > held_s + turn_s


class LoopWatch:
    """Watches the event loop of the thread that makes it."""

    def __init__(self, stage: str, *, busy: Callable[[], bool], held_s: float = HELD_S, turn_s: float = TURN_S) -> None:
        """busy: whether author's code may be running; nothing is looked at while it is not. Any thread."""
        self._stage = stage
        self._busy = busy
        self._held_s, self._turn_s = held_s, turn_s
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._state = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        self._turned = time.monotonic()
        self._named: set[tuple[str, str]] = set()
        self._begun = threading.Event()  #: Unset: no request ran at the last look, and none has begun since.
        self._begun.set()
        self._over = threading.Event()

    def begun(self) -> None:
        """A request has begun, and `busy` says so. It runs on the loop's thread."""
        if not self._begun.is_set():
            self._turned = time.monotonic()
            self._begun.set()

    def turned(self) -> None:
        """The loop turns. It runs on the loop's thread, every ``turn_s``."""
        self._turned = time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look as long as the body runs."""
        thread = threading.Thread(target=self._look, name=f"{self._stage} watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._begun.set()
            thread.join()

    def _look(self) -> None:
        last = self._reading()
        while not self._over.wait(self._turn_s):
            last, before = self._reading(), last
            if not self._busy():
                self._rest()
            elif is_blocked(before, last, self._turned, held_s=self._held_s, turn_s=self._turn_s):
                self._name()

    def _rest(self) -> None:
        """Wait until a request begins: a thread that looks at an idle loop costs as much as at a busy one."""
        self._begun.clear()
        if self._busy() or self._over.is_set():  # it began before the line above, or will not begin
            self._begun.set()
        self._begun.wait()

    def _reading(self) -> ClockReading:
        now = time.monotonic()
        late = now - self._turned > self._held_s  # else the loop is not blocked, whatever its thread does
        return ClockReading(now, time.clock_gettime(self._clock), late and self._runnable())

    def _runnable(self) -> bool:
        try:
            stat = self._state.read_bytes()  # of Linux: "tid (name) state …"
        except OSError:
            return False
        return stat.rpartition(b") ")[2].startswith(b"R")

    def _name(self) -> None:
        frame = sys._current_frames().get(self._thread)
        culprit = _culprit(frame)
        del frame  # it holds the values of a request
        if culprit is None or len(self._named) >= _MOST or (culprit.filename, culprit.name) in self._named:
            return
        self._named.add((culprit.filename, culprit.name))
        log.warning(
            "stage %s: %s (%s:%s) blocks the event loop for more than %.1f s, and all requests of the stage wait: %s. "
            "Await it, give it to asyncio.to_thread, or make the stage's function a plain one",
            self._stage,
            culprit.name,
            culprit.filename,
            culprit.lineno,
            self._held_s,
            culprit.line,
        )


def suspended_at(task: asyncio.Task[Any]) -> str:
    """``function (file:line)`` where a task waits: the author's innermost one; empty when it waits in no author's."""
    found, step = "", cast(Any, task.get_coro())
    while step is not None:
        kind = next((kind for kind in ("cr", "ag", "gi") if hasattr(step, f"{kind}_frame")), None)
        if kind is None:
            break
        frame, step = getattr(step, f"{kind}_frame"), getattr(step, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
        file = "" if frame is None else frame.f_code.co_filename
        if file and not is_ours(file) and not file.startswith(("<", *_INSTALLED, _STDLIB)):
            found = f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"
    return found


def _culprit(frame: FrameType | None) -> tracebacks.FrameSummary | None:
    """The author's innermost frame; of code that is installed, its first. None: the loop runs no author's code."""
    foreign = [one for one in tracebacks.extract_stack(frame) if not is_ours(one.filename)] if frame else []
    authors = [one for one in foreign if not one.filename.startswith(("<", *_INSTALLED, _STDLIB))]
    installed = [one for one in foreign if one.filename.startswith(_INSTALLED)]
    return authors[-1] if authors else installed[0] if installed else None
