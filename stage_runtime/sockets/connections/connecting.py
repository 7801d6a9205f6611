"""Connects links, lets them sleep and wakes them, and gives up those whose connection does not come back.

Here: times and connections. Not here: what is sent (`links`), what a lost peer means (`channels`). It runs on the
process's I/O thread.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from stage_runtime.rules.flow.watched_time import LATE_S
from stage_runtime.sockets.connections.dialing import Connection, Dialers
from stage_runtime.sockets.connections.links import Link
from stage_runtime.sockets.endpoints.refusals import Refusals

#: The factor of links to coordinators. Each of its members checks it, so that it costs it most; and nothing of a frozen
#: one waits for its members to notice it.
COORDINATOR_FACTOR: Final = 8.0
RECONNECT_GRACE_S: Final = 0.3  # a connection that is not back by then is a dead peer
#: When the kernel is asked, after a break, whether a process listens at the peer's endpoint. More than once, because it
#: closes an ended process's descriptors one after the other, and has memory to free between them; no later than libzmq
#: has a connection back, because a process that accepts one without data counts a failed handshake.
ASK_AFTER_S: Final = (0.01, 0.03, 0.07)


class ConnectionEvents(NamedTuple):
    """The reactions of a process to its connections, and its answer on whether a link is still used."""

    current: Callable[[Link], bool]  #: Whether it is still the link to its peer.
    connected: Callable[[Link], None]  #: Its connection is there, maybe again.
    flush: Callable[[Link], None]  #: Send what waits.
    gone: Callable[[Link], None]  #: Its peer cannot be reached.


class Connecting:
    """The connections of all links of a process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        dialers: Dialers,
        counters: Counter[str],
        *,
        dead_after_s: float,
        reconnect_grace_s: float,
        events: ConnectionEvents,
    ) -> None:
        self.interrupted: set[str] = set()  #: Peers whose connection broke and is not back: most are lost soon.
        self._loop = loop
        self._dialers = dialers
        self._counters = counters
        self._dead_after_s = dead_after_s
        self._reconnect_grace_s = reconnect_grace_s
        self._events = events
        self._watchers: dict[Link, Callable[[bool], None]] = {}
        self._refusals = Refusals(loop)

    def dial(self, link: Link) -> None:
        """Raises: ZMQError: no socket can be opened."""
        watcher = functools.partial(self._changed, link)
        connection = self._dialers.dial(link.endpoint, watcher, COORDINATOR_FACTOR if link.keep_awake else 1.0)
        self._watchers[link] = watcher
        link.connection = connection
        if connection.connected:
            self._events.flush(link)
        else:
            self._check_later(self._dead_after_s, link, connection, connection.breaks)

    def leave(self, link: Link) -> None:
        """The link is closed."""
        if link.connection is not None:
            link.connection.leave(self._watchers.pop(link))

    def close(self) -> None:
        self._refusals.close()

    def let_sleep(self, links: Iterable[Link]) -> None:
        """Close the connections of links that were not used since the last look."""
        for link in links:
            if not link.used and not link.keep_awake:
                connection = link.sleep()
                if connection is not None:
                    self._counters["idle_closed"] += 1
                    connection.leave(self._watchers.pop(link))
            link.used = False

    def _changed(self, link: Link, connected: bool) -> None:
        connection = link.connection
        if connection is None:
            return
        if connected:
            self.interrupted.discard(link.peer)
            self._counters["connected"] += 1
            self._events.connected(link)
            return
        self.interrupted.add(link.peer)
        self._counters["disconnected"] += 1
        self._check_later(self._reconnect_grace_s, link, connection, connection.breaks)
        if not link.keep_awake:  # a coordinator counts connections that end at once as those of another protocol
            for after_s in ASK_AFTER_S:
                self._loop.call_later(after_s, self._ask, link, connection, connection.breaks)

    def _ask(self, link: Link, connection: Connection, since: int) -> None:
        if self._is_down(link, connection, since):
            self._refusals.ask(connection.endpoint, functools.partial(self._refused, link, connection, since))

    def _refused(self, link: Link, connection: Connection, since: int) -> None:
        if self._is_down(link, connection, since):
            self._counters["refused"] += 1
            self._events.gone(link)

    def _check_later(self, after_s: float, link: Link, connection: Connection, since: int, again: bool = True) -> None:
        due = self._loop.time() + after_s
        self._loop.call_at(due, self._must_be_connected, link, connection, since, due, again)

    def _must_be_connected(self, link: Link, connection: Connection, since: int, due: float, again: bool) -> None:
        """since: the break that this is the grace of; one after it has a grace of its own. due: its end.

        again: an end that accepts connections may only be slow to shake hands, and gets a second grace. No more: a
        frozen one accepts them, too. So does every end when this process was stopped meanwhile, and with it libzmq's
        thread, which connects.
        """
        if not self._is_down(link, connection, since):
            return
        if again and (connection.reached or self._loop.time() > due + LATE_S):
            self._check_later(self._reconnect_grace_s, link, connection, since, again=False)
            return
        self._events.gone(link)

    def _is_down(self, link: Link, connection: Connection, since: int) -> bool:
        """Whether the connection of a link that is still used has not come back since that break."""
        if not self._events.current(link) or link.connection is not connection:
            return False
        connection.look()
        return not connection.connected and connection.breaks == since
