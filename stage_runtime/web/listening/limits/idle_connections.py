"""One timer that looks at all connections of a server, instead of one for each. Made by `server`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from stage_runtime.rules.flow import ticks
from stage_runtime.sockets.endpoints.limits import allowed_descriptors
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimit, ConnectionLimits


class IdleConnections:
    """Looks at all connections of a server every so often, and at how many there may be."""

    def __init__(self, connections: Iterable[Any], limits: ConnectionLimits, limit: ConnectionLimit) -> None:
        self._connections = connections
        self._limits = limits
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._arm()

    def stop(self) -> None:
        self._timer.cancel()

    def _sweep(self) -> None:
        self._arm()  # first: a check that raises does not stop the later ones
        self._limit.renew(allowed_descriptors())
        self._look()

    def _arm(self) -> None:
        self._timer = self._loop.call_later(ticks.next_s(time.time(), self._limits.sweep_s), self._sweep)

    def announce_end(self) -> None:
        """The server has begun to drain."""
        for connection in list(self._connections):
            connection.announce_end()
        self._look()

    def _look(self) -> None:
        now = self._loop.time()
        for connection in list(self._connections):
            connection.sweep(now)
        self._bound_unread(now)

    def _bound_unread(self, now: float) -> None:
        """Answers of requests that are over are in no other count. The longest unread go first; one may be any size."""
        unread = [one for one in self._connections if one.unread_since is not None]
        over = sum(one.transport.get_write_buffer_size() for one in unread) - self._limits.unread_nbytes
        if over <= 0:
            return
        unread.sort(key=lambda one: one.unread_since)
        for one in unread[:-1]:
            if over <= 0 or now - one.unread_since <= self._limits.unread_s:
                return
            over -= one.transport.get_write_buffer_size()
            one.cut_off("reads slowly while unread answers take too much memory")
