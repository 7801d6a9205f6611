"""Outgoing connections: many to one socket, so that a link costs one pipe and one descriptor.

A PUSH socket for each link needs a monitor, which is two sockets more: three sockets and five descriptors a link, and a
context holds a bounded number of sockets. Here one ROUTER socket connects to all endpoints of a kind, each connection
under a routing id of ours, and one monitor names the endpoint of each event. Not here: frames and peers (`links`,
`channels`). Connections are opened, closed and watched on the I/O thread; `Connection.send` may be called in any
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, TypeAlias

import zmq

from stage_runtime.rules.members import beats
from stage_runtime.sockets.endpoints.addresses import is_local
from stage_runtime.sockets.endpoints.opening import SocketEvent, Sockets, closed_on_failure

#: A connection without a link is closed after this; a link to the same endpoint that comes sooner takes it over. So
#: late events of a closed connection are not mistaken for those of the next one.
LINGER_S: Final = 0.5
REDIAL_S: Final = 1.0  # libzmq gives a connection up whose handshake was refused; the other end may be another one soon
MAX_ANSWER: Final = 1024  # bytes: nothing but acks, and a peer's routing id, come from the other end of a connection
ANSWERS: Final = 64  # of one connection that wait to be read; later acks have what earlier ones say
WATCHED: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


# Plain ints: to join two members of an enumeration costs as much as half a send.
NOBLOCK: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.SNDMORE) | NOBLOCK


#: Called with each frame that comes back on a connection, and the connection's endpoint.
Answered: TypeAlias = Callable[[bytes, str], None]


class Connection:
    """A connection to one endpoint; links to successive incarnations there share it."""

    __slots__ = (
        "_dialer",
        "breaks",
        "closing",
        "connected",
        "descriptor",
        "endpoint",
        "factor",
        "reached",
        "routing_id",
        "watchers",
    )

    def __init__(self, dialer: _Dialer, endpoint: str, factor: float) -> None:
        self.endpoint = endpoint
        self.factor = factor  #: How many times as long as usual it waits between heartbeats, at least.
        self.connected = False
        self.breaks = 0  #: How often it has broken.
        self.watchers: list[Callable[[bool], None]] = []  #: Called when it is connected (True) or broken. One per link.
        self.routing_id = b""
        self.descriptor = -1  #: The descriptor of the connection that the latest events are of.
        self.reached = False  #: The other end accepted it; its handshake may still be under way.
        self.closing: asyncio.TimerHandle | None = None
        self._dialer = dialer

    def send(self, *frames: bytes) -> None:
        """Send them as one message. Raises: zmq.Again: it is not connected, or its queue is full; none was sent."""
        if not self.connected:
            raise zmq.Again
        self._dialer.send(self.routing_id, frames)

    def look(self) -> None:
        """Handle the events that have come: after a stall of the loop there may be several."""
        self._dialer.watch()

    def leave(self, watcher: Callable[[bool], None]) -> None:
        """A link is closed; without links the connection is closed in a while."""
        self.watchers.remove(watcher)
        if not self.watchers:
            self._dialer.close_soon(self)


class Dialers:
    """All outgoing connections of a process: those on this machine, those over TCP, and names that DNS resolves."""

    def __init__(self, sockets: Sockets, loop: asyncio.AbstractEventLoop, answered: Answered) -> None:
        self._answered = answered
        self._sockets = sockets
        self._loop = loop
        self._shared: dict[bool, _Dialer] = {}  #: Dialers by whether their endpoints are on this machine.
        #: Dialers by endpoint: what libzmq calls a name in its events is not known.
        self._named: dict[str, _Dialer] = {}

    def dial(self, endpoint: str, watcher: Callable[[bool], None], factor: float = 1.0) -> Connection:
        """The connection to ``endpoint``, made if need be. watcher: called when it is connected or broken.

        factor: how many times as long as usual a new one waits between heartbeats, at least.
        Raises: ZMQError: no socket can be opened. ConfigurationError: that is not an endpoint.
        """
        identifier = canonical(endpoint)
        if identifier is None:
            dialer = self._named.get(endpoint)
            if dialer is None:
                return self._dial_named(endpoint, watcher, factor)
        else:
            local = is_local(endpoint)
            if local not in self._shared:
                self._shared[local] = _Dialer(self._sockets, self._loop, self._answered, local=local)
            dialer = self._shared[local]
        return dialer.dial(identifier or endpoint, watcher, factor)

    def _dial_named(self, endpoint: str, watcher: Callable[[bool], None], factor: float) -> Connection:
        """The first connection to a name. A dialer that cannot make it is closed: nothing else uses it."""
        dialer = self._named[endpoint] = _Dialer(
            self._sockets, self._loop, self._answered, local=False, only=lambda: self._close_named(endpoint)
        )
        try:
            return dialer.dial(endpoint, watcher, factor)
        except BaseException:
            self._close_named(endpoint)
            raise

    def turn(self) -> bool:
        """Read the answers that have come. Returns: whether there were any."""
        return any([dialer.read() for dialer in self._all()])

    def close(self) -> None:
        for dialer in self._all():
            dialer.close()
        self._shared.clear()
        self._named.clear()

    def _close_named(self, endpoint: str) -> None:
        self._named.pop(endpoint).close()

    def _all(self) -> list[_Dialer]:
        return [*self._shared.values(), *self._named.values()]


class _Dialer:
    """One ROUTER socket and its monitor."""

    def __init__(
        self,
        sockets: Sockets,
        loop: asyncio.AbstractEventLoop,
        answered: Answered,
        *,
        local: bool,
        only: Callable[[], None] | None = None,
    ) -> None:
        """only: it has one connection, which all events belong to; called when that is closed."""
        self._loop = loop
        self._answered = answered
        self._only = only
        self._lock = Lock()  #: Held to use the socket: it may change threads, but not be used by two at once.
        self._ids = itertools.count(1)
        self._connections: dict[str, Connection] = {}  #: Connections by endpoint.
        self._endpoints: dict[bytes, str] = {}  #: Endpoints by routing id.
        self._sockets = sockets
        self._socket = sockets.make(zmq.ROUTER)
        self._socket.router_mandatory = True  # a full queue is refused, not dropped silently
        self._socket.rcvhwm = ANSWERS
        self._socket.maxmsgsize = MAX_ANSWER
        self._socket.reconnect_ivl = 50
        self._socket.reconnect_ivl_max = 1000
        self._local = local
        #: libzmq's own: pyzmq's, around it, is for features that are not used here.
        self._send: Callable[[bytes, int], object] = super(zmq.Socket, self._socket).send
        with closed_on_failure(self._socket):
            self._monitor = sockets.monitor(self._socket, WATCHED)
        sockets.read(self._monitor, self.watch)
        sockets.read(self._socket, self.read)

    def dial(self, endpoint: str, watcher: Callable[[bool], None], factor: float) -> Connection:
        connection = self._connections.get(endpoint)
        if connection is None:
            connection = Connection(self, endpoint, factor)
            self._connect(connection)
            self._connections[endpoint] = connection
        elif connection.closing is not None:
            connection.closing.cancel()
            connection.closing = None
        connection.watchers.append(watcher)
        return connection

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> None:
        with self._lock:
            try:
                self._send(routing_id, MORE)
            except zmq.Again:
                raise
            except zmq.ZMQError as error:  # no such connection: it was given up, or the socket is closed
                raise zmq.Again from error
            for frame in frames[:-1]:  # libzmq has room for a message, or has none at its first part
                self._send(frame, MORE)
            self._send(frames[-1], NOBLOCK)

    def watch(self) -> None:
        for event in self._sockets.events(self._monitor):
            connection = self._connection_of(event.endpoint)
            if connection is None:
                continue
            if event.kind == zmq.EVENT_CONNECTED:
                connection.descriptor, connection.reached = event.value, True
            elif event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connection.connected = True
                _notify(connection, True)
            elif event.kind == zmq.EVENT_DISCONNECTED:
                if connection.descriptor != event.value:
                    continue
                connection.reached = False
                if connection.connected:
                    connection.connected = False
                    connection.breaks += 1
                    _notify(connection, False)
            else:
                self._loop.call_later(REDIAL_S, self._redial, connection, connection.routing_id)

    def read(self) -> bool:
        """Handle the answers that have come. Called now and then, too: a send may take the edge that tells of them.

        Returns: whether there were any.
        """
        answers = self._answers()
        for routing_id, frame in answers:
            self._answered(frame, self._endpoints.get(routing_id, ""))
        return bool(answers)

    def _answers(self) -> list[tuple[bytes, bytes]]:
        """The answers that have come back, each behind its routing id. Not handled under the lock: that may send."""
        found: list[tuple[bytes, bytes]] = []
        with self._lock, contextlib.suppress(zmq.ZMQError):
            while True:
                routing_id = self._socket.recv(NOBLOCK)
                frame = self._socket.recv(NOBLOCK)
                while self._socket.getsockopt(zmq.RCVMORE):
                    frame = self._socket.recv(NOBLOCK)
                found.append((routing_id, frame))
        return found

    def close_soon(self, connection: Connection) -> None:
        connection.closing = self._loop.call_later(LINGER_S, self._close, connection)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.connected = False
            if connection.closing is not None:
                connection.closing.cancel()
        self._connections.clear()
        self._sockets.stop_reading(self._monitor)
        self._sockets.stop_reading(self._socket)
        with self._lock:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        self._monitor.close(linger=0)

    def _connect(self, connection: Connection) -> None:
        connection.routing_id = next(self._ids).to_bytes(5, "big")
        self._endpoints[connection.routing_id] = connection.endpoint
        with self._lock:
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, connection.routing_id)
            # An IPv4 address in an IPv6 socket would have another name in events.
            self._socket.ipv6 = self._only is not None or connection.endpoint.startswith("tcp://[")
            factor = max(connection.factor, beats.check_factor(len(self._connections)))
            self._sockets.heartbeats(factor).set(self._socket)
            self._sockets.connect(self._socket, connection.endpoint)

    def _redial(self, connection: Connection, routing_id: bytes) -> None:
        """Connect again what libzmq has given up."""
        known = self._connections.get(connection.endpoint)
        if known is connection and connection.routing_id == routing_id and not connection.connected:
            self._disconnect(connection)
            self._connect(connection)

    def _close(self, connection: Connection) -> None:
        if self._connections.get(connection.endpoint) is connection and not connection.watchers:
            del self._connections[connection.endpoint]
            connection.connected = False
            self._disconnect(connection)
            if self._only is not None:
                self._only()

    def _disconnect(self, connection: Connection) -> None:
        self._endpoints.pop(connection.routing_id, None)
        with self._lock, contextlib.suppress(zmq.ZMQError):  # libzmq has given it up already
            self._socket.disconnect(connection.endpoint)

    def _connection_of(self, endpoint: str) -> Connection | None:
        if self._only is not None:
            return next(iter(self._connections.values()), None)
        return self._connections.get(endpoint)


def _notify(connection: Connection, connected: bool) -> None:
    for watcher in list(connection.watchers):
        watcher(connected)


def canonical(endpoint: str) -> str | None:
    """``endpoint`` as libzmq names it in its events; None: a name, which it resolves."""
    if is_local(endpoint):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return f"tcp://{address.ipv4_mapped}:{port}"
        return None if address.scope_id else f"tcp://[{address}]:{port}"
    return f"tcp://{address}:{port}"


__all__ = ["Connection", "Dialers", "SocketEvent", "canonical"]
