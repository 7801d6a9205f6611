"""The control plane of one process: one socket that receives, a link per peer, PUB or SUB for broadcasts.

Owned by the process's one I/O thread (an asyncio loop; uvloop in production); `Link.send` alone may be called from
other threads. `opening` makes the sockets; `rules.links` keeps sequence numbers and acknowledgements. This module
counts, orders and acknowledges messages, passes them to a `Handler`, and detects dead peers by libzmq's heartbeats
and disconnects, which work while Python holds the GIL.

Over 450 lines and one module: every method reads or changes the table of links, which has one owner.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

import zmq

from stage_runtime.errors import OtherProtocol, ProtocolError, describe
from stage_runtime.rules.links import ACK_EVERY, Incoming, Standing, Verdict
from stage_runtime.sockets.addresses import Security
from stage_runtime.sockets.dialing import Dialers
from stage_runtime.sockets.links import Link
from stage_runtime.sockets.opening import Sockets
from stage_runtime.wire import codec
from stage_runtime.wire.messages import (
    FRAME_LIMIT,
    PROTOCOL,
    Abort,
    Ack,
    Envelope,
    Frame,
    Message,
    RequestRef,
)

log = logging.getLogger(__name__)

#: At rest an ack goes out on its own after this; under load it rides on other frames. Far below `RESEND_AFTER_S`, and
#: long against a hop: an ack of its own wakes two threads at either end.
ACK_DELAY_S: Final = 0.04
SETTLED_POLL_S: Final = 0.01
READABLE: Final = int(zmq.POLLIN)  # an operation on the enumeration costs as much as the look itself
DRAIN_BUDGET: Final = 256  # frames per wake-up, before other work of the loop gets its turn
RECONNECT_GRACE_S: Final = 0.3  # a connection that is not back by then is a dead peer: kill is seen in < 1 s
STALL_RETRY_S: Final = 0.002
RESEND_AFTER_S: Final = 0.25  # without a word heard; doubles up to RESEND_MOST_S, a busy receiver is no loss
RESEND_MOST_S: Final = 4.0
DISMISS_S: Final = 5.0  # to connect and be heard
GIVEN_UP_KEPT: Final = 1000  # peers


class Handler(Protocol):
    """Receives the messages for this process. Called on the I/O thread."""

    def introduced(self, sender: str, message: Message) -> bool:
        """A message of a sender without a link. True: it has a link now (`Channels.connect`), deliver the message.

        Any message type: a sender whose link was dropped here does not know it yet.
        """

    def received(self, sender: str, message: Message) -> None:
        """A message, in order, exactly once. Must not raise for a request's sake."""

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None:
        """A message of ``sender``'s could not be read or dealt with, and was stepped over. ``request`` must end.

        None: it belonged to no request.
        """

    def lost(self, peer: str) -> None:
        """``peer`` is proven unreachable. Its link is closed already; nothing more comes from it."""


