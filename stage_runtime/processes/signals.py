"""Signals that end a process in order. Called by every role and by `omni up`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any


def handle(act: Callable[..., Any], *numbers: signal.Signals) -> None:
    """Call ``act`` with the signal's name for each of ``numbers`` that comes, on the running loop.

    SIGHUP and SIGINT stay ignored where whoever started the process ignores them: `nohup`, and shells for programs in
    the background, so that a terminal that closes, or a ^C for another program, does not end it.
    """
    loop = asyncio.get_running_loop()
    for number in numbers:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, act, number.name)
