"""Engines that offer operations; on their processes' path."""

from __future__ import annotations

import os
import signal
from typing import Any

from stage_runtime.engines import events


class Operated:
    """Answers operations: `echo`, `rank`, `odd` (with what cannot be encoded), `numbered` (a map whose keys are not
    text), `refuse`, `die`.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def run(self, inbox: Any, outbox: Any, stop: Any) -> None:
        for event in inbox:
            match event:
                case events.Start():
                    outbox.put(events.Done(event.request_id, {"text": "here"}))
                case events.Admin(operation="echo"):
                    event.reply(event.arguments)
                case events.Admin(operation="rank"):
                    event.reply(self._rank)
                case events.Admin(operation="odd"):
                    event.reply(object())
                case events.Admin(operation="numbered"):
                    event.reply({1: "one", (2, 3): "two"})
                case events.Admin(operation="refuse"):
                    event.reply(ValueError(f"rank {self._rank} will not"))
                case events.Admin(operation="die"):
                    os.kill(os.getpid(), signal.SIGKILL)


def alone() -> Operated:
    return Operated(0)


def ranks(tp_rank: int) -> Operated:
    return Operated(tp_rank)


def plain() -> Any:
    return lambda payload: payload.data
