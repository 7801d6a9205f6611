"""A process's ZeroMQ sockets: opened, secured, read by file descriptor, closed; failed handshakes are reported.

Here: what all sockets share. Not here: messages and peers (`channels`, `links`). ``zmq.asyncio`` is not used: it
costs twice the latency. Called by `channels`, on the process's I/O thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import zmq

from stage_runtime.errors import ConfigurationError
from stage_runtime.rules.members import beats
from stage_runtime.sockets.endpoints import addresses, timers
from stage_runtime.sockets.endpoints.addresses import CurveSecurity, check, is_local
from stage_runtime.sockets.endpoints.doors import Doors

MAX_HEARTBEAT_MS: Final = 2**31 - 1  # libzmq takes a C int
#: The end that gets it computes ms in 16 bits (libzmq issue 4226, in 4.3.5): 80 s became 14 s there, and it broke the
#: connection after each heartbeat.
MAX_TTL_MS: Final = 65_500
SUBSCRIPTION_FACTOR: Final = 40.0
BUFFERED: Final = 2000  # frames on either side of a socket
#: Connections that wait to be accepted, at most; the kernel has a bound of its own (net.core.somaxconn). libzmq's
#: 100 turns most of a thousand processes away that connect at once, and each waits before it tries again.
ACCEPTING: Final = 4096
#: An option of a context, as libzmq numbers it; pyzmq has no name for it. It makes a message
#: stay in the buffer of 18 KiB that it was read into, and keep it, though pyzmq copies it all the same.
ZERO_COPY_RECV: Final = 10
#: How late libzmq's threads may be for their timers. Connections whose heartbeats are due within it are checked
#: together from then on, in one wake-up.
TIMER_SLACK_S: Final = 0.02
ABANDONED_S: Final = (60, 20, 3)  # of a connection that others made: before the first probe, between them; how many
#: The time that a peer has to prove that it is a member, or to speak ZeroMQ at all; libzmq's own 30 s let idle
#: connections hold a descriptor each for as long. A busy machine takes a second for CURVE.
HANDSHAKE_MS: Final = 4000
#: Why a peer that connected failed the handshake.
HANDSHAKE_FAILURES: Final[dict[int, str]] = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not have the pipeline's key, or uses another protocol",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it left, or sent nothing in time",
}
#: A peer that disconnects so soon has refused our type of socket: a program of another protocol does so,
#: and libzmq gives no reason under CURVE.
SHORT_S: Final = 0.3
EVENT: Final = struct.Struct("=hi")  # of a monitor: the kind and the value


class SocketEvent(NamedTuple):
    """The events that libzmq reports of a connection. value: a descriptor or an error number, by kind."""

    kind: int
    value: int
    endpoint: str  #: The remote one of an outgoing connection, our own of an incoming one.


class Heartbeats(NamedTuple):
    """libzmq's times of one connection, in ms."""

    interval: int
    timeout: int
    ttl: int  #: How long the other end waits for the next heartbeat; 0: for ever.

    rare: bool  #: A machine that vanishes is not found by them in time.

    def set(self, socket: zmq.Socket[bytes]) -> None:
        """Sets them for connections that are opened from now on."""
        socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = self.interval, self.timeout, self.ttl
        # The kernel notices a machine that is gone where they are rare, at no cost of ours: probes while nothing is
        # sent, else by what is not acknowledged.
        third_s = max(self.timeout // 2000, 1)
        socket.tcp_keepalive = int(self.rare)
        socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = third_s, third_s, 2
        socket.tcp_maxrt = 3 * self.timeout // 2 if self.rare else 0


def heartbeats(dead_after_s: float, factor: float = 1.0) -> Heartbeats:
    """The heartbeats for any time that a spec can set. factor: how many times as long as usual the interval is.

    A frozen peer is seen one timeout after a beat, so at most an interval later: within ``dead_after_s`` in all, which
    leaves the grace for reconnecting to the promised 4 s. Each time more of the factor adds a third of it. Members tell
    a coordinator no ttl: its libzmq would keep a timer for each, and walk over all timers for each message that comes.
    The kernel's keepalive closes the connections of a machine that is gone.
    """
    third = max(min(int(dead_after_s * 1000 / 3), MAX_HEARTBEAT_MS // 2), 1)  # 0 would switch them off
    interval = max(min(int(dead_after_s * 1000 / 3 * factor), MAX_HEARTBEAT_MS // 2), 1)
    timeout = max(min(int(dead_after_s * 2000 / 3), MAX_HEARTBEAT_MS), 1)
    ttl = interval + timeout + third
    announced = ttl <= MAX_TTL_MS and factor <= beats.RAREST
    return Heartbeats(interval, timeout, ttl if announced else 0, factor > 1)


class Sockets:
    """One context and the sockets made in it. `close` when all that were made are closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        security: CurveSecurity | None,
        dead_after_s: float,
        handshake_failed: Callable[[str], None],
        short_connection: Callable[[], None],
    ) -> None:
        """handshake_failed: called with the reason. short_connection: a peer connected and left within `SHORT_S`,
        or has another key."""
        self._loop = loop
        self._security = security
        self._dead_after_s = dead_after_s
        self._handshake_failed = handshake_failed
        self._short_connection = short_connection
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.max_sockets = self._context.get(zmq.SOCKET_LIMIT)
        with contextlib.suppress(zmq.ZMQError):  # another version may not know it
            self._context.set(ZERO_COPY_RECV, 0)
        with timers.slack(TIMER_SLACK_S):
            self._context.socket(zmq.PAIR).close()  # libzmq starts its threads with the first socket
        self._monitors = itertools.count()
        self._doors = Doors(loop)
        self._accept_monitors: list[zmq.Socket[bytes]] = []  #: Monitors of the sockets that others connect to.

    def make(self, kind: int, *, accepts: bool = False) -> zmq.Socket[bytes]:
        """A socket that is neither bound nor connected; heartbeats find a frozen peer. accepts: it is to be bound."""
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = BUFFERED
        socket.backlog = ACCEPTING
        if accepts:
            # The connecting end beats, and announces how long to wait for it: beats of both ends cost twice as much.
            socket.heartbeat_ivl = 0
            socket.handshake_ivl = HANDSHAKE_MS
            # It may announce nothing (`MAX_TTL_MS`). A machine that vanished must not hold our descriptors for ever.
            socket.tcp_keepalive = 1
            socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = ABANDONED_S
        else:
            # A broadcast may be lost, and its publisher has a link.
            self.heartbeats(SUBSCRIPTION_FACTOR if kind == zmq.SUB else 1.0).set(socket)
        socket.ipv6 = True
        return socket

    def heartbeats(self, factor: float = 1.0) -> Heartbeats:
        return heartbeats(self._dead_after_s, factor)

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Returns the endpoint as bound. Failed handshakes at it are reported with their reason.

        Raises: ConfigurationError: it cannot be bound; the message has the reason. The socket is closed then.
        """
        with closed_on_failure(socket):
            if self._security is not None and not is_local(check(endpoint)):
                # The socket has no guard: for each connection that was let in by it, libzmq keeps a pipe to it, 11 KiB.
                self._security.server(socket, guarded=False)
            else:
                socket.zap_domain = addresses.DOMAIN
            monitor = self.monitor(socket, sum(HANDSHAKE_FAILURES) | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            with closed_on_failure(monitor):
                try:
                    socket.bind(check(endpoint))
                except zmq.ZMQError as error:
                    raise ConfigurationError(
                        f"cannot listen at {endpoint}: {zmq.strerror(error.errno or 0)}"
                    ) from error
        bound = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self._accept_monitors.append(monitor)
        self._doors.add(bound)
        accepted: dict[int, float] = {}
        self.read(monitor, lambda: self._watch(monitor, bound, accepted))
        return bound

    def connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        if self._security is not None and not is_local(check(endpoint)):
            self._security.client(socket)
        socket.connect(check(endpoint))

    def monitor(self, socket: zmq.Socket[bytes], kinds: int) -> zmq.Socket[bytes]:
        """The monitor on which libzmq reports events of these kinds at ``socket``; to be read with `events`."""
        address = f"inproc://monitor-{next(self._monitors)}"
        socket.monitor(address, kinds)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0  # a full one would block libzmq's thread, and with it our heartbeats, while we compute
        monitor.connect(address)
        return monitor

    def events(self, monitor: zmq.Socket[bytes]) -> Iterator[SocketEvent]:
        """The events that a monitor holds now; none once it is closed."""
        while True:
            try:
                header, endpoint = monitor.recv_multipart(zmq.NOBLOCK)
            except (zmq.ZMQError, ValueError):
                return
            kind, value = EVENT.unpack(header)
            yield SocketEvent(kind, value, endpoint.decode(errors="replace"))

    def read(self, socket: zmq.Socket[bytes], ready: Callable[[], object]) -> None:
        """Call ``ready`` when there may be something; it takes all there is, for the descriptor is edge-triggered."""
        self._loop.add_reader(_descriptor(socket), ready)
        self._loop.call_soon(ready)  # an edge may have come before we listened

    def stop_reading(self, socket: zmq.Socket[bytes]) -> None:
        """Must be called before a socket that is read is closed."""
        self._loop.remove_reader(_descriptor(socket))

    def forget(self, socket: zmq.Socket[bytes]) -> None:
        """Close a socket that is read."""
        self.stop_reading(socket)
        socket.close(linger=0)

    def close_doors(self) -> None:
        """Must be called before the sockets that others connect to are closed."""
        self._doors.close()

    def close(self) -> None:
        for monitor in self._accept_monitors:
            self.forget(monitor)
        self._context.term()

    def _watch(self, monitor: zmq.Socket[bytes], endpoint: str, accepted: dict[int, float]) -> None:
        """accepted: when each connection that is open was accepted, by descriptor."""
        now = self._loop.time()
        explained = False  #: Why the next connection ends is known.
        for event in self.events(monitor):
            if event.kind in HANDSHAKE_FAILURES:
                explained = event.kind != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                self._handshake_failed(f"at {endpoint}: {HANDSHAKE_FAILURES[event.kind]}")
                if explained:
                    self._short_connection()  # it has another key: a process of before or after a rotation
            elif event.kind == zmq.EVENT_ACCEPTED:
                accepted[event.value] = now
            else:
                if now - accepted.pop(event.value, -math.inf) < SHORT_S and not explained:
                    self._short_connection()
                explained = False
        self._doors.look()  # after the events: the next connection has its own


@contextlib.contextmanager
def closed_on_failure(socket: zmq.Socket[bytes]) -> Iterator[None]:
    """Close ``socket`` if the block raises: `Sockets.close` would wait for it for ever."""
    try:
        yield
    except BaseException:
        socket.close(linger=0)
        raise


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
