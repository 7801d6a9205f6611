"""Exactly-once, in order, between two incarnations: sequence numbers, cumulative acks, go-back-N.

ZeroMQ keeps order on a connection but loses what was under way when it breaks, silently. So a sender keeps every
frame until it is acknowledged, and sends again from the first unacknowledged one when the connection is back or the
receiver reports a gap. Pure: no sockets, no clock; the caller passes frames in and takes frames out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Final

ACK_EVERY: Final = 32  # frames received before an ack is sent on its own; when idle a timer sends it earlier


class LinkSender:
    """The sender's half of one link. Not thread-safe: the caller holds the link's lock."""

    __slots__ = ("_frames", "_given", "last")  # one for each link

    def __init__(self) -> None:
        self.last = 0  #: The newest sequence number given out.
        self._frames: deque[bytes] = deque()  #: Not acknowledged, in order; the last one is ``last``.
        self._given = 0  #: How many of them, from the first on, the socket has; the others wait.

    def number(self) -> int:
        """The next frame's sequence number. Spent by `keep` alone: a frame that cannot be written leaves no hole."""
        return self.last + 1

    def keep(self, frame: bytes, *, sent: bool = False) -> None:
        """Keep the next frame until it is acknowledged. It waits to be sent; or the socket has it, with no backlog."""
        self.last += 1
        self._frames.append(frame)
        self._given += sent

    def next(self, most: int = 1, nbytes_most: int = 0) -> list[bytes]:
        """The frames to send now: so many at most, of so many bytes unless it is one. `sent` confirms that the socket
        took them.
        """
        found: list[bytes] = []
        for frame in itertools.islice(self._frames, self._given, self._given + most):
            nbytes_most -= len(frame)
            if found and nbytes_most < 0:
                break
            found.append(frame)
        return found

    def sent(self, count: int = 1) -> None:
        self._given += count

    def acked(self, ack: int) -> bool:
        """The receiver has everything up to ``ack``. True when that freed frames.

        An ack of frames never sent frees none. Acknowledged frames may be among those that wait after a rewind.
        """
        freed = ack - self.last + len(self._frames)
        if ack > self.last or freed <= 0:
            return False
        for _ in range(freed):
            self._frames.popleft()
        self._given = max(self._given - freed, 0)
        return True

    def rewind(self) -> int:
        """Send all unacknowledged frames again: the connection broke or frames are missing. Returns how many."""
        again, self._given = self._given, 0
        return again

    @property
    def unacked(self) -> int:
        """Frames given to the socket and not acknowledged yet."""
        return self._given

    @property
    def backlog(self) -> int:
        """Frames not given to the socket yet."""
        return len(self._frames) - self._given

    def frames(self) -> Iterator[bytes]:
        """Everything that the receiver may not have."""
        return iter(self._frames)

    def after(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """The frames that follow ``seq``, with their numbers."""
        first = self.last - len(self._frames) + 1
        return ((number, frame) for number, frame in enumerate(self._frames, first) if number > seq)


class Verdict(Enum):
    DELIVER = "deliver"  #: The next in order, or outside the order.
    DUPLICATE = "duplicate"  #: Received before: acknowledge again, do not deliver.
    GAP = "gap"  #: Frames before it are missing: request them, do not deliver.
    #: The state after GAP; a resend was requested already. Requesting one per frame would resend all each time.
    ASKED = "asked"


class Standing(Enum):
    """The session of a link that a frame belongs to. Either end may drop a link alone; the other must detect it."""

    CURRENT = "current"
    OLD = "old"  #: Sent in a session that its sender has dropped since: ignore.
    LAGGING = "lagging"  #: Sent to a session that we have dropped: ignore it, and send an ack so that the sender knows.
    RENEWED = "renewed"  #: Its sender has dropped the session that we still have: drop ours.


class LinkReceiver:
    """The receiver's half of one link.

    session: our number of this link, higher than that of any link to the same peer before.
    before:  the session before this one, which we dropped. If the peer had received that session, it will drop its own
             when it receives this one, and frames that it retransmits until then are discarded. Otherwise the peer
             continues its session from the last frame that we received.
    """

    __slots__ = (  # one for each link
        "_asked",
        "_peer_has_session",
        "_resumed",
        "_void",
        "acknowledged",
        "last_received",
        "owed",
        "peer_session",
        "session",
    )

    def __init__(self, session: int, before: LinkReceiver | None = None) -> None:
        self.session = session
        self.peer_session = 0  #: The peer's session that all frames here belong to; 0: no frame was received yet.
        self.last_received = 0  #: Everything up to here has been delivered.
        self.owed = 0  #: Frames delivered since the last ack went out.
        self.acknowledged = False  #: An ack of a frame has gone out, which may be lost.
        self._asked = False
        self._peer_has_session = False  #: A frame has shown that the peer receives this session.
        self._void = 0  #: Sessions of the peer up to this one are discarded.
        self._resumed = (0, 0)  #: A session of the peer, and the last frame of it that was received before.
        if before is not None:
            self._void = max(before._void, before.peer_session if before._peer_has_session else 0)
            self._resumed = (
                (before.peer_session, before.last_received) if before.peer_session > self._void else before._resumed
            )

    def stand(self, session: int, ack_session: int) -> Standing:
        """Classify a frame of the peer's ``session`` that acknowledges our session ``ack_session``."""
        if session == 0:  # sent before registration
            return Standing.CURRENT
        if session <= self._void:
            return Standing.LAGGING
        if 0 < self.peer_session < session:  # it has dropped the session that we receive, whatever it acknowledges
            return Standing.RENEWED
        if ack_session not in (0, self.session):
            return Standing.LAGGING
        if self.peer_session == 0:
            self.peer_session = session
            if session == self._resumed[0]:
                self.last_received = self._resumed[1]
        if session == self.peer_session:
            self._peer_has_session = self._peer_has_session or ack_session == self.session
            return Standing.CURRENT
        return Standing.OLD if session < self.peer_session else Standing.RENEWED

    def follows(self, session: int, ack_session: int, seq: int) -> bool:
        """Accept a frame as nearly all are: the next, or one outside the order, of the sessions that both ends know.

        False: `stand` and `accept` decide; nothing has changed.
        """
        if not (0 < session == self.peer_session and ack_session == self.session and self._peer_has_session):
            return False
        if seq == 0:
            return True
        if seq != self.last_received + 1:
            return False
        self.last_received = seq
        self.owed += 1  # in this order: see `accept`
        self._asked = False
        return True

    def accept(self, seq: int) -> Verdict:
        if seq == 0:
            return Verdict.DELIVER
        following = seq == self.last_received + 1
        if following:
            self.last_received = seq
        self.owed += 1  # in this order: what another thread acknowledges in between is owed again
        if following:
            self._asked = False
            return Verdict.DELIVER
        if seq <= self.last_received:
            return Verdict.DUPLICATE
        asked, self._asked = self._asked, True
        return Verdict.ASKED if asked else Verdict.GAP

    def acked(self) -> int:
        """The value to write into an outgoing frame's ``ack``; nothing is owed afterwards."""
        self.owed = 0
        self.acknowledged = self.last_received > 0
        return self.last_received
