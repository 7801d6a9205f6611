"""Sending payloads: inline when small, else by relay, within each edge's credits. Any thread.

One lane per (source, target, peer). A payload that finds no credit or no slot waits in its own lane, so a stopped
receiver holds up nobody else. It waits as a copy: its giver may write into its buffers again once `ship` has returned.
Called by `stage` and `coordinator`; what is said around a payload is theirs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final, Protocol, TypeAlias

import msgspec

from stage_runtime.errors import TransferError
from stage_runtime.relays.base import RelayOperation
from stage_runtime.relays.choosing import Relays
from stage_runtime.relays.payloads import Extracted
from stage_runtime.rules.credits import Window
from stage_runtime.wire import codec
from stage_runtime.wire.messages import Body, Message

log = logging.getLogger(__name__)

Edge: TypeAlias = tuple[str, str, str]  #: source stage, target stage, the peer's incarnation
Send: TypeAlias = Callable[[str, Message], bool]  #: (peer, message) -> is there a link; any thread
Make: TypeAlias = Callable[[Body], Message]
Lost: TypeAlias = Callable[[BaseException], None]

METADATA_LIMIT: Final = 512  # bytes of a relay's metadata; shm and tcp take fewer than 100


class Wanted(Protocol):
    """Whose payload it is."""

    @property
    def owner(self) -> str:
        """The coordinator that admitted it, by incarnation."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def aborted(self) -> bool:
        """Nobody waits for it any more. What is done here and still waits to be sent is wanted."""


class Parcel(msgspec.Struct):
    """A payload on its way out, and the message that will announce it."""

    work: Wanted
    extracted: Extracted
    make: Make
    backend: str
    lost: Lost  #: Called, in any thread, when it waited and then could not be sent: its request must fail.


def attempt_key(owner: str, request_id: str, attempt: int) -> str:
    """What relays call a request's transfers: the abort of one attempt must not free those of another one.

    Request ids are chosen by clients, so two coordinators may use the same id at the same time. An abort comes from the
    coordinator and a payload of the next attempt from a stage, in any order.
    """
    return f"{owner}/{request_id}#{attempt}"


class Lane:
    """One edge to one peer. Its lock orders what is sent on it; nothing else is held meanwhile."""

    def __init__(self, edge: Edge, credits: int) -> None:
        self.edge = edge
        self.window = Window(credits)
        self.waiting: deque[Parcel] = deque()
        self.lock = Lock()
        self.closed = False


