"""Links that are made to send one message: to a process that is refused, or was declared dead.

Here: how many there are at once, who waits for one, and when each is closed. Not here: the links (`channels`). It runs
on the process's I/O thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from stage_runtime.sockets.connections.dialing import LINGER_S
from stage_runtime.sockets.connections.links import Link
from stage_runtime.sockets.endpoints import limits
from stage_runtime.wire.messages import Message


class DismissalBounds(NamedTuple):
    """How long and how many. The defaults are those of every program."""

    connect_s: float = 5.0  #: A process that cannot be reached must not keep a place.
    at_once: int = 24  #: Open or lingering, at a limit too: there it is a third of what is kept free.
    at_once_most: int = 128  #: The most while descriptors are left: of those, an eighth.
    waiting_most: int = 10_000  #: Processes; beyond it the one that has waited longest asks again.


DEFAULT_BOUNDS: Final = DismissalBounds()


class Dismissals:
    """A place is taken from the opening of a link until its connection is closed, which is a while after the link."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        open_link: Callable[[str, str], Link],
        drop: Callable[[str], None],
        *,
        bounds: DismissalBounds,
    ) -> None:
        """open_link: to a peer at an endpoint. drop: close the link to a peer, and call `closed`."""
        self._loop = loop
        self._open_link = open_link
        self._drop = drop
        self._bounds = bounds
        self._links: dict[Link, asyncio.TimerHandle] = {}  #: Open, with the time at which each is given up.
        self._lingering = 0  #: Links that are closed and whose connections are not.
        #: Peer -> endpoint, message, and when it asked last; the longest waiting first.
        self._waiting: dict[str, tuple[str, Message, float]] = {}
        self._closed = False

    def __contains__(self, link: Link) -> bool:
        return link in self._links

    def add(self, peer: str, endpoint: str, message: Message) -> None:
        """Send ``message`` to a peer without a link, now or when there is a place."""
        self._waiting[peer] = endpoint, message, self._loop.time()  # instead of what it was to be sent before
        if len(self._waiting) > self._bounds.waiting_most:
            del self._waiting[next(iter(self._waiting))]
        self._advance()

    def flushed(self, link: Link) -> None:
        """All that was sent on the link is with its connection."""
        timer = self._links.get(link)
        if timer is not None:
            # The link ends by that, not by an ack: a new process at that endpoint would never acknowledge a frame for
            # the old incarnation. If the connection breaks now, the process asks again.
            self._loop.call_soon(self._give_up, link)

    def keep(self, link: Link) -> None:
        """The link is used for more: it is not closed."""
        self._links.pop(link).cancel()
        self._advance()

    def forget(self, peer: str) -> None:
        """The peer gets a link: it is not sent what waits."""
        self._waiting.pop(peer, None)

    def closed(self, link: Link) -> None:
        """The link is closed, whatever closed it."""
        timer = self._links.pop(link, None)
        if timer is not None:
            timer.cancel()
            self._lingering += 1
            self._loop.call_later(LINGER_S, self._lingered)

    def close(self) -> None:
        self._closed = True
        self._waiting.clear()
        for timer in self._links.values():
            timer.cancel()
        self._links.clear()

    def _advance(self) -> None:
        while self._waiting and not self._closed and self._has_place():
            peer = next(iter(self._waiting))
            endpoint, message, asked_at = self._waiting.pop(peer)
            if asked_at < self._loop.time() - self._bounds.connect_s:
                continue  # it would have asked again
            link = self._open_link(peer, endpoint)
            self._links[link] = self._loop.call_later(self._bounds.connect_s, self._give_up, link)
            link.send(message)

    def _has_place(self) -> bool:
        taken = len(self._links) + self._lingering
        most = min(self._bounds.at_once_most, limits.descriptors()[1] // 8)
        return taken < self._bounds.at_once or taken < most

    def _give_up(self, link: Link) -> None:
        if link in self._links:
            self._drop(link.peer)

    def _lingered(self) -> None:
        self._lingering -= 1
        self._advance()
