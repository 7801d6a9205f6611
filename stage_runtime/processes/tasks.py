"""Asyncio tasks of a process's own: one that ends before it is cancelled ends the process, with its reason.

Not here: tasks of one request, whose error boundary is the request (`transfers.receiving`, `engines.threads.loops`,
`web`). The same rule for threads is in `engines.threads.stage_threads`. Used by `stage_process` and
`coordinator_process`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any


class TaskEnded(Exception):
    """A task that was to run on has returned, or was cancelled from outside."""


class Tasks:
    """Runs tasks until the block ends, which cancels them.

    ended: called with a task's name and what it raised, or `TaskEnded`. Not called for tasks that `cancel` or the
    block's end cancels, nor for a task of `start_finite` that returns.
    """

    def __init__(self, ended: Callable[[str, BaseException], None]) -> None:
        self._on_end = ended
        self._tasks: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Tasks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel all of them now, without a call of ``ended``."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work``, which never returns."""
        self._start(name, work, finite=False)

    def start_finite(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work``, which may return."""
        self._start(name, work, finite=True)

    def _start(self, name: str, work: Coroutine[Any, Any, Any], *, finite: bool) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, finite))

    def _ended(self, task: asyncio.Task[Any], finite: bool) -> None:
        error = None if task.cancelled() else task.exception()  # retrieved, or asyncio would log that it never was
        if task not in self._tasks:  # cancelled here
            return
        self._tasks.discard(task)
        if error is None:
            if finite and not task.cancelled():
                return
            error = TaskEnded(f"{task.get_name()} was cancelled" if task.cancelled() else f"{task.get_name()} returned")
        self._on_end(task.get_name(), error)
