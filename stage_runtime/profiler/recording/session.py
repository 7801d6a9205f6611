"""Profiles of one process: starts and stops its recorder and its torch trace, and hands out their files.

Here: one run at a time, its limits, where files are. Not here: who asks (`stage.control.process_profiling`,
`coordinator.questions.profile_runs`).
Every method blocks on files; callers run them on `ProfileSession.thread`, one after the other.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from stage_runtime.errors import ConfigurationError, describe
from stage_runtime.profiler import paths
from stage_runtime.profiler.recording import torch_trace
from stage_runtime.profiler.recording.children import Children, PathOf, children
from stage_runtime.profiler.recording.recorder import Recorder, recorder
from stage_runtime.profiler.recording.torch_trace import TorchTrace
from stage_runtime.profiler.recording.writing import notes_of

log = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
EXPORT_S: Final = 60.0  # of a torch trace; the process's grace period ends it earlier
PIECE: Final = 512 << 10  # bytes of a file in one message
RUNS_KEPT: Final = 200  # whose files a process remembers

STARTED: Final = "started"
STOPPED: Final = "stopped"
NOT_RECORDING: Final = "not recording"


class ProfileSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run. Paths are below the root of every process, and were checked against the sender's."""

    run_id: str
    event_dir: str
    torch_template: str | None = None
    config: Mapping[str, bool] = {}
    max_seconds: int = 0  #: 0: until it is stopped.


