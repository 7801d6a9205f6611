"""One child process: started, listened to, signalled, reaped.

Here: pipes, process groups and exit codes of one operating-system process. Not here: whether it is started again
(`instances`), what its events mean (`statuspipe`). Called by `instances`. Linux only (pidfd, PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from omnipipeline_spec import crashes
from stage_runtime.processes.supervision import parent_death, reaper, statuspipe

TAIL_LINES = 60  # of output, kept to explain a death: a traceback with some context
RECENT_S = 60.0  # a program prints why it ends, then ends: what it printed long before explains nothing
FATAL_LINES = 1000  # of a crash's stacks, until that of the thread which crashed
LINES_BEFORE = 4  # of the output, which may contain why a program aborts itself
MAX_LINE = 1 << 18
LAST_LOOKS_S = 0.5  # for what a dead process has left in sessions of their own; the event loop waits meanwhile
MAX_LAST_WORDS = 16 << 20  # read from a dead child's pipes at most: another process may still write into them

_WENT_WELL = re.compile(
    r"\d\d:\d\d:\d\d (?:INFO|DEBUG) "
)  #: The beginning of a record in the form of `processes.logs`.

log = logging.getLogger(__name__)


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start, and the events that it must send before it counts as ready."""

    name: str  #: The name of the process, for people: ``voice``, ``voice.1`` (a replica), ``talker_tp1``.
    argv: tuple[str, ...]
    env: dict[str, str]
    awaits: frozenset[type[statuspipe.StatusEvent]] = frozenset({statuspipe.Loaded})
    inherits: tuple[int, ...] = ()  #: Descriptors of ours that it has, too, under the same numbers.


class Child:
    """A running process in a session of its own, so that a terminal's ^C reaches it through us alone."""

    def __init__(
        self, command: Command, *, on_event: Callable[[Child], None], on_line: Callable[[str, str], None]
    ) -> None:
        self.command = command
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._printed_at: deque[float] = deque(maxlen=TAIL_LINES)  #: The time of each line of `tail`.
        #: Lines from which a crash begins: stacks of many threads are longer than the tail.
        self._fatal: list[str] = []
        self.events: list[statuspipe.Status] = []  #: Newest last; of `Loading` only the newest is kept.
        self.failure: statuspipe.StartFailed | None = None
        self.failed_at = math.inf  #: Monotonic time of `failure`.
        self.gauges: dict[str, float] = {}  #: The gauges of its last `statuspipe.Stats`.
        self.last_sign = time.monotonic()  #: When it last sent an event or printed a line.
        self._on_event, self._on_line = on_event, on_line
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()  #: Exit code; -n when killed by signal n.
        self._ended_at: float | None = None
        self._life = secrets.token_hex(8)
        with contextlib.ExitStack() as undoing:
            status_end, output_end = self._start(undoing)
            self._pidfd = os.pidfd_open(self.pid)
            undoing.callback(os.close, self._pidfd)
            self._loop.add_reader(self._pidfd, self._ended)
            undoing.callback(self._loop.remove_reader, self._pidfd)
            self._status = _Lines(self._loop, status_end, self._take_status)
            undoing.callback(self._loop.remove_reader, status_end)
            self._output = _Lines(self._loop, output_end, self._take_output)
            undoing.pop_all()

    def _start(self, undoing: contextlib.ExitStack) -> tuple[int, int]:
        """Start it. Returns: our ends of its pipes. undoing: closes them and ends the process."""
        with contextlib.ExitStack() as theirs:
            status_end, status_theirs = _pipe(undoing, theirs)
            output_end, output_theirs = _pipe(undoing, theirs)
            shim = (sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()))
            self._process = subprocess.Popen(
                [*shim, *self.command.argv],
                env={**self.command.env, "OMNI_STATUS_FD": str(status_theirs), reaper.LIFE: self._life},
                stdin=subprocess.DEVNULL,
                stdout=output_theirs,
                stderr=output_theirs,
                pass_fds=(status_theirs, *self.command.inherits),
                start_new_session=True,
            )
            undoing.callback(self._process.wait)
            undoing.callback(self._kill_group)
        return status_end, output_end

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def was_ready(self) -> bool:
        """It has sent all events that its command awaits, even if it has failed since."""
        return self.command.awaits <= {type(event) for event in self.events}

    @property
    def ready(self) -> bool:
        """It has sent all events that its command awaits, and has not failed since."""
        return self.failure is None and self.was_ready

    @property
    def cause(self) -> str:
        """Why it ended, by its output alone; lines from long before its end are of something else, and so are records
        of what went well, once it served.
        """
        ended_at = time.monotonic() if self._ended_at is None else self._ended_at
        lines = recent(self.tail, self._printed_at, until=ended_at)
        if self.was_ready:
            lines = [line for line in lines if not _WENT_WELL.match(line)]
        return self.crash or crashes.cause("\n".join(lines))

    @property
    def crash(self) -> str:
        """The cause by the output of a fatal crash; empty where none is in it."""
        return crashes.cause("\n".join(self._fatal))

    def signal(self, number: int) -> None:
        """Send a signal to the process itself; a dead one is left alone."""
        if not self.exited.done():
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it and whatever it has started, now."""
        if not self.exited.done():
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _take_status(self, line: bytes) -> None:
        event = statuspipe.parse(line)
        if event is None:
            return
        if isinstance(event, statuspipe.Stats):
            self.gauges = event.gauges
            return
        self.last_sign = time.monotonic()
        if isinstance(event, statuspipe.StartFailed):
            self.failure, self.failed_at = self.failure or event, min(self.failed_at, self.last_sign)
        if isinstance(event, statuspipe.Loading):
            self.events = [other for other in self.events if not isinstance(other, statuspipe.Loading)]
        self.events.append(event)
        self._on_event(self)

    def _take_output(self, line: bytes) -> None:
        self.last_sign = time.monotonic()
        text = line.decode(errors="replace").rstrip()
        if crashes.is_fatal(text):
            self._fatal = list(self.tail)[-LINES_BEFORE:]
        if len(self._fatal) < FATAL_LINES and (self._fatal or crashes.is_fatal(text)):
            self._fatal.append(text[: crashes.MAX_LINE])
        self.tail.append(text)
        self._printed_at.append(self.last_sign)
        self._on_line(self.command.name, text)

    def _ended(self) -> None:
        # Not reaped yet, so its process group's number is still its own: what it left behind can be ended safely.
        self._ended_at = time.monotonic()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        try:
            self._kill_group()
            reaper.end(reaper.LIFE, self._life, looks=1, within_s=LAST_LOOKS_S)
            reaper.remove_sockets(self.command.env, self._life)
        finally:  # no descriptor may be left to look for them
            self._status.finish()
            self._output.finish()
            code = self._process.wait()
            if not self.exited.done():
                self.exited.set_result(code)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe's ends to read and to write, which those stacks close."""
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    theirs.callback(os.close, writing)
    return reading, writing


