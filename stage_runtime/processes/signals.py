"""Signals that end a process in order. Called by every role and by `omni up`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any


def handle(act: Callable[..., Any], *numbers: signal.Signals) -> None:
    """Call ``act`` with the signal's name for each of ``numbers`` that comes, on the running loop.

    SIGHUP stays ignored if the process was started with it ignored, as by `nohup`. SIGINT does not: shells ignore
    it for what a script starts in the background, and a SIGINT that is sent there is meant to end it.
    """
    loop = asyncio.get_running_loop()
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, act, number.name)
