"""Lets no new peer in at Unix sockets while few descriptors are left. What is connected stays so.

libzmq 4.3.5 aborts the process when its listener at a Unix socket has no descriptor for a connection (TCP's tries again
and again). And to unbind ends all connections that were accepted. So the socket's file gets another name: whoever
connects is refused until it has its own again, with the same permissions. This may go when `ipc_listener_t::accept`
takes EMFILE for no assertion.

Not here: outgoing connections (`limits.check`). Called by `opening` and by the tcp relay, on the process's I/O thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Final

from stage_runtime.sockets import limits

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # and after each connection: other code opens descriptors without notice
SHUT_BELOW: Final = 32  # descriptors: as many may be taken between two looks
OPEN_FROM: Final = 48
SHUT: Final = ".shut"
LOCAL: Final = "ipc://"


class Doors:
    """The Unix sockets that a process listens at."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, at: str = "") -> None:
        """at: which sockets of the process these are, for the log: it has some of the control plane and of a relay."""
        self._loop = loop
        self._at = at
        self._paths: list[str] = []
        self._shut = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, endpoint: str) -> None:
        """It is bound. An endpoint of another kind is left alone."""
        if endpoint.startswith(LOCAL):
            self._paths.append(endpoint.removeprefix(LOCAL))
            if self._timer is None:
                self._look_again()

    def look(self) -> None:
        """Shut them or open them, by how many descriptors are left."""
        if not self._paths:
            return
        allowed, left = limits.descriptors()
        if not self._shut and left < min(SHUT_BELOW, allowed // 8):
            log.error(
                "new peers are refused%s: the process may open %d descriptors (RLIMIT_NOFILE), and %d are left; %s",
                self._at,
                allowed,
                max(left, 0),
                limits.RAISE_DESCRIPTORS,
            )
            self._set(shut=True)
        elif self._shut and left >= min(OPEN_FROM, allowed // 6):
            log.info("new peers are accepted again%s: %d descriptors are left", self._at, left)
            self._set(shut=False)

    def close(self) -> None:
        """Give the files their names back."""
        if self._timer is not None:
            self._timer.cancel()
        if self._shut:
            self._set(shut=False)
        self._paths.clear()

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look_again)
        self.look()

    def _set(self, *, shut: bool) -> None:
        self._shut = shut
        for path in self._paths:
            with contextlib.suppress(OSError):  # its folder is gone
                os.rename(*((path, path + SHUT) if shut else (path + SHUT, path)))
