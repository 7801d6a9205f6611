"""Takes the events of one process.

Here: `emit`, `span`, the active stage. Not here: files (`writing`), when a profile starts and stops (`session`), what
is made of the files (`views`). Callers of `emit` are hot paths: inactive it costs one test of an attribute; active it
appends to a bounded queue and wakes no thread: the writer looks every `FLUSH_EVERY_S`. No failure here reaches a
caller.
"""

from __future__ import annotations

import contextvars
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from stage_runtime.errors import ConfigurationError
from stage_runtime.profiler import events
from stage_runtime.profiler.recording import summaries
from stage_runtime.profiler.recording.templates import Template, TemplateNote
from stage_runtime.profiler.recording.writing import MAX_BYTES, MAX_QUEUED, EventLine, RunWriter

log = logging.getLogger(__name__)

STOP_S: Final = 60.0  # that a stop waits for the writer, which makes a million lines in four seconds

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")
_now = time.time_ns
_summarised = summaries.summarised


class Traces(Protocol):
    """Takes authors' spans for OpenTelemetry. Implemented by `telemetry.authors`."""

    def working(self, request_id: str, stage: str, traceparent: str | None) -> None: ...

    def begin(
        self, name: str, request_id: str, stage: str, metadata: Mapping[str, Any]
    ) -> Callable[[BaseException | None], None] | None: ...


