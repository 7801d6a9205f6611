"""Threads of a stage: one that ends by an exception is told, for what it would have computed nobody computes."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any


def start(name: str, target: Callable[..., Any], *args: Any, crashed: Callable[[BaseException], None]) -> Thread:
    """Run ``target(*args)`` on a thread. Whatever it raises, `SystemExit` too, goes to ``crashed``, on that thread."""

    def run() -> None:
        try:
            target(*args)
        except BaseException as error:
            crashed(error)

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
