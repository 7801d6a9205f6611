"""The links of one process: by the incarnation of the peer, or by its endpoint until it has introduced itself.

Here: which links there are, and what is remembered of a link that was dropped. Not here: connections (`connecting`),
what a link sends (`links`). Called by `channels`, on the process's I/O thread; senders of other threads read `by_peer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from stage_runtime.rules.flow.links import LinkReceiver
from stage_runtime.sockets.connections.links import Link


class LinkTable:
    """All links of a process, open ones alone."""

    def __init__(
        self, me: str, *, stalled: Callable[[Link], None], watch: Callable[[Link], None], given_up_kept: int
    ) -> None:
        """me: the incarnation of this process. stalled, watch: those of each `Link`. given_up_kept: for how many peers
        the receiver of a dropped link is remembered.
        """
        self.by_peer: dict[str, Link] = {}
        self._unnamed: dict[str, Link] = {}  #: Links by endpoint: connected, not introduced yet.
        #: The receiver of the last link to a peer that was dropped, the oldest first.
        self._given_up: dict[str, LinkReceiver] = {}
        self._sessions = itertools.count(1)
        self._me = me
        self._stalled = stalled
        self._watch = watch
        self._given_up_kept = given_up_kept

    def __iter__(self) -> Iterator[Link]:
        yield from [*self.by_peer.values(), *self._unnamed.values()]

    def find(self, peer: str, endpoint: str) -> Link | None:
        """peer: may be empty until it introduces itself."""
        return self.by_peer.get(peer) if peer else self._unnamed.get(endpoint)

    def make(self, peer: str, endpoint: str) -> Link:
        """A link that `add` takes in when it is connected, or asleep."""
        incoming = LinkReceiver(next(self._sessions), self._given_up.get(peer))
        link = Link(self._me, peer, endpoint, incoming, stalled=self._stalled, watch=self._watch)
        link.keep_awake = not peer
        return link

    def add(self, link: Link) -> None:
        if link.peer:
            self.by_peer[link.peer] = link
        else:
            self._unnamed[link.endpoint] = link

    def name(self, endpoint: str, peer: str) -> Link | None:
        """Set the incarnation of the process behind an unnamed link. None: no link to that endpoint waits for it."""
        link = self._unnamed.pop(endpoint, None)
        if link is not None:
            link.peer = peer
            link.incoming = LinkReceiver(link.incoming.session, self._given_up.get(peer))
            self.by_peer[peer] = link
        return link

    def remove(self, peer: str) -> Link | None:
        """The link to ``peer``, whose receiver is remembered."""
        link = self.by_peer.pop(peer, None)
        if link is not None:
            self._given_up.pop(peer, None)
            self._given_up[peer] = link.incoming
            if len(self._given_up) > self._given_up_kept:
                del self._given_up[next(iter(self._given_up))]
        return link

    def remove_unnamed(self, endpoint: str) -> Link | None:
        return self._unnamed.pop(endpoint, None)

    def clear(self) -> None:
        self.by_peer.clear()
        self._unnamed.clear()
