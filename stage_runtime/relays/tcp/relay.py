"""The relay that reaches every peer: bytes go over ZMQ sockets of its own, so bulk data never delays control messages.

`put` sends at once; the bytes may be here before the message that announces them, or after. Each message is a header
and one frame: a whole transfer, which becomes the receiver's buffer as it is, or a piece of a larger one. A thread
receives (its copies run without the GIL); `arrivals` keeps what is not fetched yet, and its bounds.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from stage_runtime.errors import ConfigurationError, TransferError
from stage_runtime.payloads import buffers
from stage_runtime.payloads.pack import Pack
from stage_runtime.relays.abstract import AbstractRelay
from stage_runtime.relays.base import Peer, RelayOperation, TransferId
from stage_runtime.relays.choice.choosing import Medium
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.moving.pending_transfers import GetOperation, PutOperation, TransferCompletion
from stage_runtime.relays.tcp.arrivals import Arrivals, FrameHeader
from stage_runtime.relays.tcp.movement import Movement
from stage_runtime.relays.tcp.routes import TcpRoute, is_endpoint
from stage_runtime.rules.flow.watched_time import WatchedTime

log = logging.getLogger(__name__)

RECEIVE_HWM: Final = 16  # messages; the receiving thread empties the queue at once, `Arrivals` bounds what it keeps
HANDSHAKE_MS: Final = 4000  # of who connects; libzmq's own 30 s let idle connections hold a descriptor for as long
ACCEPTING: Final = 4096  # connections that wait to be accepted; libzmq's own 100 turns others away for a second or more
ZAP_DOMAIN: Final = b"omnipipeline"  # with one, libzmq refuses ZMTP 1.0, which any other protocol is taken for
IDLE_S: Final = 60.0  # a socket to a peer that was not used for so long is closed
JOINED_NBYTES: Final = 256 << 10  # smaller packs are joined into one frame: a copy is cheaper than frames
OLDER_NBYTES: Final = 32 << 20  # peers of an older version send frames as large
HEADER_NBYTES: Final = 64 << 10  # more than any header takes
#: libzmq's events for peers without the pipeline's key, or with another protocol than ZeroMQ.
TURNED_AWAY: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class TcpFacts(msgspec.Struct, frozen=True):
    """The facts that a peer must know to send to us. token: messages without it are dropped."""

    endpoint: str
    token: str


class TcpMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The number of the sender's transfer that is announced."""

    transfer: int
    nbytes: int


