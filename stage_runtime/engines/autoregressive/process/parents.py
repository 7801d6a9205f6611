"""A program that ends with its parent. Linux only (pidfd)."""

from __future__ import annotations

import os
import select
import threading
from typing import Final

LOST_PARENT: Final = 70  # exit code


def end_with(parent: int) -> None:
    """End this process when that one ends. A thread watches: PDEATHSIG would follow the parent's thread, not it."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(LOST_PARENT)
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(LOST_PARENT)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(LOST_PARENT)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
