"""Exactly-once, in order, between two incarnations: sequence numbers, cumulative acks, go-back-N.

ZeroMQ keeps order on a connection but loses what was under way when it breaks, silently. So a sender keeps every
frame until it is heard, and sends again from the first unheard one when the connection comes back or the receiver
reports a gap. Pure: no sockets, no clock; the caller brings frames and carries frames away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Final

ACK_EVERY: Final = 32  # frames heard before an ack goes out on its own; at rest a timer sends it earlier


class Outgoing:
    """The sender's half of one link. Not thread-safe: the caller holds the link's lock."""

    def __init__(self) -> None:
        self._last = 0  #: The newest sequence number given out.
        self._unacked: deque[tuple[int, bytes]] = deque()  #: Given to the socket, not acknowledged; ascending.
        self._waiting: deque[tuple[int, bytes]] = deque()  #: Not given to the socket; all after ``_unheard``.

    def number(self) -> int:
        """The next frame's sequence number. Spent by `keep` alone: a frame that cannot be written leaves no hole."""
        return self._last + 1

    def keep(self, seq: int, frame: bytes) -> None:
        """Hold a frame until it is heard; it waits to be sent."""
        self._last = seq
        self._waiting.append((seq, frame))

    def next(self) -> bytes | None:
        """The frame to send now, if any; `sent` says that the socket took it."""
        return self._waiting[0][1] if self._waiting else None

    def sent(self) -> None:
        self._unacked.append(self._waiting.popleft())

    def acked(self, ack: int) -> bool:
        """The receiver has everything up to ``ack``. True when that freed something. A lie frees nothing."""
        if ack > self._last:
            return False
        freed = False
        for queue in (self._unacked, self._waiting):  # after a rewind, heard frames may wait again
            while queue and queue[0][0] <= ack:
                queue.popleft()
                freed = True
        return freed

    def rewind(self) -> int:
        """Send everything unheard again: the connection broke or frames are missing. Returns how many."""
        again = len(self._unacked)
        self._waiting.extendleft(reversed(self._unacked))
        self._unacked.clear()
        return again

    @property
    def unacked(self) -> int:
        """Frames given to the socket and not acknowledged yet."""
        return len(self._unacked)

    @property
    def backlog(self) -> int:
        """Frames not given to the socket yet."""
        return len(self._waiting)

    def frames(self) -> Iterator[bytes]:
        """Everything that the receiver may not have."""
        yield from (frame for queue in (self._unacked, self._waiting) for _, frame in queue)


class Verdict(Enum):
    DELIVER = "deliver"  #: The next in order, or outside the order.
    DUPLICATE = "duplicate"  #: Heard before: acknowledge again, deliver not.
    GAP = "gap"  #: Frames before it are missing: ask for them, deliver not.
    ASKED = "asked"  #: As GAP; they were asked for already. Asking once per frame would have all sent again each time.


class Standing(Enum):
    """Which of two ends' links a frame belongs to. Either end may give a link up alone; the other must learn of it."""

    CURRENT = "current"
    OLD = "old"  #: Said on a link that its sender has given up since: ignore.
    LAGGING = "lagging"  #: Said to a link that we have given up: ignore, and say something, so that it learns.
    RENEWED = "renewed"  #: Its sender has given up the link that we still have: so must we.


class Incoming:
    """The receiver's half of one link.

    session: our number of this link, higher than that of any link to the same peer before.
    before:  of the link before this one, which we gave up. What the peer says again of what it said before it had
             heard anything names no link of ours. Where it did hear that link later, it will give up its own, too, once
             it hears this one: its words of before are void. Else it may go on, from where it had come to.
    """

    def __init__(self, session: int, before: Incoming | None = None) -> None:
        self.session = session
        self.peer_session = 0  #: The peer's session that all frames here belong to; 0: none has come yet.
        self.last_received = 0  #: Everything up to here has been delivered.
        self.owed = 0  #: Frames delivered since the last ack went out.
        self._asked = False
        self._peer_has_session = False  #: A frame has shown that the peer hears this very link.
        self._void = 0  #: No session of the peer's up to here is heard.
        self._resumed = (0, 0)  #: A session of the peer's, and what of it was heard on the link before.
        if before is not None:
            self._void = max(before._void, before.peer_session if before._peer_has_session else 0)
            self._resumed = (
                (before.peer_session, before.last_received) if before.peer_session > self._void else before._resumed
            )

    def stand(self, session: int, ack_session: int) -> Standing:
        """Place a frame of the peer's ``session``, which has heard our session ``ack_session``."""
        if session == 0:  # said before its sender knew us: an introduction
            return Standing.CURRENT
        if session <= self._void:
            return Standing.LAGGING
        if 0 < self.peer_session < session:  # whichever link of ours it hears: it has given up the one that we hear
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

    def accept(self, seq: int) -> Verdict:
        if seq == 0:
            return Verdict.DELIVER
        following = seq == self.last_received + 1
        if following:
            self.last_received = seq
        self.owed += 1  # after ``heard``: an ack that another thread writes in between covers it or is owed again
        if following:
            self._asked = False
            return Verdict.DELIVER
        if seq <= self.last_received:
            return Verdict.DUPLICATE
        asked, self._asked = self._asked, True
        return Verdict.ASKED if asked else Verdict.GAP

    def acked(self) -> int:
        """What to write into an outgoing frame's ``ack``; nothing is owed afterwards."""
        self.owed = 0
        return self.last_received
