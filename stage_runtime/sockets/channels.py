"""The control plane of one process: one socket that receives, a link per peer, PUB or SUB for broadcasts.

Owned by the process's one I/O thread (an asyncio loop; uvloop in production); `Link.send` alone may be called from
other threads. `opening` makes the sockets, `reading` reads them, `receiving` passes what has come to a `Handler`,
`connecting` connects links and detects dead peers; `rules.flow.links` keeps sequence numbers and acknowledgements. This
module makes, names, wakes and drops the links of `link_table`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import zmq

from stage_runtime.errors import LimitReached
from stage_runtime.sockets.broadcasts import Broadcasts
from stage_runtime.sockets.connections import detours
from stage_runtime.sockets.connections.accepting import Accepting
from stage_runtime.sockets.connections.connecting import RECONNECT_GRACE_S, Connecting, ConnectionEvents
from stage_runtime.sockets.connections.dialing import Dialers
from stage_runtime.sockets.connections.dismissals import DEFAULT_BOUNDS, DismissalBounds, Dismissals
from stage_runtime.sockets.connections.link_table import LinkTable
from stage_runtime.sockets.connections.links import Link
from stage_runtime.sockets.endpoints import limits
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from stage_runtime.sockets.endpoints.opening import Sockets
from stage_runtime.sockets.frames.pacing import ReadPacing
from stage_runtime.sockets.frames.reading import Reading
from stage_runtime.sockets.frames.receiving import Handler, LinkEnds, Receiving
from stage_runtime.sockets.frames.resending import DEFAULT_TIMES, Acknowledging, Resending, ResendTimes
from stage_runtime.wire.messages import Message

log = logging.getLogger(__name__)

SETTLED_POLL_S: Final = 0.01
GIVEN_UP_KEPT: Final = 10_000  # peers; as many as a coordinator remembers that it has declared dead


class LinkTimes(NamedTuple):
    """How long a process waits for its peers."""

    dead_after_s: float = 3.0
    reconnect_grace_s: float = RECONNECT_GRACE_S
    #: The connection of a link that was not used for so long is closed, and made again when it is; None: never. Then
    #: others must report a peer that dies.
    idle_after_s: float | None = None
    resend: ResendTimes = DEFAULT_TIMES


DEFAULT_LINK_TIMES: Final = LinkTimes()


class Channels:
    """The control plane of one process. Opens sockets at once; `close` when done."""

    def __init__(
        self,
        handler: Handler,
        *,
        incarnation: str,
        loop: asyncio.AbstractEventLoop,
        security: CurveSecurity | None = None,
        times: LinkTimes = DEFAULT_LINK_TIMES,
        dismissals: DismissalBounds = DEFAULT_BOUNDS,
        given_up_kept: int = GIVEN_UP_KEPT,
    ) -> None:
        self.incarnation = incarnation
        self.counters: Counter[str] = Counter()
        #: The peers, if any, that pass the first frames of a new link on: the coordinators, which know both ends.
        self.detours: Callable[[], Iterable[str]] = lambda: ()
        self._handler = handler
        self._loop = loop
        self._held = threading.local()  #: ``links``: with frames that leave when `together` ends; None: outside of it.
        self._in_detour = False
        self._closed = False
        self._reading = Reading(loop, self.counters)
        self._sockets = Sockets(
            loop,
            security=security,
            dead_after_s=times.dead_after_s,
            handshake_failed=lambda why: self._reading.refuse("handshake_failures", why),
            short_connection=self._reading.short_connection,
        )
        self._dialers = Dialers(
            self._sockets, loop, lambda frame, endpoint: self._receiving.take(frame, endpoint=endpoint)
        )
        self._read_pacing = ReadPacing(loop, self._sockets)
        self._accepting: list[Accepting] = []
        self._broadcasts = Broadcasts(
            incarnation,
            sockets=self._sockets,
            reading=self._reading,
            counters=self.counters,
            deliver=lambda frame: self._receiving.take_broadcast(frame),
        )
        self._open_links(times, dismissals, given_up_kept)
        self._receiving = Receiving(
            incarnation,
            handler,
            self._links,
            reading=self._reading,
            pacing=self._read_pacing,
            acks=self._acks,
            resending=self._resending,
            ends=LinkEnds(self._renew, self._lose, self._replaced),
        )

    def _open_links(self, times: LinkTimes, dismissals: DismissalBounds, given_up_kept: int) -> None:
        """The table of links, and what acts on them at times."""
        loop = self._loop
        self._acks = Acknowledging(loop, self._wake, times.resend)
        self._resending = Resending(
            loop,
            self.counters,
            self._dialers.turn,
            flushed=lambda link: self._dismissals.flushed(link),
            times=times.resend,
        )
        self._table = LinkTable(
            self.incarnation, stalled=self._stalled, watch=self._resending.watch, given_up_kept=given_up_kept
        )
        self._links = self._table.by_peer
        # Asleep, so that its connection may use the descriptors that are kept free at a limit.
        self._dismissals = Dismissals(
            loop, lambda peer, endpoint: self.connect(peer, endpoint, asleep=True), self.drop, bounds=dismissals
        )
        self._connecting = Connecting(
            loop,
            self._dialers,
            self.counters,
            dead_after_s=times.dead_after_s,
            reconnect_grace_s=times.reconnect_grace_s,
            events=ConnectionEvents(
                current=lambda link: not self._closed and self._links.get(link.peer) is link,
                connected=self._connected,
                flush=self._resending.flush,
                gone=self._gone,
            ),
        )
        self._idle_timer: asyncio.TimerHandle | None = None
        if times.idle_after_s is not None:
            every_s = times.idle_after_s / 2
            self._idle_timer = loop.call_later(every_s, self._close_idle, every_s)

    # --- opening ------------------------------------------------------------------------------------------------

    def bind(self, endpoint: str) -> str:
        """Listen there. Returns the endpoint as bound (a TCP port ``*`` or 0 is filled in)."""
        surplus = functools.partial(self._reading.refuse, "malformed", "a part that looks like a route")
        accepting = Accepting(self._sockets, self._loop, endpoint, surplus)
        self._accepting.append(accepting)
        socket, take = accepting.socket, functools.partial(self._receiving.take, accepting=accepting)

        def drain(many: bool) -> int:
            return self._reading.drain(socket, accepting.receive, take, many)

        self._read_pacing.read(socket, drain)
        accepting.read(lambda: self._read_pacing.look(socket, drain))
        return accepting.endpoint

    def allow_paced_reads(self, allowed: Callable[[], bool]) -> None:
        """Read beats that come in quick succession every few ms. allowed: whether other messages may wait that long,
        too.
        """
        self._read_pacing.allowed = allowed

    def bind_publisher(self, endpoint: str) -> str:
        return self._broadcasts.bind(endpoint)

    def subscribe(self, endpoint: str) -> None:
        """Receive a coordinator's broadcasts."""
        self._broadcasts.subscribe(endpoint)

    def unsubscribe(self, endpoint: str) -> None:
        self._broadcasts.unsubscribe(endpoint)

    def connect(self, peer: str, endpoint: str, *, asleep: bool = False) -> Link:
        """The link to ``peer``, made if need be; ``peer`` may be empty until it introduces itself (`name`).

        asleep: a new link is connected when it is used first.
        Raises: LimitReached: the process has no room for another peer.
        """
        known = self._table.find(peer, endpoint)
        if known is not None:
            if known in self._dismissals:
                limits.check()
                self._dismissals.keep(known)
            return known
        link = self._table.make(peer, endpoint)
        if not asleep:
            limits.check()
            try:
                self._connecting.dial(link)
            except zmq.ZMQError as error:
                raise LimitReached(f"no socket can be opened: {error}") from error
        self._table.add(link)
        self._dismissals.forget(peer)
        return link

    def name(self, endpoint: str, peer: str) -> Link | None:
        """Set the incarnation of the process behind an unnamed link."""
        link = self._table.name(endpoint, peer)
        if link is not None:
            self._dismissals.forget(peer)
        return link

    # --- sending ------------------------------------------------------------------------------------------------

    def link(self, peer: str) -> Link | None:
        return self._links.get(peer)

    def send(self, peer: str, message: Message) -> bool:
        """Send ``message`` to ``peer``, in order and acknowledged. False without a link to it. Any thread."""
        link = self._links.get(peer)
        if link is None:
            return False
        held = getattr(self._held, "links", None)
        link.send(message, later=held is not None)
        if held is not None:
            held[link] = None
        return True

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Frames that this thread sends inside leave at the end, in as few messages of each socket as can be.

        Sent one by one, each would wake the peer's I/O thread. The order of each link is kept: a frame that another
        thread sends meanwhile leaves behind those that wait.
        """
        if getattr(self._held, "links", None) is not None:  # a wider one is open
            yield
            return
        self._held.links = held = dict[Link, None]()
        try:
            yield
        finally:
            self._held.links = None
            for link in held:
                link.send_kept()

    def send_now(self, peer: str, message: Message) -> bool:
        """The same as `send`, and at once also inside of `together`: the peer needs it before the block ends."""
        link = self._links.get(peer)
        if link is None:
            return False
        link.send(message)
        return True

    def hint(self, peer: str, message: Message) -> None:
        """Send ``message`` to ``peer`` outside the order and unacknowledged: it may be lost."""
        link = self._links.get(peer)
        if link is not None:
            link.send_unordered(message)

    def dismiss(self, peer: str, endpoint: str, message: Message) -> None:
        """Send one message to a process that gets no link.

        A link that is made for it is closed when the message is sent, unless `connect` asks for that link meanwhile.
        """
        link = self._links.get(peer)
        if link is None:
            self._dismissals.add(peer, endpoint, message)
        else:
            link.send(message)

    def publish(self, message: Message) -> None:
        """Broadcast ``message`` to all subscribers; it may be lost."""
        self._broadcasts.publish(message)

    @property
    def peers(self) -> list[str]:
        return list(self._links)

    @property
    def interrupted(self) -> set[str]:
        """Peers whose connection broke and is not back: most are lost soon."""
        return self._connecting.interrupted

    @property
    def other_protocol_at(self) -> float:
        """Monotonic time of the last frame of another protocol, or connection that ended at once or had another key."""
        return self._reading.other_protocol_at

    async def settled(self, timeout_s: float) -> bool:
        """Wait until every sent frame is acknowledged. False after ``timeout_s``.

        Frames are sent once more: peers that have them already acknowledge those at once.
        """
        deadline = self._loop.time() + timeout_s
        for link in list(self._links.values()):
            if link.unacked:
                self._resending.again(link)
        while any(link.undelivered for link in self._links.values()):
            if self._loop.time() > deadline:
                return False
            await asyncio.sleep(SETTLED_POLL_S)
        return True

    # --- closing ------------------------------------------------------------------------------------------------

    def drop(self, peer: str) -> None:
        """Close the link to ``peer``; later frames of that peer are those of an unknown one."""
        link = self._table.remove(peer)
        if link is not None:
            self._close_link(link)
            self.interrupted.discard(peer)

    def drop_unnamed(self, endpoint: str) -> None:
        link = self._table.remove_unnamed(endpoint)
        if link is not None:
            self._close_link(link)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._acks.close()
        self._resending.close()
        self._dismissals.close()
        self._read_pacing.close()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for link in self._table:
            self._close_link(link)
        self._table.clear()
        self._connecting.close()
        self._sockets.close_doors()
        for accepting in self._accepting:
            self._sockets.forget(accepting.socket)
        self._broadcasts.close()
        self._dialers.close()
        self._sockets.close()

    def detoured(self, frame: bytes) -> None:
        """A frame for this process came by a coordinator, not on its link. A detour within a detour is dropped."""
        if self._in_detour:
            self._reading.refuse("malformed", "a Detour within a Detour")
            return
        self._in_detour = True
        try:
            self._receiving.take(frame)
        finally:
            self._in_detour = False

    # --- watching lives -----------------------------------------------------------------------------------------

    def _wake(self, link: Link) -> bool:
        """Connect a link that sleeps. False: it cannot be connected; its peer is reported as lost if frames wait.

        An ack alone waits for a later try: the peer sends its frames again.
        """
        if link.connection is None and not link.closed and not self._closed:
            self.counters["woken"] += 1
            try:
                if link not in self._dismissals:  # the rejection at a limit may use the descriptors that are kept free
                    limits.check(connected=link.accepting is not None)
                self._connecting.dial(link)
            except (LimitReached, zmq.ZMQError) as error:
                self._reading.refuse("limits", f"a link cannot be connected: {error}", peer=link.peer)
                if link.undelivered:
                    self._loop.call_soon(self._lose, link)
                return False
        return True

    def _stalled(self, link: Link) -> None:
        """A link has frames that its connection did not accept. Any thread."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._unstall, link)

    def _unstall(self, link: Link) -> None:
        if not self._wake(link):
            return
        self._resending.flush(link)
        if not link.connected and not self._closed:
            coordinators = {name: self._links[name] for name in self.detours() if name in self._links}
            detours.send(link, coordinators, self.counters)

    def _connected(self, link: Link) -> None:
        self._resending.again(link)
        self._acks.connected(link)

    def _gone(self, link: Link) -> None:
        log.debug("peer %s at %s is gone", link.peer, link.endpoint)
        self._lose(link)

    def _close_idle(self, every_s: float) -> None:
        """Let the links sleep that were not used since the last look."""
        self._idle_timer = self._loop.call_later(every_s, self._close_idle, every_s)
        self._connecting.let_sleep(self._links.values())

    def _renew(self, link: Link) -> Link:
        self.drop(link.peer)
        return self.connect(link.peer, link.endpoint, asleep=True)

    def _replaced(self, endpoint: str, incarnation: str) -> None:
        """The process that answers at an endpoint has this incarnation: all other links that lead there are lost."""
        for link in list(self._links.values()):
            connection = link.connection
            if connection is not None and connection.endpoint == endpoint and link.peer != incarnation:
                log.info("peer %s at %s is gone: %s is there", link.peer, endpoint, incarnation)
                self._lose(link)

    def _lose(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            link.lost = True
            self.drop(link.peer)
            self._handler.lost(link.peer)

    def _close_link(self, link: Link) -> None:
        self._acks.forget(link)
        self._receiving.forget(link)
        self._resending.forget(link)
        link.close()
        self._connecting.leave(link)
        self._dismissals.closed(link)
