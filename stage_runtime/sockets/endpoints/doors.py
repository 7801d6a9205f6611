"""Lets no new peer in while few descriptors are left. Connected peers stay so.

Peers take descriptors by connecting, and libzmq, which accepts them, aborts the process at a Unix socket when none is
left. So a process with fewer than `FREELY_FROM` has it accept one connection at a time (`listeners`), each after a look
at how many are left; a flood of connections takes no more than are to spare. None is accepted with fewer than
`SHUT_BELOW`, and the files of Unix sockets get another name: whoever connects is refused until they have their own
again, with the same permissions. An unbind would end all connections that were accepted. This may go when
`ipc_listener_t::accept` takes EMFILE for no assertion.

Not here: outgoing connections (`limits.check`). Called by `opening` and by the tcp relay, on the process's I/O thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import Final

from stage_runtime.rules.flow import ticks
from stage_runtime.sockets.endpoints import limits, listeners
from stage_runtime.sockets.endpoints.listeners import Listener

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # and after each connection: other code opens descriptors without notice
SHUT_BELOW: Final = 32  # descriptors: as many may be taken between two looks by code that is not ours
OPEN_FROM: Final = 48
#: The number above which libzmq accepts whoever comes, though this thread waits for Python's lock for seconds: so many
#: connections do not come between two looks.
FREELY_FROM: Final = 4096
FIND_FIRST_S: Final = 0.001  # until libzmq's thread waits for connections; twice as long after each look
FIND_LAST_S: Final = 4.0
SHUT: Final = ".shut"
LOCAL: Final = "ipc://"


class Doors:
    """The sockets that a process listens at."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, at: str = "") -> None:
        """at: which sockets of the process these are, for the log: it has some of the control plane and of a relay."""
        self._loop = loop
        self._at = at
        self._paths: list[str] = []
        self._listeners: list[Listener] = []
        self._finding: dict[str, asyncio.TimerHandle] = {}  #: Timers by endpoint.
        self._shut = False
        self._freely = True  #: The listeners accept whoever comes.
        self._timer: asyncio.TimerHandle | None = None

    def add(self, endpoint: str) -> None:
        """It is bound."""
        if endpoint.startswith(LOCAL):
            self._paths.append(endpoint.removeprefix(LOCAL))
        self._find(endpoint, FIND_FIRST_S)
        if self._timer is None:
            self._look_again()

    def look(self) -> None:
        """Shut them or open them, by how many descriptors are left. It is called after each connection: the next one
        may come.
        """
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
        freely = left >= FREELY_FROM
        if not (freely and self._freely):
            self._freely = freely
            for listener in self._listeners:
                self._admit(listener)

    def close(self) -> None:
        """Give the files their names back. It is called before the sockets are closed."""
        if self._timer is not None:
            self._timer.cancel()
        for timer in self._finding.values():
            timer.cancel()
        if self._shut:
            self._set(shut=False)
        self._paths.clear()
        self._listeners.clear()

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(ticks.next_s(time.time(), LOOK_S), self._look_again)
        self.look()

    def _find(self, endpoint: str, again_s: float) -> None:
        self._finding.pop(endpoint, None)
        found = listeners.find(endpoint)
        if found is not None:
            self._listeners.append(found)
            self._admit(found)
        elif again_s <= FIND_LAST_S:
            self._finding[endpoint] = self._loop.call_later(again_s, self._find, endpoint, 2 * again_s)

    def _admit(self, listener: Listener) -> None:
        if self._shut:
            listener.accept_none()
        elif self._freely:
            listener.accept_all()
        else:
            listener.accept_one()

    def _set(self, *, shut: bool) -> None:
        self._shut = shut
        for path in self._paths:
            with contextlib.suppress(OSError):  # its folder is gone
                os.rename(*((path, path + SHUT) if shut else (path + SHUT, path)))
