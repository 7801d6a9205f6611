"""Torch traces of the processes that this one has started, as the engines of a stage (`own_process`) are.

Here: who has such processes, and waiting for all of them. Not here: a trace (`torch_trace`), the calls to the processes
(`engines.autoregressive.stage.traces`). `session` calls it from its thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from stage_runtime.errors import describe

log = logging.getLogger(__name__)

Found = TypeVar("Found")

START_S: Final = 30.0  # the first trace of a process imports and starts torch's profiler

#: (rank, pid) of a process -> where its trace belongs.
PathOf = Callable[[int, int], Path]


class Parent(Protocol):
    """A part of this process that has started others. Any thread may call it."""

    def start_traces(self, path_of: PathOf, switches: Mapping[str, bool]) -> Future[None]:
        """Begin a trace in each process."""

    def stop_traces(self) -> Future[list[Path]]:
        """End them. Returns: the files, which are written by then."""


class Children:
    """All such parts of this process."""

    def __init__(self) -> None:
        self._parents: list[Parent] = []

    def add(self, parent: Parent) -> None:
        self._parents.append(parent)

    def remove(self, parent: Parent) -> None:
        if parent in self._parents:
            self._parents.remove(parent)

    def start_traces(self, path_of: PathOf, switches: Mapping[str, bool]) -> None:
        """A process that cannot be traced is logged, and the run goes on without it."""
        _all([partial(parent.start_traces, path_of, switches) for parent in list(self._parents)], START_S)

    def stop_traces(self, within_s: float) -> list[Path]:
        """Returns: the files of all of them."""
        found = _all([parent.stop_traces for parent in list(self._parents)], within_s)
        return [path for paths in found for path in paths]


def _all(calls: Sequence[Callable[[], Future[Found]]], within_s: float) -> list[Found]:
    """The results of those that succeed; all begin before the first is waited for."""
    futures, found = list[Future[Found]](), list[Found]()
    for call in calls:
        with _logged():  # the event loop of an engine that has ended is closed
            futures.append(call())
    for future in futures:
        with _logged():
            found.append(future.result(timeout=within_s))
    return found


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a profile must never end serving
        log.error("profile: a process of this stage has no torch trace: %s", describe(error))


children = Children()
