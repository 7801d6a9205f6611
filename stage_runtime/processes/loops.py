"""Runs a role in an event loop of its own. Called by `stage_process` and `coordinator_process`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import uvloop

TASKS_S: Final = 1.0  # for tasks that were cancelled at the end


def run(role: Coroutine[Any, Any, int]) -> int:
    """Returns what ``role`` returns, within `TASKS_S` after it did.

    `asyncio.Runner.close` waits without a bound for tasks that were cancelled, and for calls of `asyncio.to_thread`.
    """
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        return runner.run(role)
    finally:
        loop = runner.get_loop()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=TASKS_S))
        loop.close()
