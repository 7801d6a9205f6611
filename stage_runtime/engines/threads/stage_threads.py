"""Threads of a stage: one that ends by an exception is reported, because its work would never be done."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from threading import Thread
from typing import Any

from stage_runtime.engines.gpus import gpudevice


def start(name: str, target: Callable[..., Any], *args: Any, crashed: Callable[[BaseException], None]) -> Thread:
    """Run ``target(*args)`` on a thread, in a copy of the caller's context: its events belong to the caller's stage.

    An exception in it, `SystemExit` too, goes to ``crashed``, on that thread.
    """
    context = contextvars.copy_context()

    def run() -> None:
        try:
            context.run(gpudevice.apply)
            context.run(target, *args)
        except BaseException as error:
            crashed(error)

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
