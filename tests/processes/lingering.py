"""A stage and a hook that leave what never ends: threads and a child process. The stage's process can be crashed."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable

import stage_runtime as omni
from tests.processes import fatal


def forever() -> None:
    time.sleep(3600)


def linger() -> None:
    threading.Thread(target=forever, name="author's own").start()
    multiprocessing.get_context("spawn").Process(target=forever).start()


def stage() -> Callable[[omni.StagePayload], object]:
    linger()

    async def run(payload: omni.StagePayload) -> str:
        waiting = asyncio.create_task(asyncio.to_thread(forever))
        await asyncio.sleep(0)
        fatal.cancel(str(payload.data))
        del waiting
        return str(payload.data)

    return run


def broken() -> None:
    linger()
    raise OSError("no weights at /models")


def terminal_stages_fn(request: omni.OmniRequest) -> None:
    """The hook that runs in the coordinator's process."""
    if not any(thread.name == "author's own" for thread in threading.enumerate()):
        linger()
    fatal.cancel(str(request.inputs))
