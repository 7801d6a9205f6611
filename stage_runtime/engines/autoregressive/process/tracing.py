"""The torch trace of an engine process, by utilities that the stage's process calls.

A thread of its own starts and exports it, since both take long and torch wants them on one thread: steps go on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from stage_runtime.errors import describe
from stage_runtime.profiler.recording.torch_trace import TorchTrace

log = logging.getLogger(__name__)


class EngineTrace:
    """One trace at a time; another start ends it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trace")
        self._trace: TorchTrace | None = None

    @property
    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        """Each gives a future, whose end is the answer."""
        return {
            "start_torch_trace": lambda _core, path, switches: self.start(path, switches),
            "stop_torch_trace": lambda _core: self.stop(),
        }

    def start(self, path: Any, switches: Any) -> Future[None]:
        """path: of the file. switches: those of `torch_trace.SWITCHES`. Raises: msgspec.ValidationError."""
        trace = TorchTrace(Path(msgspec.convert(path, str)), msgspec.convert(switches, dict[str, bool]))
        return self._thread.submit(self._start, trace)

    def stop(self) -> Future[str | None]:
        """The name of the file, which is written then; None: no trace was running. Raises there: ConfigurationError."""
        return self._thread.submit(self._stop)

    def close(self, within_s: float = 60.0) -> None:
        """The process ends: write what is recorded, unless that takes longer than ``within_s``."""
        with contextlib.suppress(TimeoutError):
            if error := self.stop().exception(timeout=within_s):
                log.error("the torch trace is lost: %s", describe(error))

    def _start(self, trace: TorchTrace) -> None:
        self._stop()
        trace.start()
        self._trace = trace

    def _stop(self) -> str | None:
        trace, self._trace = self._trace, None
        if trace is None:
            return None
        trace.stop()
        return trace.path.name