class Channels:
    """The control plane of one process. Opens sockets at once; `close` when done."""

    def __init__(
        self,
        handler: Handler,
        *,
        incarnation: str,
        loop: asyncio.AbstractEventLoop,
        security: Security | None = None,
        dead_after_s: float = 3.0,
    ) -> None:
        self.incarnation = incarnation
        self.counters: Counter[str] = Counter()
        #: Monotonic time of the last frame of another protocol, or connection that ended at once.
        self.other_protocol_at = -math.inf
        self._handler = handler
        self._loop = loop
        self._dead_after_s = dead_after_s
        self._sockets = Sockets(
            loop,
            security=security,
            dead_after_s=dead_after_s,
            handshake_failed=lambda why: self._refuse("handshake_failures", why),
            short_connection=self._short_connection,
        )
        self._dialers = Dialers(self._sockets, loop)
        self._pulls: list[zmq.Socket[bytes]] = []
        self._subscriptions: dict[str, zmq.Socket[bytes]] = {}
        self._publisher: zmq.Socket[bytes] | None = None
        self._sessions = itertools.count(1)
        self._links: dict[str, Link] = {}  #: By incarnation.
        self._unnamed: dict[str, Link] = {}  #: By endpoint: connected, not introduced yet.
        self._given_up: dict[str, Incoming] = {}  #: Of the last link to a peer that was dropped, the oldest first.
        self._watchers: dict[Link, Callable[[bool], None]] = {}
        self._resends: dict[Link, tuple[float, float]] = {}  #: When to send again, and the patience that led there.
        self._owing: set[Link] = set()
        self._waiting: set[Link] = set()  #: Links with frames that their connections did not accept.
        self._ack_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._logged_refusals: set[str] = set()
        self._closed = False
        self._watch = loop.call_later(RESEND_AFTER_S / 2, self._resend_due)

    # --- opening ------------------------------------------------------------------------------------------------

    def bind(self, endpoint: str) -> str:
        """Listen there. Returns the endpoint as bound (a TCP port ``*`` or 0 is filled in)."""
        # What peers' ROUTER sockets connect to; nothing is sent on it. A PULL socket would refuse them.
        pull = self._sockets.make(zmq.DEALER)
        pull.maxmsgsize = FRAME_LIMIT
        bound = self._sockets.bind(pull, endpoint)
        self._pulls.append(pull)
        self._sockets.read(pull, lambda: self._drain(pull, self._take))
        return bound

    def bind_publisher(self, endpoint: str) -> str:
        self._publisher = self._sockets.make(zmq.PUB)
        return self._sockets.bind(self._publisher, endpoint)

    def subscribe(self, endpoint: str) -> None:
        """Receive a coordinator's broadcasts."""
        if endpoint in self._subscriptions:
            return
        subscription = self._sockets.make(zmq.SUB)
        subscription.maxmsgsize = FRAME_LIMIT
        subscription.subscribe(b"")
        self._sockets.connect(subscription, endpoint)
        self._subscriptions[endpoint] = subscription
        self._sockets.read(subscription, lambda: self._drain(subscription, self._take_broadcast))

    def unsubscribe(self, endpoint: str) -> None:
        subscription = self._subscriptions.pop(endpoint, None)
        if subscription is not None:
            self._sockets.forget(subscription)

    def connect(self, peer: str, endpoint: str) -> Link:
        """The link to ``peer``, made if need be; ``peer`` may be empty until it introduces itself (`name`)."""
        known = self._links.get(peer) if peer else self._unnamed.get(endpoint)
        if known is not None:
            return known
        incoming = Incoming(next(self._sessions), self._given_up.get(peer))
        link = Link(self.incarnation, peer, endpoint, incoming, self._stalled)
        watcher = functools.partial(self._connection_changed, link)
        link.connection = self._dialers.dial(endpoint, watcher)
        self._watchers[link] = watcher
        if peer:
            self._links[peer] = link
            if not link.connection.connected:
                self._loop.call_later(self._dead_after_s, self._must_be_connected, link, link.connection.breaks)
        else:
            self._unnamed[endpoint] = link
        return link

    def name(self, endpoint: str, peer: str) -> Link | None:
        """Set the incarnation of the process behind an unnamed link."""
        link = self._unnamed.pop(endpoint, None)
        if link is not None:
            link.peer = peer
            link.incoming = Incoming(link.incoming.session, self._given_up.get(peer))
            self._links[peer] = link
        return link

    # --- saying -------------------------------------------------------------------------------------------------

    def link(self, peer: str) -> Link | None:
        return self._links.get(peer)

    def send(self, peer: str, message: Message) -> bool:
        """Send ``message`` to ``peer``, in order and acknowledged. False when there is no link to it. Any thread."""
        link = self._links.get(peer)
        if link is None:
            return False
        link.send(message)
        return True

    def dismiss(self, peer: str, endpoint: str, message: Message) -> None:
        """Send one message to a process that gets no link; a connection opened for it is closed after `DISMISS_S`."""
        link = self._links.get(peer)
        if link is None:
            link = self.connect(peer, endpoint)
            # By time, not by its ack: a new process at that endpoint would never acknowledge a frame for the old
            # incarnation.
            self._loop.call_later(DISMISS_S, self._dismissed, link)
        link.send(message)

    def publish(self, message: Message) -> None:
        """Broadcast ``message`` to all subscribers; it may be lost."""
        if self._publisher is not None:
            frame = codec.encode(Frame(PROTOCOL, self.incarnation, "", 0, 0, 0, 0, message))
            try:
                self._publisher.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self.counters["publish_dropped"] += 1

    @property
    def peers(self) -> list[str]:
        return list(self._links)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until every sent frame is acknowledged. False after ``timeout_s``."""
        deadline = self._loop.time() + timeout_s
        while any(link.undelivered for link in self._links.values()):
            if self._loop.time() > deadline:
                return False
            await asyncio.sleep(SETTLED_POLL_S)
        return True

    # --- closing ------------------------------------------------------------------------------------------------

    def drop(self, peer: str) -> None:
        """Close the link to ``peer``; later frames of it are those of an unknown peer."""
        link = self._links.pop(peer, None)
        if link is not None:
            self._close_link(link)
            self._given_up.pop(peer, None)
            self._given_up[peer] = link.incoming
            if len(self._given_up) > GIVEN_UP_KEPT:
                del self._given_up[next(iter(self._given_up))]

    def _dismissed(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            self.drop(link.peer)

    def drop_unnamed(self, endpoint: str) -> None:
        link = self._unnamed.pop(endpoint, None)
        if link is not None:
            self._close_link(link)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for timer in (self._watch, self._ack_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        for link in [*self._links.values(), *self._unnamed.values()]:
            self._close_link(link)
        self._links.clear()
        self._unnamed.clear()
        for socket in [*self._pulls, *self._subscriptions.values()]:
            self._sockets.forget(socket)
        if self._publisher is not None:
            self._publisher.close(linger=0)
        self._dialers.close()
        self._sockets.close()

    # --- hearing ------------------------------------------------------------------------------------------------

    def _opened(self, data: bytes) -> Envelope | None:
        try:
            return codec.opened(data)
        except OtherProtocol as error:
            self.other_protocol_at = time.monotonic()
            self._refuse("other_protocol", str(error))
        except ProtocolError as error:
            self._refuse("malformed", str(error))
        return None

    def _take(self, data: bytes) -> None:
        frame = self._opened(data)
        if frame is None:
            return
        if frame.receiver != self.incarnation and not (frame.receiver == "" and frame.seq == 0):
            self.counters["misdirected"] += 1  # addressed to an earlier incarnation at this endpoint
            return
        link = self._link_of(frame)
        if link is None:
            return
        if frame.ack_session and frame.ack and link.acked(frame.ack):
            self._resends.pop(link, None)
        verdict = link.incoming.accept(frame.seq)
        if verdict is Verdict.DELIVER:
            if frame.seq:
                self._owe(link)
            self._deliver(link, frame)
        elif verdict is Verdict.DUPLICATE:
            self.counters["duplicates"] += 1
            self._owe(link)
        else:
            self.counters["gaps"] += 1
            if verdict is Verdict.GAP:
                link.acknowledge(gap=True)

    def _deliver(self, link: Link, frame: Envelope) -> None:
        """Deliver a frame whose sequence number is accepted: if it fails, the next frame is delivered all the same."""
        try:
            message = codec.read(frame)
        except ProtocolError as error:
            self.counters["unreadable"] += 1
            if not link.unreadable_logged:
                link.unreadable_logged = True
                log.error("a message of %s cannot be read (told once per peer): %s", frame.sender, error)
            self._handler.unreadable(frame.sender, frame.request, str(error))
            return
        if type(message) is Ack:
            if message.gap:
                self._send_again(link)
            return
        self.counters["received"] += 1
        try:
            self._handler.received(frame.sender, message)
        except Exception as error:  # the outermost loop: one message must not end what others wait for
            self.counters["handler_errors"] += 1
            log.exception("%s of %s could not be dealt with", type(message).__name__, frame.sender)
            self._handler.unreadable(frame.sender, frame.request, describe(error))

    def _link_of(self, frame: Envelope) -> Link | None:
        """The link that ``frame`` belongs to; None when it is to be dropped."""
        link = self._links.get(frame.sender)
        standing = link.incoming.stand(frame.session, frame.ack_session) if link is not None else None
        if link is not None and standing is Standing.RENEWED:
            log.info("peer %s has given up its link to us", frame.sender)
            self._lose(link)
            link = None
        if link is None:
            link = self._introduce(frame)
            standing = link.incoming.stand(frame.session, frame.ack_session) if link is not None else None
        if standing is Standing.CURRENT:
            return link
        if link is not None:
            self.counters["stale_sessions"] += 1
            if standing is Standing.LAGGING:
                link.acknowledge()
        return None

    def _introduce(self, frame: Envelope) -> Link | None:
        message = self._read(frame)
        if message is None:
            return None
        if self._handler.introduced(frame.sender, message):
            return self._links.get(frame.sender)
        self._refuse("unknown_peers", f"{type(message).__name__} from {frame.sender!r}, whom nobody introduced")
        return None

    def _take_broadcast(self, data: bytes) -> None:
        frame = self._opened(data)
        message = self._read(frame) if frame is not None and frame.sender in self._links else None
        if frame is not None and isinstance(message, Abort):
            self._handler.received(frame.sender, message)

    def _read(self, frame: Envelope) -> Message | None:
        """Decode a message outside the order; None: it is malformed."""
        try:
            return codec.read(frame)
        except ProtocolError as error:
            self._refuse("malformed", str(error))
            return None

    def _short_connection(self) -> None:
        self.other_protocol_at = time.monotonic()

    def _refuse(self, kind: str, why: str) -> None:
        self.counters[kind] += 1
        if why not in self._logged_refusals and len(self._logged_refusals) < 100:
            self._logged_refusals.add(why)
            log.warning("dropped (%s): %s", kind, why)

    def _drain(self, socket: zmq.Socket[bytes], take: Callable[[bytes], None]) -> None:
        """The descriptor is edge-triggered: read until nothing is left, or come back by ourselves."""
        for _ in range(DRAIN_BUDGET):
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return  # nothing is left to read, or it was closed under us
            try:
                take(data)
            except Exception:  # the outermost loop: one message must not leave the rest of the socket unread
                self.counters["handler_errors"] += 1
                log.exception("a message could not be dealt with")
            if not _readable(socket):  # costs less than `zmq.Again`
                return
        self._loop.call_soon(self._drain, socket, take)

    # --- acknowledging ------------------------------------------------------------------------------------------

    def _owe(self, link: Link) -> None:
        if link.incoming.owed >= ACK_EVERY:
            link.acknowledge()
            return
        self._owing.add(link)
        if self._ack_timer is None:
            self._ack_timer = self._loop.call_later(ACK_DELAY_S, self._settle)

    def _settle(self) -> None:
        self._ack_timer = None
        owing, self._owing = self._owing, set()
        for link in owing:
            if link.incoming.owed:
                link.acknowledge()

    # --- sending again ------------------------------------------------------------------------------------------

    def _stalled(self, link: Link) -> None:
        """A link has frames that its connection did not accept. Any thread."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._retry_soon, link)

    def _retry_soon(self, link: Link) -> None:
        self._waiting.add(link)
        if self._stall_timer is None and not self._closed:
            self._stall_timer = self._loop.call_later(STALL_RETRY_S, self._retry)

    def _retry(self) -> None:
        self._stall_timer = None
        waiting, self._waiting = self._waiting, set()
        for link in waiting:  # one that is not connected is flushed when it is
            if link.connected and link.flush():
                self._retry_soon(link)

    def _send_again(self, link: Link) -> None:
        self.counters["resent"] += link.rewind()

    def _resend_due(self) -> None:
        """Send frames again that were not acknowledged in time: lost with a connection, or sent before registration."""
        # Armed first: a check that raises does not stop the later ones.
        self._watch = self._loop.call_later(RESEND_AFTER_S / 2, self._resend_due)
        now = self._loop.time()
        self._dialers.turn()
        for link in list(self._links.values()):
            if not link.unacked:
                self._resends.pop(link, None)
                continue
            due, delay_s = self._resends.setdefault(link, (now + RESEND_AFTER_S, RESEND_AFTER_S))
            if now >= due and link.connected:
                delay_s = min(delay_s * 2, RESEND_MOST_S)
                self._resends[link] = (now + delay_s, delay_s)
                self._send_again(link)

    # --- watching lives -----------------------------------------------------------------------------------------

    def _connection_changed(self, link: Link, connected: bool) -> None:
        if connected:
            self.counters["connected"] += 1
            self.counters["resent"] += link.rewind()
            if link.flush():
                self._retry_soon(link)
            return
        self.counters["disconnected"] += 1
        self._loop.call_later(RECONNECT_GRACE_S, self._must_be_connected, link, link.connection.breaks)

    def _must_be_connected(self, link: Link, since: int) -> None:
        """since: the break that this is the grace of; one after it has a grace of its own."""
        if self._closed or self._links.get(link.peer) is not link:
            return
        link.connection.look()
        if link.connected or link.connection.breaks != since:
            return
        log.info("peer %s at %s is gone", link.peer, link.endpoint)
        self._lose(link)

    def _lose(self, link: Link) -> None:
        link.lost = True
        self.drop(link.peer)
        self._handler.lost(link.peer)

    def _close_link(self, link: Link) -> None:
        self._owing.discard(link)
        self._resends.pop(link, None)
        self._waiting.discard(link)
        link.close()
        link.connection.leave(self._watchers.pop(link))


def _readable(socket: zmq.Socket[bytes]) -> bool:
    try:
        return bool(int(socket.getsockopt(zmq.EVENTS)) & READABLE)
    except zmq.ZMQError:  # closed under us
        return False