def recent(lines: Iterable[str], printed_at: Iterable[float], *, until: float) -> list[str]:
    """The lines that were printed in the last `RECENT_S` seconds."""
    return [line for line, at in zip(lines, printed_at, strict=True) if at >= until - RECENT_S]


class _Lines:
    """The reading end of a pipe, cut into lines."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, take: Callable[[bytes], None]) -> None:
        self._loop, self._fd, self._take = loop, fd, take
        self._rest = b""
        self._open = True
        self._failing = False  #: A line that could not be taken was logged; later ones are dropped in silence.
        os.set_blocking(fd, False)
        loop.add_reader(fd, self._read)

    def _read(self) -> int:
        """Take what is there; how much it was (0: nothing now, or nothing any more)."""
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return 0
        if not chunk:
            self._close()
            return 0
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._give(line)
        if len(self._rest) > MAX_LINE:  # or a progress bar that never ends its line
            self._give_rest()
        return len(chunk)

    def finish(self) -> None:
        """Take the last words of a process that has ended."""
        taken = 0
        while self._open and taken < MAX_LAST_WORDS and (got := self._read()):
            taken += got
        if self._rest:
            self._give_rest()
        self._close()

    def _give_rest(self) -> None:
        rest, self._rest = self._rest, b""
        self._give(rest)

    def _give(self, line: bytes) -> None:
        try:
            self._take(_visible(line))
        except Exception:  # outermost: a line that cannot be shown hides neither the next ones nor the process's end
            if not self._failing:
                self._failing = True
                log.exception("a line of a process is not taken (logged once): %.200r", line)

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)


def _visible(line: bytes) -> bytes:
    """The part of a line that a terminal would show, where a progress bar has written it over and over."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