class Recorder:
    """The recorder of one process. Stages of one process share its file."""

    def __init__(self) -> None:
        self.active = False  #: A run is recorded; hot paths ask this before they gather metadata.
        self.traces: Traces | None = None  #: The place where the process sends authors' spans, recorded or not.
        self.missing = ""  #: The loss of the run that was stopped last: what the disk did not take, and why.
        self._run: RunWriter | None = None
        self._notes: deque[TemplateNote] = deque(maxlen=0)  #: Notes of the run; without one it keeps nothing.
        self._lock = threading.Lock()  #: Held to start and stop only.

    @property
    def run_id(self) -> str | None:
        """The run that is recorded now."""
        run = self._run
        return None if run is None else run.run_id

    @property
    def path(self) -> Path | None:
        run = self._run
        return None if run is None else run.path

    def start(
        self,
        run_id: str,
        folder: Path,
        stage: str,
        *,
        facts: Mapping[str, Any] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> Path:
        """Record under this run. The first stage of a process to start names the file; the others join it.

        facts: about the process, for the file's first line.
        Raises: ConfigurationError: another run is recorded, or the file cannot be written.
        """
        with self._lock:
            if self._run is not None:
                if self._run.run_id == run_id:
                    return self._run.path
                raise ConfigurationError(f"run {self._run.run_id!r} is recorded already: stop it first")
            path = folder / f"events_{_UNSAFE.sub('_', stage)}_{os.getpid()}.jsonl"
            run = RunWriter(run_id, path, max_bytes)
            started = {"host": socket.gethostname(), **(facts or {})}
            run.lines.append(run.line(events.RECORDER_STARTED, "", stage, _now(), _summarised(started)))
            try:
                run.start()
            except OSError as error:
                raise ConfigurationError(f"{path}: {error.strerror or error}") from error
            self._run = run
            self._notes = run.notes
            self.active = True
            return path

    def stop(self, run_id: str | None = None, *, why: str = "asked to") -> Path | None:
        """Close the file. None: stop whatever is recorded. Returns None when that run is not recorded here."""
        with self._lock:
            run = self._run
            if run is None or run_id not in (None, run.run_id):
                return None
            self.active = False
            self._run = None
            self._notes = deque(maxlen=0)
            run.stop(why, STOP_S)
            self.missing = run.missing
            return run.path

    def emit(
        self,
        event: str,
        request_id: str,
        stage: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        timestamp_ns: int | None = None,
    ) -> None:
        """Record one event. Never raises; does nothing while no run is recorded."""
        run = self._run
        if run is None:
            return
        now = _now() if timestamp_ns is None else timestamp_ns
        if len(run.lines) >= MAX_QUEUED:
            run.refused += 1
            return
        given = _summarised(metadata) if metadata else {}
        run.lines.append(run.line(event, request_id, stage or active_stage() or "", now, given))

    def record(self, event: str, request_id: str, stage: str, metadata: Mapping[str, Any]) -> None:
        """The same as `emit`, for the runtime's events: their metadata is small, plain, and not changed afterwards."""
        run = self._run
        if run is None:
            return
        if len(run.lines) >= MAX_QUEUED:
            run.refused += 1
            return
        run.lines.append(EventLine(request_id, stage, event, _now(), run.run_id, run.pid, metadata))

    def note(self, template: Template, request_id: str, attempt: int, number: int = 0, time_ns: int = 0) -> None:
        """Record the events of a template, at this moment or at ``time_ns``."""
        notes = self._notes
        if len(notes) < MAX_QUEUED:
            notes.append((template.id, request_id, time_ns or _now(), attempt, number))
        elif (run := self._run) is not None:
            run.refused += len(template)


#: This process's recorder.
recorder: Final = Recorder()

_by_task: contextvars.ContextVar[str | None] = contextvars.ContextVar("omni_active_stage", default=None)
_by_thread = threading.local()


class ActiveStage(msgspec.Struct, frozen=True):
    """The stage that `set_active_stage` replaced."""

    thread: str | None
    task: contextvars.Token[str | None]


def active_stage() -> str | None:
    """The stage that this task or thread works for."""
    return _by_task.get() or getattr(_by_thread, "stage", None)


def set_active_stage(stage: str) -> ActiveStage:
    """Events of this thread, and of tasks and executor calls that copy its context, belong to ``stage``."""
    before = getattr(_by_thread, "stage", None)
    _by_thread.stage = stage
    return ActiveStage(before, _by_task.set(stage))


def reset_active_stage(token: ActiveStage | None) -> None:
    """Undo `set_active_stage`. None: forget both bindings."""
    if token is None:
        _by_thread.stage = None
        _by_task.set(None)
        return
    _by_thread.stage = token.thread
    try:
        _by_task.reset(token.task)
    except ValueError:  # set in another context, which keeps its own
        _by_task.set(token.thread)


def emit(event: str, request_id: str, /, stage: str | None = None, **metadata: Any) -> None:
    """Record one event of a request; does nothing while no profile is recorded.

    event:    lowercase, with the layer that owns it as prefix: ``encoder_start``.
    stage:    None: the active stage of this task or thread.
    metadata: small scalars. Tensors and arrays are recorded as shape, dtype and device.
    """
    if recorder.active:
        recorder.emit(event, request_id, stage, metadata)


@contextmanager
def span(name: str, request_id: str, /, stage: str | None = None, **metadata: Any) -> Iterator[None]:
    """Record ``<name>_start`` and ``<name>_end`` around a block. OpenTelemetry adds a span of the request's trace."""
    if not recorder.active and recorder.traces is None:
        yield
        return
    own = {**metadata, "span_id": f"{threading.get_ident():x}-{time.monotonic_ns():x}"}
    recorder.emit(f"{name}_start", request_id, stage, own)
    end = _traced(name, request_id, stage, metadata)
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        own, failed = {**own, "error": type(error).__name__}, error
        raise
    finally:
        if end is not None:
            with suppress(Exception):
                end(failed)
        recorder.emit(f"{name}_end", request_id, stage, own)


def _traced(
    name: str, request_id: str, stage: str | None, metadata: Mapping[str, Any]
) -> Callable[[BaseException | None], None] | None:
    if recorder.traces is None:
        return None
    try:
        return recorder.traces.begin(str(name), request_id, stage or active_stage() or "", _summarised(metadata))
    except Exception as error:  # an author's request id that is not one
        log.debug("a span is not traced", exc_info=error)
        return None
