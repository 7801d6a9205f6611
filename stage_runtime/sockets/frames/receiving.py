"""Classifies each received frame (new, repeated, of an unknown peer), acknowledges it and delivers its message.

`reading` reads the frames, `rules.flow.links` knows which one follows; here they meet the links. It runs on the I/O
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from stage_runtime.errors import ProtocolError, describe
from stage_runtime.rules.flow.links import Standing, Verdict
from stage_runtime.sockets.connections.accepting import Accepting
from stage_runtime.sockets.connections.links import Link
from stage_runtime.sockets.frames.pacing import ReadPacing
from stage_runtime.sockets.frames.reading import Reading
from stage_runtime.sockets.frames.repeats import Repeats
from stage_runtime.sockets.frames.resending import Acknowledging, Resending
from stage_runtime.wire import codec
from stage_runtime.wire.frames import PROTOCOL, Envelope, Frame, RequestRef
from stage_runtime.wire.messages import Abort, Ack, Beat, Message

log = logging.getLogger(__name__)


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


class LinkEnds(NamedTuple):
    """The three ways in which a frame ends links."""

    renew: Callable[[Link], Link]  #: Drop it, and return a new one to its peer.
    lose: Callable[[Link], None]  #: Its peer has lost what was sent on it.
    replaced: Callable[[str, str], None]  #: Another process is at this endpoint, with this incarnation.


class Receiving:
    """The frames of all peers of a process."""

    def __init__(
        self,
        incarnation: str,
        handler: Handler,
        links: Mapping[str, Link],
        *,
        reading: Reading,
        pacing: ReadPacing,
        acks: Acknowledging,
        resending: Resending,
        ends: LinkEnds,
    ) -> None:
        """links: by incarnation; others add to them and remove."""
        self._incarnation = incarnation
        self._handler = handler
        self._links = links
        self._counters = reading.counters
        self._reading = reading
        self._pacing = pacing
        self._acks = acks
        self._resending = resending
        self._ends = ends
        self._repeats = Repeats()

    def forget(self, link: Link) -> None:
        """It is closed."""
        self._repeats.forget(link)

    def take(self, data: bytes, accepting: Accepting | None = None, endpoint: str = "") -> None:
        """accepting: where it came, if not by a coordinator or as an answer. endpoint: of the connection that it is an
        answer on.
        """
        repeat = self._repeats.find(data)
        if repeat is not None and repeat.follows():
            self._pacing.beats += 1
            self._receive(repeat.envelope, repeat.message)
            return
        frame = self._reading.opened(data)
        if frame is None:
            return
        if frame.receiver != self._incarnation and not (frame.receiver == "" and frame.seq == 0):
            self._misdirected(frame, accepting)
            return
        link = self._links.get(frame.sender)
        if link is not None and link.incoming.follows(frame.session, frame.ack_session, frame.seq):
            link.used = True
            if accepting is not None:
                link.accepting, link.route = accepting, accepting.route
            if frame.ack and link.acked(frame.ack):
                self._resending.acknowledged(link)
            if frame.seq:
                self._acks.owe(link)
            self._deliver(link, frame)
        elif endpoint and not frame.session:
            self._take_correction(frame, endpoint)
        else:
            self._take_other(frame, accepting)

    def _misdirected(self, frame: Envelope, accepting: Accepting | None) -> None:
        """It is addressed to an earlier incarnation at this endpoint. Its sender, which was stopped when that one ended
        and this process took its place, has seen its connection break and come back, and would send there for ever.
        """
        self._counters["misdirected"] += 1
        if accepting is not None:
            correction = Frame(PROTOCOL, self._incarnation, frame.sender, 0, 0, 0, 0, Ack())
            accepting.answer(accepting.route, codec.encode(correction))

    def _take_correction(self, frame: Envelope, endpoint: str) -> None:
        """An answer of no session: another process is at the endpoint than the one that this process sends to."""
        if type(self._reading.message(frame)) is Ack:
            self._ends.replaced(endpoint, frame.sender)

    def _take_other(self, frame: Envelope, accepting: Accepting | None) -> None:
        """A frame that is not as nearly all are."""
        link = self._link_of(frame, accepting)
        if link is None:
            return
        link.used = True
        if accepting is not None:
            link.accepting, link.route = accepting, accepting.route
        if frame.ack_session and frame.ack and link.acked(frame.ack):
            self._resending.acknowledged(link)
        verdict = link.incoming.accept(frame.seq)
        if verdict is Verdict.DELIVER:
            if frame.seq:
                self._acks.owe(link)
            self._deliver(link, frame)
        elif verdict is Verdict.DUPLICATE:
            self._counters["duplicates"] += 1
            self._acks.owe(link, again=True)
        else:
            self._counters["gaps"] += 1
            if verdict is Verdict.GAP:
                self._acks.now(link, gap=True)

    def _deliver(self, link: Link, frame: Envelope) -> None:
        """Deliver a frame whose sequence number is accepted: if it fails, the next frame is delivered all the same."""
        try:
            message = codec.read(frame)
        except ProtocolError as error:
            self._counters["unreadable"] += 1
            if not link.unreadable_logged:
                link.unreadable_logged = True
                log.error("a message of %s cannot be read (logged once per peer): %s", frame.sender, error)
            self._handler.unreadable(frame.sender, frame.request, str(error))
            return
        if type(message) is Ack:
            if message.gap:
                self._resending.again(link)
            return
        if type(message) is Beat:
            self._pacing.beats += 1
            if not frame.seq:
                self._repeats.keep(link, frame, message)
        self._receive(frame, message)

    def _receive(self, frame: Envelope, message: Message) -> None:
        self._counters["received"] += 1
        try:
            self._handler.received(frame.sender, message)
        except Exception as error:  # the outermost loop: one message must not end what others wait for
            self._counters["handler_errors"] += 1
            log.exception("handling %s from %s failed", type(message).__name__, frame.sender)
            self._handler.unreadable(frame.sender, frame.request, describe(error))

    def _link_of(self, frame: Envelope, accepting: Accepting | None) -> Link | None:
        """The link that ``frame`` belongs to; None when it is to be dropped."""
        link = self._links.get(frame.sender)
        standing = link.incoming.stand(frame.session, frame.ack_session) if link is not None else None
        if link is not None and standing is Standing.RENEWED:
            log.info("peer %s has dropped its link to this process", frame.sender)
            if link.only_receives:  # nothing of ours is lost with it, and the peer reports what it has lost
                link = self._ends.renew(link)
            else:
                self._ends.lose(link)
                link = None
            standing = None if link is None else link.incoming.stand(frame.session, frame.ack_session)
        if link is None:
            link = self._introduce(frame)
            standing = link.incoming.stand(frame.session, frame.ack_session) if link is not None else None
        if standing is Standing.CURRENT:
            return link
        if link is not None:
            self._counters["stale_sessions"] += 1
            if accepting is not None:
                link.accepting, link.route = accepting, accepting.route
            if standing is Standing.LAGGING:
                self._acks.now(link)
        return None

    def _introduce(self, frame: Envelope) -> Link | None:
        message = self._reading.message(frame)
        if message is None:
            return None
        if self._handler.introduced(frame.sender, message):
            return self._links.get(frame.sender)
        why = f"{type(message).__name__} of a process without a link"
        self._reading.refuse("unknown_peers", why, peer=frame.sender)
        return None

    def take_broadcast(self, frame: Envelope) -> None:
        message = self._reading.message(frame) if frame.sender in self._links else None
        if isinstance(message, Abort):
            self._handler.received(frame.sender, message)
