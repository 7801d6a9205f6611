"""One link to one peer: a connection under `rules.links`, usable from any thread.

A worker thread sends straight from where the result was made: handing every message to the I/O thread first would
cost a thread switch per hop. The lock makes the socket's change of threads legal (libzmq asks for a full fence).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from threading import Lock

import zmq

from stage_runtime.rules.links import Incoming, Outgoing
from stage_runtime.sockets.dialing import Connection
from stage_runtime.wire import codec
from stage_runtime.wire.messages import PROTOCOL, Ack, Frame, Message


class Link:
    """Sends numbered frames to ``peer`` and keeps them until acknowledged; tracks what was received from it."""

    def __init__(
        self,
        me: str,
        peer: str,
        endpoint: str,
        incoming: Incoming,
        stalled: Callable[[Link], None],
    ) -> None:
        self.peer = peer  #: Its incarnation; empty until it has introduced itself.
        self.endpoint = endpoint
        self.incoming = incoming  #: Touched by the I/O thread, read by senders.
        self.connection: Connection  #: Set once, by its maker.
        self.lost = False
        self.unreadable_logged = False  #: A message of the peer's could not be read, and the log has it.
        self._me = me
        self._stalled = stalled  #: Told (in any thread) that frames wait for the socket.
        self._outgoing = Outgoing()
        self._lock = Lock()
        self._closed = False

    def send(self, message: Message) -> None:
        """Send ``message``, in order and acknowledged: exactly once if the peer lives. Never blocks.

        Raises: ValueRefused: it cannot be encoded; no sequence number is spent.
        """
        with self._lock:
            if self._closed:
                return
            seq = self._outgoing.number()
            self._outgoing.keep(seq, self._frame(seq, message))
            waiting = self._flush()
        if waiting:
            self._stalled(self)

    def send_unordered(self, message: Message) -> None:
        """Send ``message`` outside the order and unacknowledged; it may be lost (Hello, Ack)."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(zmq.Again):
                    self.connection.send(self._frame(0, message))

    def acknowledge(self, *, gap: bool = False) -> None:
        self.send_unordered(Ack(gap))

    def acked(self, ack: int) -> bool:
        """The peer has everything up to ``ack``. True when that was news."""
        with self._lock:
            return self._outgoing.acked(ack)

    def rewind(self) -> int:
        """Send all unacknowledged frames again. Returns how many."""
        with self._lock:
            if self._closed:
                return 0
            again = self._outgoing.rewind()
            self._flush()
        return again

    def flush(self) -> bool:
        """Give waiting frames to the socket. True when some still wait."""
        with self._lock:
            return not self._closed and self._flush()

    @property
    def connected(self) -> bool:
        return self.connection.connected

    @property
    def unacked(self) -> int:
        return self._outgoing.unacked

    @property
    def undelivered(self) -> int:
        return self._outgoing.unacked + self._outgoing.backlog

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _frame(self, seq: int, message: Message) -> bytes:
        incoming = self.incoming
        session = incoming.session if self.peer else 0  # sessions begin with registration
        ack_session = incoming.peer_session
        return codec.encode(Frame(PROTOCOL, self._me, self.peer, session, ack_session, seq, incoming.acked(), message))

    def _flush(self) -> bool:
        outgoing = self._outgoing
        while (frame := outgoing.next()) is not None:
            try:
                self.connection.send(frame)
            except zmq.Again:
                return True
            outgoing.sent()
        return False