class Lanes:
    """All payloads that this process sends."""

    def __init__(self, relays: Relays, send: Send) -> None:
        self._relays = relays
        self._send = send
        self._lanes: dict[Edge, Lane] = {}
        #: (peer, transfer) -> the operation, kept until it is released, and the lane whose credit it has.
        self._out: dict[tuple[str, int], tuple[RelayOperation, Lane]] = {}
        self._starved: set[Edge] = set()  #: Lanes that found no slot, whatever their credits.
        self._lock = Lock()

    def ship(self, edge: Edge, parcel: Parcel, *, credits: int) -> bool:
        """Send it now, or as soon as a credit and a slot are free. False or TransferError: nothing reaches the peer.

        Messages of one edge may overtake each other (inline ones the waiting): receivers order chunks by number.
        Raises: ValueRefused: its message is over the limit. Known before it waits: nobody would be told later.
        """
        extracted = parcel.extracted
        refs = tuple(extracted.refs)
        if extracted.is_inline:
            return self._send(edge[2], parcel.make(Body(extracted.value_bytes, refs, extracted.flat())))
        codec.check(parcel.make(Body(extracted.value_bytes, refs, transfer=bytes(METADATA_LIMIT), copy_now=True)))
        lane = self._lane(edge, credits)
        with lane.lock:
            if lane.closed:
                return False
            if not lane.waiting and self._start(lane, parcel):
                return True
        extracted.hold()  # without the lock, which the I/O thread takes, too
        with lane.lock:
            if lane.closed:
                return False
            if lane.waiting or not self._start(lane, parcel):
                lane.waiting.append(parcel)
        return True

    def released(self, peer: str, transfers: tuple[int, ...]) -> None:
        """A receiver has let go. On the I/O thread: what waited for that is copied and sent from here."""
        freed: dict[Edge, Lane] = {}
        for transfer in transfers:
            with self._lock:
                found = self._out.pop((peer, transfer), None)
            if found is None:
                continue  # repeated, or of a life that is over
            lane = found[1]
            self._relays.released(peer, transfer)
            with lane.lock:
                lane.window.give()
            freed[lane.edge] = lane
        with self._lock:
            starved, self._starved = self._starved, set()
        for edge in starved:
            if edge in self._lanes:
                freed.setdefault(edge, self._lanes[edge])
        for lane in freed.values():
            self._advance(lane)

    def cut(self, peer: str) -> None:
        """The connection to the peer broke: nothing waits for it. What it may still look at stays as it is."""
        with self._lock:
            gone = [edge for edge in self._lanes if edge[2] == peer]
            lanes = [self._lanes.pop(edge) for edge in gone]
            self._starved.difference_update(gone)
        for lane in lanes:
            with lane.lock:
                lane.closed = True
                lane.waiting.clear()

    def forget(self, peer: str) -> None:
        """The peer is gone: nothing waits for it, and what it held is freed."""
        self.cut(peer)
        with self._lock:
            for key in [key for key in self._out if key[0] == peer]:
                del self._out[key]
        self._relays.forget(peer)

    def drop_cancelled(self) -> None:
        """Throw away what waits for requests that are over."""
        for lane in list(self._lanes.values()):
            if lane.waiting:
                with lane.lock:
                    lane.waiting = deque(parcel for parcel in lane.waiting if not parcel.work.aborted)

    def abort(self, owner: str, request_id: str, attempt: int) -> None:
        """Throw away what waits for this attempt or an earlier one, of stages that are through with it, too."""

        def over(work: Wanted) -> bool:
            return (work.owner, work.request_id) == (owner, request_id) and work.attempt <= attempt

        for lane in list(self._lanes.values()):
            if lane.waiting:
                with lane.lock:
                    lane.waiting = deque(one for one in lane.waiting if not one.work.aborted and not over(one.work))

    def waiting_of(self, owner: str) -> set[tuple[str, int]]:
        """The requests, by id and attempt, of that coordinator's for which something waits here."""
        found = set[tuple[str, int]]()
        for lane in list(self._lanes.values()):
            with lane.lock:
                found.update((one.work.request_id, one.work.attempt) for one in lane.waiting if one.work.owner == owner)
        return found

    @property
    def outstanding(self) -> int:
        """Transfers that no receiver has released yet."""
        return len(self._out)

    @property
    def queued(self) -> int:
        """Payloads that wait for a credit or a slot."""
        return sum(len(lane.waiting) for lane in list(self._lanes.values()))

    def _lane(self, edge: Edge, credits: int) -> Lane:
        lane = self._lanes.get(edge)
        if lane is None:
            with self._lock:
                lane = self._lanes.setdefault(edge, Lane(edge, credits))
        return lane

    def _advance(self, lane: Lane) -> None:
        """Send what may go now. Whatever a parcel meets, it does not stay at the head of its lane."""
        lost: list[tuple[Parcel, BaseException]] = []
        with lane.lock:
            while lane.waiting:
                parcel = lane.waiting[0]
                try:
                    if not parcel.work.aborted and not self._start(lane, parcel):
                        break
                except TransferError:
                    log.info("a payload to %s stays: nothing reaches it; who says so ends its request", lane.edge[2])
                except BaseException as error:
                    lost.append((parcel, error))
                lane.waiting.popleft()
        for parcel, why in lost:  # without the lock: to fail a request drops what else waits for it
            parcel.lost(why)

    def _start(self, lane: Lane, parcel: Parcel) -> bool:
        """Move one payload. The lane's lock is held. False: no credit or no slot now.

        Raises: TransferError: nothing reaches the peer.
        """
        if not lane.window.take():
            return False
        peer = lane.edge[2]
        extracted = parcel.extracted
        try:
            operation = self._put(lane, parcel)
        except BaseException:
            lane.window.give()
            raise
        if operation is None:
            lane.window.give()
            return False
        key = (peer, int(operation.transfer))
        with self._lock:
            self._out[key] = (operation, lane)
        refs = tuple(extracted.refs)
        body = Body(extracted.value_bytes, refs, transfer=operation.metadata, copy_now=lane.window.exhausted)
        # Announced before the transfer is complete: a relay that waits for its receiver would never get on otherwise.
        sent = False
        try:
            sent = self._send(peer, parcel.make(body))
        finally:
            if not sent:
                with self._lock:
                    self._out.pop(key, None)
                lane.window.give()
                self._relays.discard(operation)
        if not sent:
            raise TransferError(f"no connection to {peer}")
        return True

    def _put(self, lane: Lane, parcel: Parcel) -> RelayOperation | None:
        """Take a slot. None: there is none now, and the next release advances this lane."""
        request_id = attempt_key(parcel.work.owner, parcel.work.request_id, parcel.work.attempt)
        peer, backend = lane.edge[2], parcel.backend
        operation = self._relays.put(parcel.extracted, request_id=request_id, peer=peer, backend=backend)
        if operation is None:
            with self._lock:
                self._starved.add(lane.edge)
            # Again: the last slot may have been released before this lane was known to wait, and none after it.
            operation = self._relays.put(parcel.extracted, request_id=request_id, peer=peer, backend=backend)
        return operation
