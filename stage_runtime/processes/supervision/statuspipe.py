"""Events of a child process to its supervisor, one JSON line each over an inherited pipe.

Here: the events, and both ends' encoding. Not here: what a supervisor does about them (`supervisor`). Called by
`stage_process` and `coordinator_process` with ``settings.status_fd``; read by `children`. A process started by hand has
no pipe (``fd`` None); its log has the same events.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios
import threading

import msgspec

from omnipipeline_spec import crashes
from stage_runtime.errors import UNDECODABLE, ConfigurationError, format_traceback, safe_str

MAX_TRACEBACK = 48_000  # bytes; below the pipe's 64 KiB: a child that dies can report why, even if it is not read
# Several loader threads report, and a line longer than PIPE_BUF is not atomic by itself. Reentrant, because a signal's
# handler may report while the thread it interrupts does.
_lock = threading.RLock()


class StatusEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower, omit_defaults=True):
    """Base of the events."""


class Loading(StatusEvent, frozen=True, kw_only=True):
    """A stage is being made; ``message`` is its progress. Each one is proof of progress."""

    stage: str
    message: str = ""
    done: float = 0.0
    total: float = 0.0  #: 0: not known.
    unit: str = ""  #: ``B``: bytes.


class Loaded(StatusEvent, frozen=True, kw_only=True):
    """All stages are made and warmed up."""


class Registered(StatusEvent, frozen=True, kw_only=True):
    """A coordinator has registered this incarnation for the first time."""


class Serving(StatusEvent, frozen=True, kw_only=True):
    """A coordinator answers HTTP at ``url``."""

    url: str


class StartFailed(StatusEvent, frozen=True, kw_only=True):
    """A factory or the configuration raised; the process ends with exit code 1 after this."""

    stage: str = ""  #: Empty when no stage has caused it.
    error: str  #: One line.
    traceback: str = ""


class Draining(StatusEvent, frozen=True, kw_only=True):
    """No new work is taken; the process ends with exit code 0 when nothing is bound to it."""


class Stats(StatusEvent, frozen=True, kw_only=True):
    """The numbers of the process's planes (`metrics.planes`), about once a second. No proof of progress."""

    gauges: dict[str, float]


Status = Loading | Loaded | Registered | Serving | StartFailed | Draining | Stats
_decoder: msgspec.json.Decoder[Status] = msgspec.json.Decoder(Status)


def failed(error: BaseException, *, stage: str = "") -> StartFailed:
    """The event for an exception, with its traceback (the end of it when it is very long).

    An error of the configuration is one line: a traceback of the runtime would not help.
    """
    if isinstance(error, ConfigurationError):
        return StartFailed(stage=stage, error=_line(safe_str(error)))
    return StartFailed(stage=stage, error=_line(crashes.raised(error)), traceback=_end(format_traceback(error)))


def _line(text: str) -> str:
    return safe_str(text.split("\n", 1)[0], limit=1000)


def _end(text: str) -> str:
    """The longest end that has at most `MAX_TRACEBACK` bytes in JSON, about."""
    text = text[-MAX_TRACEBACK:]
    while len(msgspec.json.encode(text)) > MAX_TRACEBACK:
        text = text[-(-len(text) // 8) :]
    return text


def report(fd: int | None, event: Status) -> None:
    """Send ``event``; from any thread. Nothing happens without a pipe, or when its other end is closed."""
    if fd is None:
        return
    line = memoryview(msgspec.json.encode(event) + b"\n")
    with _lock:
        try:
            while line:
                line = line[os.write(fd, line) :]
        except BrokenPipeError:
            pass  # the supervisor is gone, and the kernel is about to signal it (PDEATHSIG)


def report_stats(fd: int | None, gauges: dict[str, float]) -> None:
    """Report ``gauges`` unless earlier lines are still unread: they must never fill the pipe, which would block."""
    if fd is not None and not _unread(fd):
        report(fd, Stats(gauges=gauges))


def _unread(fd: int) -> int:
    """Bytes in the pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def parse(line: bytes) -> Status | None:
    """One line, or None when it is not an event: user code may have inherited the pipe and written to it."""
    try:
        return _decoder.decode(line)
    except UNDECODABLE:
        return None