class ProfileSession:
    """The profile runs of one process."""

    def __init__(
        self,
        root: Path,
        stages: Sequence[str],
        *,
        incarnation: Callable[[], str],
        rank: int = 0,
        own_folder: bool = False,
        recorder: Recorder = recorder,
        monotonic: Callable[[], float] = time.monotonic,
        children: Children = children,
    ) -> None:
        """own_folder: this process's files are in a folder of their own: pods of one storage have equal process ids."""
        self.root = root
        self.stages = tuple(stages)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="profiles")
        self._incarnation = incarnation
        self._rank = rank
        self._own_folder = own_folder
        self._recorder = recorder
        self._monotonic = monotonic
        self._children = children
        self._trace: TorchTrace | None = None
        self._traced_run = ""
        self._files: dict[str, list[Path]] = {}  #: run id -> files of this process
        self._settings: ProfileSettings | None = None  #: Settings of the latest run.
        self._ends_at: float | None = None  #: Monotonic. When the run has lasted long enough.

    @property
    def recording(self) -> str | None:
        """The run that is recorded now."""
        return self._recorder.run_id

    def start(self, settings: ProfileSettings) -> dict[str, str]:
        """stage -> ``started`` or ``failed: why``. Another run that is recorded ends; the same one goes on."""
        try:
            paths.check_run_id(settings.run_id)
            paths.prepare_root(self.root)
            folder = paths.event_dir(self.root, settings.run_id, settings.event_dir)
            if self._recorder.run_id is not None and self._settings == _endless(settings):
                self._limit(settings)
                return self._each(STARTED)
            trace = self._new_trace(settings)
            self._rotate()
            folder /= self._own or ""
            facts = {"incarnation": self._incarnation(), "stages": list(self.stages), "rank": self._rank}
            file = self._recorder.start(settings.run_id, folder, self.stages[0], facts=facts)
        except ConfigurationError as error:
            return self._each(f"failed: {error}")
        self._remember(settings.run_id, file)
        self._settings = _endless(settings)
        self._limit(settings)
        if trace is not None:
            try:
                trace.start()
            except ConfigurationError as error:
                self._recorder.stop(settings.run_id, why="the torch trace did not start")
                return self._each(f"failed: {error}")
            self._trace, self._traced_run = trace, settings.run_id
            switches = torch_trace.switches(settings.config)
            self._children.start_traces(self._path_of_child(settings), switches)
        return self._each(STARTED)

    def stop(self, run_id: str | None = None, *, why: str = "asked to") -> dict[str, str]:
        """stage -> ``stopped``, ``not recording`` or ``failed: why``. None: whatever is recorded."""
        if self._recorder.run_id is None or run_id not in (None, self._recorder.run_id):
            return self._each(NOT_RECORDING)
        self._ends_at = None
        trace, self._trace = self._trace, None
        self._recorder.stop(run_id, why=why)
        if trace is not None:
            for path in self._children.stop_traces(EXPORT_S):
                self._remember(self._traced_run, path)
            try:
                trace.stop()
            except ConfigurationError as error:
                return self._each(f"failed: {error}")
            self._remember(self._traced_run, trace.path)
        return self._each(f"failed: {self._recorder.missing}" if self._recorder.missing else STOPPED)

    def expire(self) -> str | None:
        """Stop a run that was not stopped in time; called with each beat, in a coordinator once a second.

        Returns: the run that has ended by this.
        """
        run_id = self._recorder.run_id
        if run_id is None or self._ends_at is None or self._monotonic() < self._ends_at:
            return None
        log.warning("profile %s has reached its time limit and is stopped", run_id)
        for problem in {each for each in self.stop(why="its time is over").values() if each != STOPPED}:
            log.error("profile: %s", problem)
        return run_id

    def files(self, run_id: str) -> tuple[tuple[str, int], ...]:
        """(path, bytes) of this process's files of a run. While it is recorded, notes have a file of their own."""
        found = []
        for path in self._paths(run_id):
            try:
                found.append((str(path), path.stat().st_size))
            except OSError:  # it was never made, or was deleted meanwhile
                continue
        return tuple(found)

    def runs(self) -> tuple[str, ...]:
        return tuple(self._files)

    def read(self, run_id: str, path: str, offset: int) -> bytes:
        """Up to `PIECE` bytes of one of `files`; nothing at its end. Raises: ConfigurationError."""
        if not any(str(each) == path for each in self._paths(run_id)):
            raise ConfigurationError(f"run {run_id!r} has no file {path[:200]!r} here")
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                return file.read(PIECE)
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}") from error

    def close(self) -> None:
        """The process ends: what was recorded is written."""
        within_s = CLOSE_S if self._trace is None else EXPORT_S  # who ends the process next does not wait
        try:
            self.thread.submit(self.stop, why="the process ends").result(timeout=within_s)
        except Exception as error:  # the process ends whatever becomes of a profile
            log.error("profile: %s", describe(error))
        self.thread.shutdown(wait=False, cancel_futures=True)

    def _rotate(self) -> None:
        """End the run that is recorded, because another one starts."""
        run_id = self._recorder.run_id
        if run_id is None:
            return
        log.warning("profile %s ends, because another one starts", run_id)
        for problem in {each for each in self.stop(why="another run starts").values() if each != STOPPED}:
            log.error("profile: %s", problem)

    def _limit(self, settings: ProfileSettings) -> None:
        self._ends_at = self._monotonic() + settings.max_seconds if settings.max_seconds else None

    def _new_trace(self, settings: ProfileSettings) -> TorchTrace | None:
        if settings.torch_template is None:
            return None
        unknown = set(settings.config) - set(torch_trace.SWITCHES)
        if unknown:
            raise ConfigurationError(f"config: no such switch: {', '.join(sorted(unknown))[:200]}")
        return TorchTrace(self._trace_path(settings), torch_trace.switches(settings.config))

    def _trace_path(self, settings: ProfileSettings, **others: object) -> Path:
        """The file of this process, or with ``others`` of the placeholders' values of one that it has started."""
        facts = {
            "run_id": settings.run_id,
            "stage": self.stages[0],
            "pid": os.getpid(),
            "rank": self._rank,
            "host": socket.gethostname(),
            "incarnation": self._incarnation(),
            **others,
        }
        template = paths.check_template(self.root, settings.torch_template or "")
        return paths.trace_path(self.root, template, facts, self._own)

    def _path_of_child(self, settings: ProfileSettings) -> PathOf:
        """Engines of a stage have ranks of their own, from 0 on; a stage that has such processes has one rank."""
        return lambda rank, pid: self._trace_path(settings, rank=rank, pid=pid, stage=f"{self.stages[0]}-engine")

    @property
    def _own(self) -> str | None:
        """The folder of this process's files in those of a run."""
        return f"{socket.gethostname()}-{self._incarnation()}" if self._own_folder else None

    def _paths(self, run_id: str) -> list[Path]:
        return [path for known in self._files.get(run_id, ()) for path in (known, notes_of(known))]

    def _remember(self, run_id: str, path: Path) -> None:
        known = self._files.pop(run_id, [])
        self._files[run_id] = known if path in known else [*known, path]
        if len(self._files) > RUNS_KEPT:
            del self._files[next(iter(self._files))]

    def _each(self, state: str) -> dict[str, str]:
        return dict.fromkeys(self.stages, state)


def _endless(settings: ProfileSettings) -> ProfileSettings:
    """The part of a run's settings that does not depend on its length: what is recorded, and where."""
    return msgspec.structs.replace(settings, max_seconds=0)