class TcpRelay(AbstractRelay[TcpRoute, TcpMetadata]):
    """PUSH sockets to every peer, one PULL socket for all that comes."""

    name = "tcp"
    CURE = "send it in parts"

    def __init__(self, context: RelayContext) -> None:
        """Raises: ConfigurationError: the address cannot be bound, or no descriptor or thread is left."""
        super().__init__(context, TcpMetadata)
        self._settings = context.settings
        self._token = secrets.token_bytes(16)
        self._movement = Movement()
        self._arrivals = Arrivals(context, self._pins, self._token, self._movement)
        self._handshake_failures = 0
        self._logged: set[zmq.Event] = set()  #: Reasons for refused connections that are in the log already.
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zmq.max_sockets = self._zmq.get(zmq.SOCKET_LIMIT)
        self._guard: Any = None
        self._doors = context.doors
        try:
            if context.security is not None and self._is_tcp:
                self._guard = context.security.guard(self._zmq)
            self._socket, self._endpoint = self._bound()
            if self._doors is not None:
                self._doors.add(self._endpoint)
            self._socket.monitor("inproc://door", TURNED_AWAY | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self._door = self._zmq.socket(zmq.PAIR)
            self._door.rcvhwm = 0  # a full one would block libzmq's own thread
            self._door.connect("inproc://door")
            self._stop = self._zmq.socket(zmq.PAIR)
            self._stop.bind("inproc://stop")
            self._thread = threading.Thread(target=self._receive, name="omni-relay-tcp", daemon=True)
            self._thread.start()
        except (RuntimeError, zmq.ZMQError) as error:
            if self._guard is not None:
                self._guard.stop()
            self._zmq.destroy(linger=0)  # the collector would wait for sockets of a context that nobody has any more
            raise ConfigurationError(f"tcp relay: {error}") from error
        expire_s = self._settings.unclaimed_s / 2
        self._expired = WatchedTime(time.monotonic(), expire_s)
        self._expiring = self._loop.call_later(expire_s, self._expire)

    def facts(self) -> dict[str, Any]:
        return msgspec.to_builtins(TcpFacts(self._endpoint, self._token.hex()))  # type: ignore[no-any-return]

    def _connect(self, peer: Peer, facts: Mapping[str, Any]) -> TcpRoute | None:
        """The peer may send from now on; a socket to it is opened by `prepare` or the first put."""
        try:
            announced = msgspec.convert(facts, TcpFacts)
            token = bytes.fromhex(announced.token)
        except ValueError:  # ValidationError is a ValueError
            return None
        if not is_endpoint(announced.endpoint):
            return None
        self._arrivals.open(peer)
        return TcpRoute(announced.endpoint, token, self._connected)

    def _connected(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._zmq.socket(zmq.PUSH)
        try:
            self._tune(socket)
            socket.ipv6 = True
            socket.sndhwm = 0  # `unreleased_bytes` bounds it, and nothing is copied to wait here
            if self._context.security is not None and endpoint.startswith("tcp://"):
                self._context.security.client(socket)
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    def _most_nbytes(self, pieces: int) -> int:
        return self._settings.unreleased_bytes

    def _disconnect(self, peer: Peer, connection: TcpRoute) -> None:
        connection.close()
        self._arrivals.forget(peer)
        self._movement.forget(peer)

    def medium(self, peer: Peer) -> Medium:
        if not self._connections[peer].endpoint.startswith("tcp://"):
            return "unix"
        return "tcp" if self._context.security is None else "tcp+curve"

    def prepare(self, peer: Peer) -> None:
        route = self._connections.get(peer)
        if route is not None:
            with route.lock, contextlib.suppress(TransferError):  # a put would fail alike, and raises
                if not route.closed:
                    route.socket()

    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        """Implements `base.Relay.put`. ``like`` saves nothing here: every receiver is sent a copy of the bytes, because
        libzmq sends them later.
        """
        return self._put(pack, request_id=request_id, peer=peer, most=self._settings.unreleased_bytes)

    def put_all(self, packs: Sequence[Pack], *, request_id: str, peer: Peer) -> list[PutOperation] | None:
        """Implements `base.Relay.put_all`. The room for all is reserved before the first is sent: a pack that was sent
        cannot be taken back, and its receiver would keep it as unclaimed.
        """
        reserved = sum(pack.nbytes for pack in packs)
        if not self._ledger.reserve(reserved, most=self._settings.unreleased_bytes):
            return None
        puts: list[PutOperation] = []
        try:
            for pack in packs:
                put = self._put(pack, request_id=request_id, peer=peer, most=None)
                assert put is not None
                puts.append(put)
                self._ledger.unreserve(pack.nbytes)
                reserved -= pack.nbytes
            return puts
        finally:
            self._ledger.unreserve(reserved)
            if len(puts) < len(packs):
                for put in puts:
                    self.released(peer, put.transfer)

    def _put(self, pack: Pack, *, request_id: str, peer: Peer, most: int | None) -> PutOperation | None:
        """most: as of `_accounted`."""
        route = self._route(peer)
        with route.lock:
            if not route.closed:
                route.socket()  # before it is accounted for: it may fail
        metadata = TcpMetadata(next(self._context.ids), pack.nbytes)
        copied = sum(len(part) for index, part in enumerate(pack.parts) if index not in pack.private)
        put = self._accounted(metadata, pack, None, request_id=request_id, peer=peer, most=most, copied=copied)
        if put is not None:
            try:
                self._send(route, put, pack)
            except BaseException:
                self.released(peer, put.transfer)
                raise
        return put

    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> GetOperation:
        announced = self._decoded(metadata, peer)
        transfer = TransferId(announced.transfer)
        operation = GetOperation(
            TransferCompletion(self._loop), transfer, peer, metadata, lambda: self._arrivals.moved(peer, transfer)
        )
        self._arrivals.claim(operation, announced.nbytes, request_id=request_id, holder=holder)
        return operation

    def decline(self, metadata: bytes, *, peer: Peer) -> None:
        self._arrivals.decline(peer, TransferId(self._decoded(metadata, peer).transfer))

    def cleanup(self, request_id: str) -> None:
        super().cleanup(request_id)
        self._arrivals.cleanup(request_id)

    def stats(self) -> dict[str, int]:
        return {"handshake_failures": self._handshake_failures, **super().stats(), **self._arrivals.stats()}

    def close(self) -> None:
        self._expiring.cancel()
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join()
        super().close()
        if self._doors is not None:
            self._doors.close()
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        self._stop.close(linger=0)
        self._socket.close(linger=0)
        self._door.close(linger=0)
        self._zmq.term()

    @property
    def _is_tcp(self) -> bool:
        return self._settings.bind.startswith("tcp://")

    def _bound(self) -> tuple[zmq.Socket[bytes], str]:
        socket = self._zmq.socket(zmq.PULL)
        self._tune(socket)
        socket.ipv6 = "[" in self._settings.bind  # else libzmq would write an IPv4 address in IPv6's form
        socket.rcvhwm = RECEIVE_HWM
        socket.zap_domain = ZAP_DOMAIN
        socket.handshake_ivl, socket.backlog = HANDSHAKE_MS, ACCEPTING
        most = max(self._settings.whole_bytes, self._settings.piece_bytes, OLDER_NBYTES)
        socket.maxmsgsize = most + HEADER_NBYTES
        if self._context.security is not None and self._is_tcp:
            self._context.security.server(socket)
        try:
            socket.bind(self._settings.bind)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            if self._guard is not None:
                self._guard.stop()
            self._zmq.term()
            raise ConfigurationError(f"tcp relay cannot bind {self._settings.bind}: {error}") from error
        endpoint = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if self._is_tcp and self._settings.advertise_host is not None:
            host = self._settings.advertise_host.strip("[]")
            port = endpoint.rpartition(":")[2]
            endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        return socket, endpoint

    def _tune(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = 0
        # Heartbeats would wait behind bulk; the kernel's do not. The control plane reports dead peers.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = 5
        socket.tcp_keepalive_intvl = 2
        socket.tcp_keepalive_cnt = 3

    def _send(self, route: TcpRoute, put: PutOperation, pack: Pack) -> None:
        with route.lock:
            if route.closed:
                return  # `forget` has ended the put, or is about to
            for offset, body in _frames(pack, self._settings, lambda part: self._kept(part, put)):
                header = FrameHeader(
                    token=route.token,
                    sender=self._context.incarnation,
                    transfer=put.transfer,
                    request_id=put.request_id,
                    nbytes=pack.nbytes,
                    offset=offset,
                )
                route.send(self._encode(header), body)

    def _kept(self, part: memoryview, put: PutOperation) -> memoryview:
        """The same bytes, which are not written to any more; those of an author's tensor in the arena stay in place."""
        region = self._context.arena.read_region(part) if len(part) >= buffers.NOGIL_NBYTES else None
        if region is None:
            return self._copied(part)
        put.copied_nbytes -= len(part)
        return buffers.view(region)

    def _copied(self, part: memoryview) -> memoryview:
        """The same bytes, in the arena, whose pages are warm: the allocator gives back what is as large, and zeroes it
        anew. Freed when libzmq has sent them.
        """
        region = None
        if len(part) >= buffers.NOGIL_NBYTES:
            region = self._context.arena.allocate_region(len(part), source=part)
        if region is None:
            return buffers.copied(part)
        region[:] = np.frombuffer(part, np.uint8)
        return buffers.view(region)

    def _expire(self) -> None:
        # Armed first: a check that raises does not stop the later ones.
        self._expiring = self._loop.call_later(self._settings.unclaimed_s / 2, self._expire)
        self.drop_unclaimed(time.monotonic())
        for peer, route in self._connections.items():
            if route.is_open:
                route.rest(IDLE_S, lambda peer=peer: self._ledger.holds(peer))  # type: ignore[misc]

    def drop_unclaimed(self, now: float) -> None:
        """Drop what was not claimed in time. Not after this loop was stopped: it may not have read the announcements
        yet. now: of `time.monotonic`.
        """
        if self._expired.look(now):
            self._arrivals.expire(now)

    def _on_socket_event(self, announced: Mapping[str, Any]) -> None:
        event, descriptor = zmq.Event(announced["event"]), int(announced["value"])
        if event == zmq.EVENT_ACCEPTED:
            self._movement.accepted(descriptor)
            self._look_at_descriptors()
        elif event == zmq.EVENT_DISCONNECTED:
            self._arrivals.disconnected(self._movement.disconnected(descriptor))
        else:
            self._turned_away(event)

    def _look_at_descriptors(self) -> None:
        if self._doors is not None:
            try:
                self._loop.call_soon_threadsafe(self._doors.look)
            except RuntimeError:  # the loop is closed
                pass

    def _turned_away(self, why: zmq.Event) -> None:
        """Counted each time, logged once per reason."""
        self._handshake_failures += 1
        if why not in self._logged:
            self._logged.add(why)
            log.warning("tcp relay: a connection was refused at %s: %s", self._endpoint, why.name)

    def _receive(self) -> None:
        """The receiving thread: until `close` sends stop."""
        stop = self._zmq.socket(zmq.PAIR)
        stop.connect("inproc://stop")
        poller = zmq.Poller()
        poller.register(stop, zmq.POLLIN)
        poller.register(self._door, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while True:
            ready = [socket for socket, _ in poller.poll()]
            if stop in ready:
                stop.close(linger=0)
                return
            if self._door in ready:
                self._on_socket_event(parse_monitor_message(self._door.recv_multipart()))
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                continue
            try:
                self._arrivals.message(frames)
            except Exception:
                log.exception("tcp relay: a message was dropped")
            del frames


def _frames(
    pack: Pack, settings: Any, copied: Callable[[memoryview], memoryview]
) -> Iterator[tuple[int, memoryview | bytes]]:
    """The pack as ``(offset, bytes)`` in order: whole if it is one part or small, else in pieces. Nobody writes into
    what it gives: ``copied`` gives a part's bytes in memory of their own. The last frame ends where the pack does: its
    receiver waits for all bytes, and a pack may end in the gap behind its last part.
    """
    yield from _part_frames(pack, settings, copied)
    end = pack.offsets[-1] + len(pack.parts[-1]) if pack.parts else 0
    if end < pack.nbytes or not pack.parts:
        yield end, bytes(pack.nbytes - end)


def _part_frames(
    pack: Pack, settings: Any, copied: Callable[[memoryview], memoryview]
) -> Iterator[tuple[int, memoryview | bytes]]:
    """Those of its parts. Gaps between frames are not sent."""
    if pack.parts and pack.nbytes <= JOINED_NBYTES and len(pack.parts) != 1:
        yield pack.offsets[0], _joined(pack, 0, len(pack.parts))
        return
    if len(pack.parts) == 1 and pack.nbytes <= settings.whole_bytes:
        yield pack.offsets[0], pack.parts[0] if pack.private else copied(pack.parts[0])
        return
    index = 0
    while index < len(pack.parts):
        part, offset = pack.parts[index], pack.offsets[index]
        following = index + 1
        if len(part) < buffers.NOGIL_NBYTES:
            while (
                following < len(pack.parts)
                and pack.offsets[following] + len(pack.parts[following]) - offset <= JOINED_NBYTES
            ):
                following += 1
            yield offset, _joined(pack, index, following)
        else:
            for start in range(0, len(part), settings.piece_bytes):
                piece = part[start : start + settings.piece_bytes]
                yield offset + start, piece if index in pack.private else copied(piece)
        index = following


def _joined(pack: Pack, first: int, behind: int) -> bytes:
    """Parts ``first`` .. ``behind`` - 1 with the gaps between them."""
    base = pack.offsets[first]
    joined = bytearray(pack.offsets[behind - 1] + len(pack.parts[behind - 1]) - base)
    for part, offset in zip(pack.parts[first:behind], pack.offsets[first:behind], strict=True):
        joined[offset - base : offset - base + len(part)] = part
    return bytes(joined)
