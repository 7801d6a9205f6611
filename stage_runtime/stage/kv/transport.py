"""The rooms of one stage with a role, over the process's links and relays: `kv_transfer.interface.KVTransport`.

Here: which room is open to whom, what arrives for it, and how it ends. Not here: sending (`outbox`), leases as rules
(`rules.kv.kvrooms`), blocks and prompts (the engine behind the sink). Made by `host`; messages come on the I/O thread,
calls of the engine on any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from omnipipeline_spec.types.errors import clipped
from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.errors import ProtocolError, TransferError, describe
from stage_runtime.rules.kv import kvrooms
from stage_runtime.stage.kv.outbox import Outbox, Parcel, RoomWork, key_owner
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.stage.work import RequestWork
from stage_runtime.transfers.receiving import Fetched, Fetching
from stage_runtime.transfers.sending import attempt_key
from stage_runtime.wire.messages import KV_BEAT_ROOMS, KVAsk, KVBeat, KVClose, KVPiece
from stage_runtime.wire.parts import Body, Member, Room

if TYPE_CHECKING:
    from torch import Tensor

    from stage_runtime.kv_transfer.interface import KVSink, Piece

log = logging.getLogger(__name__)

TICK_S = 1.0  # leases of 30 s end with 1 s to spare
SENT_S = 0.5  # an ask that was made is on its link long before
ENDED_ELSEWHERE = "the room is not open at the other side"


class StageKVTransport:
    """One stage's rooms in the current life of its process."""

    def __init__(
        self,
        plan: StagePlan,
        process: ProcessContext,
        loop: asyncio.AbstractEventLoop,
        *,
        members: Callable[[], Collection[str]],
        named: Callable[[str], Sequence[RequestWork]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """members: instances that the process knows. named: the stage's requests of an id, or of a key."""
        self.plan = plan
        self._process = process
        self._loop = loop
        self._members = members
        self._named = named
        self._clock = clock
        self._sink: KVSink | None = None
        #: Asks that came before the engine was ready. Empty once there is a sink.
        self._early: list[tuple[str, Room, bytes, list[Any]]] = []
        self._rooms = kvrooms.Rooms()
        self._sending: dict[Room, RoomWork] = {}  #: Works of the open rooms.
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._renewed_at = 0.0
        self._renewals = 0  #: Leases of rooms, each time.
        self._expired = 0
        self._lock = threading.Lock()  #: The lock of the rooms. Nothing else is called with it.
        self._fetching: Fetching | None = None
        self._outbox = Outbox(
            (plan.name, plan.kv_peer), plan.relay.backend, lambda: process.send_queues, self._cannot_send
        )
        self.handlers: Mapping[type, Callable[[str, Any], None]] = {
            KVAsk: self._ask,
            KVPiece: self._piece,
            KVClose: self._close,
            KVBeat: self._beat,
        }

    # --- kv_transfer.interface.KVTransport: any thread ------------------------------------------------------------

    def peer(self, request_id: str) -> str | None:
        work = self._work_of(request_id)
        peer = work.bindings.get(self.plan.kv_peer) if work is not None else None
        return peer if peer is not None and peer in self._members() else None

    def room(self, request_id: str, generation: int) -> Room | None:
        work = self._work_of(request_id)
        return None if work is None else Room(work.owner, work.request_id, work.attempt, generation)

    def memory(self, nbytes: int) -> Tensor:
        import torch

        return self._process.relays.allocate((nbytes,), torch.uint8)  # type: ignore[no-any-return]

    def ask(self, room: Room, peer: str, record: bytes, tensors: Sequence[Any]) -> None:
        work = self._open(room, peer)
        if work is None:
            return
        self._process.counters["kv_asked"] += 1
        source, target = self.plan.name, self.plan.kv_peer
        members = self._brought_along(room)

        def make(body: Body) -> KVAsk:
            if not body.transfer.startswith(b"\0"):  # `SendQueues.ship` makes one of zeros, for its size
                work.asked_at = self._clock()
            return KVAsk(room, source, target, body, members)

        self._outbox.add(Parcel(work, peer, record, tensors, make, lambda: None))
        self._loop.call_soon_threadsafe(self._arm)

    def ship(self, room: Room, piece: Piece) -> None:
        with self._lock:
            peer, work = self._rooms.peer(room), self._sending.get(room)
        if peer is None or work is None:
            piece.sent()
            return
        self._process.counters["kv_pieces"] += 1
        source, target = self.plan.name, self.plan.kv_peer

        def make(body: Body) -> KVPiece:
            # Decode takes each piece into its cache, and waits for no other one meanwhile: a copy would be in vain.
            return KVPiece(room, source, target, msgspec.structs.replace(body, copy_now=False))

        self._outbox.add(Parcel(work, peer, piece.header, piece.tensors, make, piece.sent, piece.final))

    def close(self, room: Room, reason: str | None) -> None:
        if reason is None and self.plan.kv_role == "prefill":
            return
        peer = self._end(room, reason)
        if peer is not None:
            told = None if reason is None else clipped(reason, most=500)
            self._process.send(peer, KVClose(room, self.plan.kv_peer, told))

    def attach(self, sink: KVSink) -> None:
        with self._lock:
            self._sink = sink
            early, self._early = self._early, []
        for peer, room, record, tensors in early:
            if self._is_open(room, peer):
                self._asked(peer, room, record, tensors)

    # --- life: the I/O thread -------------------------------------------------------------------------------------

    def wire(self) -> None:
        """The process has its ends of the planes."""
        self._fetching = Fetching(self._process.relays, self._loop)

    def drain(self) -> None:
        """Open no new room; the open ones go on."""
        self._draining = True

    def released(self) -> None:
        """A peer has released transfers."""
        self._outbox.look()

    def peer_lost(self, peer: str, reason: str) -> None:
        """An instance is gone, or cut off."""
        self._end_where(lambda _, bound: bound == peer, reason)

    def owner_lost(self, owner: str) -> None:
        """A coordinator is gone: its requests are dropped here."""
        self._end_where(lambda room, _: room.owner == owner, "the request's coordinator is gone", tell=True)

    def renewed(self) -> None:
        """The process takes a new incarnation; `wire` must follow."""
        self._end_where(lambda *_: True, "this instance was declared dead")
        if self._fetching is not None:
            self._fetching.close()

    def stop(self) -> None:
        self._end_where(lambda *_: True, "this instance ends", tell=True)
        self._outbox.close()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def open_rooms(self) -> int:
        return len(self._rooms)

    @property
    def waiting(self) -> int:
        """Asks and pieces that wait to be sent."""
        return self._outbox.waiting

    def gauges(self) -> dict[str, float]:
        """Rooms of a prefill stage, each under a lease; by the names of `metrics.catalog.KV`."""
        if self.plan.kv_role != "prefill":
            return {}
        renewed, expired = self._renewals, self._expired
        return {"kv_leases": len(self._rooms), "kv_leases_renewed_total": renewed, "kv_leases_expired_total": expired}

    # --- messages -------------------------------------------------------------------------------------------------

    def _ask(self, sender: str, message: KVAsk) -> None:
        room = message.room
        refusal = self._refusal(message)
        if refusal is None and self._open(room, sender) is None:
            refusal = "the room is or was open"
        if refusal is not None:
            self._decline(sender, message.body)
            self._process.send(sender, KVClose(room, self.plan.kv_peer, refusal))
            return
        self._arm()
        self._fetch(sender, room, message.body, self._asked)

    def _refusal(self, message: KVAsk) -> str | None:
        if self.plan.kv_role != "prefill" or message.source != self.plan.kv_peer:
            return f"{self.plan.name} prefills nothing for {message.source}"
        return "the prefill instance is draining" if self._draining else None

    def _piece(self, sender: str, message: KVPiece) -> None:
        room = message.room
        if self.plan.kv_role != "decode" or not self._is_open(room, sender):
            self._process.counters["kv_late"] += 1
            self._decline(sender, message.body)
            return
        self._fetch(sender, room, message.body, self._arrived)

    def _close(self, sender: str, message: KVClose) -> None:
        if self._is_open(message.room, sender):
            self._end(message.room, message.reason)
            self._tell(message.room, message.reason, lost=False)

    def _beat(self, sender: str, message: KVBeat) -> None:
        now = self._clock()
        for room in message.rooms:
            with self._lock:
                renewed = self._rooms.renew(room, sender, now)
            self._renewals += renewed
            if not renewed:
                self._process.send(sender, KVClose(room, self.plan.kv_peer, ENDED_ELSEWHERE))

    def _fetch(self, sender: str, room: Room, body: Body, then: Callable[[str, Room, bytes, list[Any]], None]) -> None:
        assert self._fetching is not None

        def landed(fetched: Fetched) -> None:
            if not self._is_open(room, sender):
                self._process.counters["kv_late"] += 1
                fetched.discard()
                return
            try:
                record, tensors = _opened(fetched)
            except ProtocolError as error:
                self.close(room, describe(error))
                self._tell(room, describe(error))
                return
            then(sender, room, record, tensors)

        def failed(error: Exception) -> None:
            if self._is_open(room, sender):
                self.close(room, describe(error))
                self._tell(room, describe(error))

        self._fetching.fetch(sender, body, _key(room), landed, failed, holder=self.plan.name)

    def _asked(self, peer: str, room: Room, record: bytes, tensors: list[Any]) -> None:
        with self._lock:
            sink = self._sink
            if sink is None:
                self._early.append((peer, room, record, tensors))
                return
        self._call(room, lambda: sink.asked(room, peer, record, tensors))

    def _arrived(self, peer: str, room: Room, header: bytes, tensors: list[Any]) -> None:
        sink = self._sink
        if sink is not None:
            self._call(room, lambda: sink.arrived(room, header, tensors))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _work_of(self, request_id: str) -> RequestWork | None:
        """The request's live attempt here."""
        works = [one for one in self._named(request_id) if not one.dead]
        return max(works, key=lambda one: one.attempt, default=None)

    def _brought_along(self, room: Room) -> tuple[Member, ...]:
        return next((one.members for one in self._named(room.request_id) if one.members), ())

    def _open(self, room: Room, peer: str) -> RoomWork | None:
        with self._lock:
            if not self._rooms.open(room, peer, self._clock()):
                return None
            work = self._sending[room] = RoomWork(room)
        return work

    def _is_open(self, room: Room, peer: str) -> bool:
        with self._lock:
            return self._rooms.peer(room) == peer

    def _end(self, room: Room, reason: str | None) -> str | None:
        """Nothing is sent or taken for the room any more. Returns: its peer; None: it was not open."""
        with self._lock:
            peer = self._rooms.end(room)
            work = self._sending.pop(room, None)
        if peer is None:
            return None
        if work is not None:
            work.aborted = reason is not None
        self._process.counters["kv_done" if reason is None else "kv_failed"] += 1
        self._outbox.drop(room)
        self._loop.call_soon_threadsafe(self._free, room)
        return peer

    def _free(self, room: Room) -> None:
        """Free what send queues and relays hold of it: memory that a peer may still write goes into quarantine."""
        self._process.send_queues.abort(key_owner(room), room.request_id, room.generation)
        if self._fetching is not None:
            self._fetching.drop(_key(room))
        self._process.relays.cleanup(_key(room))

    def _end_where(self, chosen: Callable[[Room, str], bool], reason: str, *, tell: bool = False) -> None:
        with self._lock:
            rooms = self._rooms.where(chosen)
        for room in rooms:
            peer = self._end(room, reason)
            if peer is not None:
                if tell:
                    self._process.send(peer, KVClose(room, self.plan.kv_peer, reason))
                self._tell(room, reason)

    def _cannot_send(self, room: Room, problem: str) -> None:
        """Ends a room whose payload cannot be sent. The outbox's thread or the I/O thread calls it."""
        with self._lock:
            is_open = self._rooms.peer(room) is not None
        if is_open:
            self.close(room, problem)
            self._tell(room, problem)

    def _tell(self, room: Room, reason: str | None, *, lost: bool = True) -> None:
        """lost: the other side has not said so."""
        sink = self._sink
        if sink is not None:
            with contextlib.suppress(Exception):
                self._guarded(room, lambda: sink.closed(room, reason, lost=lost))

    def _call(self, room: Room, call: Callable[[], None]) -> None:
        """A sink that raises fails its room alone."""
        try:
            self._guarded(room, call)
        except Exception as error:
            self.close(room, describe(error))
            self._tell(room, describe(error), lost=False)

    def _guarded(self, room: Room, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("the engine of %s failed on room %s", self.plan.name, room)
            raise

    def _decline(self, sender: str, body: Body) -> None:
        if body.transfer:
            with contextlib.suppress(TransferError):
                self._process.relays.decline(body.transfer, peer=sender)

    def _asked_rooms(self, now: float) -> dict[str, list[Room]]:
        """Rooms that were asked for, by peer. Prefill does not know a room whose ask still waits for credits: a beat
        for it would end it.
        """
        with self._lock:
            works = self._sending.items()
            asked = {room for room, one in works if one.asked_at is not None and now - one.asked_at >= SENT_S}
            by_peer = self._rooms.by_peer()
        return {peer: mine for peer, rooms in by_peer.items() if (mine := [one for one in rooms if one in asked])}

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """While rooms are open: decode renews, prefill looks for leases that are over."""
        self._timer = None
        now = self._clock()
        if self.plan.kv_role == "decode" and now - self._renewed_at >= kvrooms.RENEW_S:
            self._renewed_at = now
            for peer, rooms in self._asked_rooms(now).items():
                for start in range(0, len(rooms), KV_BEAT_ROOMS):
                    self._process.send(peer, KVBeat(self.plan.kv_peer, tuple(rooms[start : start + KV_BEAT_ROOMS])))
        elif self.plan.kv_role == "prefill":
            with self._lock:
                expired = frozenset(self._rooms.expired(now))
            self._expired += len(expired)
            self._end_where(lambda room, _: room in expired, "its lease is over", tell=True)
        if len(self._rooms):
            self._arm()


def _key(room: Room) -> str:
    """The key by which relays call the transfers of a room."""
    return attempt_key(key_owner(room), room.request_id, room.generation)


def _opened(fetched: Fetched) -> tuple[bytes, list[Any]]:
    """Record and tensors. Raises: ProtocolError: it is something else."""
    value = fetched.open()
    if not isinstance(value, dict) or value.keys() != {"record", "tensors"}:
        raise ProtocolError("a KV message without record and tensors")
    record, tensors = value["record"], value["tensors"]
    if not isinstance(record, bytes) or not isinstance(tensors, list) or not all(hasattr(t, "shape") for t in tensors):
        raise ProtocolError("a KV message with a record that is not bytes, or tensors that are not tensors")
    return record, tensors
