"""One link to one peer: a connection under `rules.flow.links`, usable from any thread.

A worker thread sends straight from where the result was made: handing every message to the I/O thread first would
cost a thread switch per hop. The lock makes the socket's change of threads legal (libzmq asks for a full fence).

A link may *sleep*: it has no connection, and keeps its session. Frames that are sent on it wait until the I/O thread
has connected it. So a link at rest costs no descriptor, and the peer does not notice that it sleeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from threading import Lock
from typing import Final

import zmq

from stage_runtime.rules.flow.links import LinkReceiver, LinkSender
from stage_runtime.sockets.connections.accepting import Accepting
from stage_runtime.sockets.connections.dialing import Connection
from stage_runtime.wire import codec
from stage_runtime.wire.frames import PROTOCOL, Frame
from stage_runtime.wire.messages import Ack, Message

TOGETHER: Final = 64  # frames of one message of a socket: a peer reads all of them before it looks at other peers
TOGETHER_NBYTES: Final = 1 << 18  # of them, unless it is one: libzmq hands a message over when all of it has come


class Link:
    """Sends numbered frames to ``peer`` and keeps them until acknowledged; tracks what was received from it."""

    __slots__ = (
        "_detoured",
        "_detours_from",
        "_lock",
        "_me",
        "_outgoing",
        "_stalled",
        "_watch",
        "_watched",
        "accepting",
        "closed",
        "connection",
        "endpoint",
        "incoming",
        "is_known",
        "keep_awake",
        "lost",
        "peer",
        "repeat",
        "route",
        "unreadable_logged",
        "used",
    )

    def __init__(
        self,
        me: str,
        peer: str,
        endpoint: str,
        incoming: LinkReceiver,
        *,
        stalled: Callable[[Link], None],
        watch: Callable[[Link], None],
    ) -> None:
        """Called in any thread. stalled: frames wait for the connection. watch: frames wait for their acknowledgement,
        and none did before.
        """
        self.peer = peer  #: Its incarnation; empty until it has introduced itself.
        self.endpoint = endpoint
        self.incoming = incoming  #: Touched by the I/O thread, read by senders.
        self.connection: Connection | None = None  #: None: it sleeps. Set by the I/O thread.
        self.accepting: Accepting | None = None  #: The socket by which the peer's last frame came; None: by none.
        self.route = b""  #: The route of the peer's connection there.
        self.keep_awake = False  #: No other process notices its peer's death.
        self.used = True  #: It was used since `channels` has looked last: a frame was sent or received.
        self.is_known = False  #: The peer has acknowledged a frame: it has this link.
        self.lost = False
        self.repeat: bytes | None = None  #: Its key in `sockets.frames.repeats`.
        self.unreadable_logged = False  #: A message of the peer's could not be read, and the log has it.
        self._me = me
        self._stalled = stalled
        self._watch = watch
        self._outgoing = LinkSender()
        self._detours_from = 0  #: The last frame before the connection that is being made, or is there.
        self._detoured = (0, 0)  #: The last frame since then that went another way as well, and the bytes of all those.
        self._watched = False  #: The I/O thread looks after unacknowledged frames. False where all are acknowledged.
        self._lock = Lock()
        self.closed = False

    def send(self, message: Message, *, later: bool = False) -> None:
        """Send ``message``, in order and acknowledged: exactly once if the peer lives. Never blocks.

        later: only number and keep it; `send_kept` follows.
        Raises: ValueRefused: it cannot be encoded; no sequence number is spent.
        """
        with self._lock:
            if self.closed:
                return
            self.used = True
            stalled = self._give(message, later=later)
            watched, self._watched = self._watched, True
        if stalled:
            self._stalled(self)
        if not watched:
            self._watch(self)

    def send_kept(self) -> None:
        """Send what was kept for later, if nothing has sent it meanwhile."""
        with self._lock:
            stalled = not self.closed and self._flush()
        if stalled:
            self._stalled(self)

    def _give(self, message: Message, *, later: bool) -> bool:
        """Number ``message``, keep it, and give it to the socket unless ``later``. True when the socket has no room."""
        outgoing = self._outgoing
        frame = self._frame(outgoing.number(), message)
        if later:
            outgoing.keep(frame)
            return False
        if not outgoing.backlog and self.connection is not None:
            try:
                self.connection.send(frame)
                outgoing.keep(frame, sent=True)
                return False
            except zmq.Again:
                pass
        outgoing.keep(frame)
        return self._flush()

    def send_unordered(self, message: Message) -> None:
        """Send ``message`` outside the order and unacknowledged; it may be lost (Hello, Ack, Beat)."""
        with self._lock:
            if not self.closed and self.connection is not None:
                self.used = True
                with contextlib.suppress(zmq.Again):
                    self.connection.send(self._frame(0, message))

    def acknowledge(self, *, gap: bool = False) -> bool:
        """Acknowledge by our connection, or by the peer's. False: none is known. If it is lost, the peer sends its
        frames again.
        """
        with self._lock:
            if self.closed:
                return True
            connection, accepting = self.connection, self.accepting
            if connection is not None and connection.connected:
                with contextlib.suppress(zmq.Again):
                    connection.send(self._frame(0, Ack(gap)))
                return True
            if accepting is None:
                return False
            if not accepting.answer(self.route, self._frame(0, Ack(gap))):
                self.accepting = None
            return True

    def acked(self, ack: int) -> bool:
        """The peer has everything up to ``ack``. True when that was news."""
        with self._lock:
            return self._outgoing.acked(ack)

    def rewind(self) -> int:
        """All unacknowledged frames wait to be sent again. Returns how many."""
        with self._lock:
            return 0 if self.closed else self._outgoing.rewind()

    def flush(self) -> bool:
        """Give waiting frames to the socket. True when some still wait."""
        with self._lock:
            return not self.closed and self._flush()

    def detours(self, most: int, nbytes_most: int) -> list[bytes]:
        """Frames that wait for the connection, for another way to the peer: each once, the oldest first.

        A connection has so many at most, and so many bytes.
        """
        found = []
        with self._lock:
            last, nbytes = self._detoured
            for seq, frame in self._outgoing.after(last):
                nbytes += len(frame)
                if self.closed or seq > self._detours_from + most or nbytes > nbytes_most:
                    break
                found.append(frame)
                self._detoured = seq, nbytes
        return found

    def at_rest(self) -> bool:
        """Whether nothing waits; then the next frame calls ``waiting`` again."""
        with self._lock:
            self._watched = bool(self.undelivered)
            return not self._watched

    def sleep(self) -> Connection | None:
        """Take the connection away, which the caller leaves. None: frames wait, or it has none."""
        with self._lock:
            if self.undelivered or self.incoming.owed:
                return None
            connection, self.connection = self.connection, None
            self._detours_from = self._outgoing.last
            self._detoured = (self._detours_from, 0)
            return connection

    @property
    def only_receives(self) -> bool:
        """Whether this end has sent nothing on it that could be lost."""
        return self.connection is None and self._outgoing.last == 0

    @property
    def connected(self) -> bool:
        connection = self.connection
        return connection is not None and connection.connected

    @property
    def unacked(self) -> int:
        return self._outgoing.unacked

    @property
    def undelivered(self) -> int:
        return self._outgoing.unacked + self._outgoing.backlog

    def close(self) -> None:
        with self._lock:
            self.closed = True

    def _frame(self, seq: int, message: Message) -> bytes:
        incoming = self.incoming
        session = incoming.session if self.peer else 0  # sessions begin with registration
        ack_session = incoming.peer_session
        return codec.encode(Frame(PROTOCOL, self._me, self.peer, session, ack_session, seq, incoming.acked(), message))

    def _flush(self) -> bool:
        outgoing, connection = self._outgoing, self.connection
        while frames := outgoing.next(TOGETHER, TOGETHER_NBYTES):
            if connection is None:
                return True
            try:
                connection.send(*frames)
            except zmq.Again:
                return True
            outgoing.sent(len(frames))
        return False
