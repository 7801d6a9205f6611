"""The sending side of one stage's rooms: asks and pieces, in order of their peers' room, by a thread of its own.

A piece waits here, as views of its blocks, while its edge has no credit: so a stalled reader costs neither a copy nor a
step of the engine. Called by `transport`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from stage_runtime.errors import describe
from stage_runtime.payloads import encoding
from stage_runtime.transfers.sending import PendingSend, SendQueues
from stage_runtime.wire.messages import Message
from stage_runtime.wire.parts import Body, Room

log = logging.getLogger(__name__)

MAX_INFLIGHT: Final = 4  # pieces over `SMALL_NBYTES` that one peer holds: two are copied while two are on their way
LOOK_AGAIN_S: Final = 0.1  # a relay may get room without a Release; only while something waits
KEY: Final = "kv"  #: Distinguishes a room's transfers from those of the request's payloads.


def key_owner(room: Room) -> str:
    """The owner that transfers of a room name: an end of the room must not free the request's payloads."""
    return f"{room.owner}:{KEY}"


class RoomWork(msgspec.Struct, eq=False):
    """`transfers.sending.SendOwner`."""

    room: Room
    aborted: bool = False
    asked_at: float | None = None  #: The time at decode, by its clock, when its ask was given to the link.

    @property
    def owner(self) -> str:
        return key_owner(self.room)

    @property
    def request_id(self) -> str:
        return self.room.request_id

    @property
    def attempt(self) -> int:
        return self.room.generation


class Parcel(msgspec.Struct, eq=False):
    """One ask or piece. final: see `kv_transfer.interface.Piece`."""

    work: RoomWork
    peer: str
    record: bytes
    tensors: Sequence[Any]
    make: Callable[[Body], Message]
    sent: Callable[[], None]
    final: bool = False


class Outbox:
    """The parcels of one stage."""

    def __init__(
        self,
        edge: tuple[str, str],
        backend: str,
        queues: Callable[[], SendQueues],
        failed: Callable[[Room, str], None],
    ) -> None:
        """edge: (source, target). queues: of the current life. failed: called with a room that cannot be sent to."""
        self._edge = edge
        self._backend = backend
        self._queues = queues
        self._failed = failed
        self._waiting: dict[str, deque[Parcel]] = {}  #: Parcels by peer; no deque is empty.
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, parcel: Parcel) -> None:
        try:
            with self._changed:
                self._waiting.setdefault(parcel.peer, deque()).append(parcel)
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=f"kv {self._edge[0]}", daemon=True)
                    thread.start()
                    self._thread = thread
                self._changed.notify()
        except RuntimeError as error:  # the machine has no thread or no memory left for one
            self.drop(parcel.work.room)
            self._failed(parcel.work.room, describe(error))

    def drop(self, room: Room) -> None:
        """The room is over: what waits for it is not sent."""
        dropped = []
        with self._changed:
            for peer, parcels in list(self._waiting.items()):
                mine = [one for one in parcels if one.work.room == room]
                if mine:
                    dropped += mine
                    left = deque(one for one in parcels if one.work.room != room)
                    self._waiting[peer] = left
                    if not left:
                        del self._waiting[peer]
        for one in dropped:
            _done(one)

    def look(self) -> None:
        """A peer has released something."""
        if self._waiting:
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(LOOK_AGAIN_S)

    @property
    def waiting(self) -> int:
        return sum(len(parcels) for parcels in list(self._waiting.values()))

    def _run(self) -> None:
        while (parcel := self._next()) is not None:
            try:
                self._send(parcel)
            finally:
                _done(parcel)

    def _next(self) -> Parcel | None:
        """The next one whose peer has room; None: closed."""
        with self._changed:
            while not self._closed:
                for peer in list(self._waiting):
                    if self._queues().waits((*self._edge, peer)):
                        continue
                    parcels = self._waiting.pop(peer)
                    parcel = parcels.popleft()
                    if parcels:
                        self._waiting[peer] = parcels  # the last one now
                    return parcel
                self._changed.wait(LOOK_AGAIN_S if self._waiting else None)
        return None

    def _send(self, parcel: Parcel) -> None:
        work, room = parcel.work, parcel.work.room
        if work.aborted:
            return
        try:
            extracted = encoding.extract({"record": parcel.record, "tensors": list(parcel.tensors)}, where="kv")
            pack = extracted.pack
            if parcel.final and pack is not None:
                extracted.pack = msgspec.structs.replace(pack, private=frozenset(range(len(pack.parts))))
            pending = PendingSend(work, extracted, parcel.make, self._backend, self._lost(room))
            if self._queues().ship((*self._edge, parcel.peer), pending, credits=MAX_INFLIGHT):
                return
            problem = f"no connection to {parcel.peer}"
        except Exception as error:
            log.debug("room %s cannot be sent to", room, exc_info=True)
            problem = describe(error)
        self._failed(room, problem)

    def _lost(self, room: Room) -> Callable[[BaseException], None]:
        return lambda error: self._failed(room, describe(error))


def _done(parcel: Parcel) -> None:
    try:
        parcel.sent()
    except Exception:
        log.exception("a piece's owner failed when it was sent")
