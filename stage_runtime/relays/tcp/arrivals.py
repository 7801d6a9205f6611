"""The transfers that the tcp relay has received and nobody has fetched, and its waiters: assembly, bounds, refusals.

Nothing from the socket is trusted: a message without our token, from a peer that is gone, or that does not
fit its transfer is counted and dropped. Used by `tcp`, whose thread brings the messages; all else is on the loop.
"""

from __future__ import annotations

import collections
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from stage_runtime.errors import UNDECODABLE, TransferError
from stage_runtime.payloads import buffers
from stage_runtime.payloads.pack import ALIGNMENT
from stage_runtime.relays.base import Peer, TransferId, TransferKey
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.memory import pages
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.moving.pending_transfers import GetOperation
from stage_runtime.relays.tcp.movement import Movement

log = logging.getLogger(__name__)

BROKEN_S: Final = 60.0  # after a connection broke, what was lost with it is awaited no longer than this
REMEMBERED: Final = 10_000  # dropped transfers whose late pieces are known as such
WORD: Final = 8  # alignment of a frame that may be used without a copy


class FrameHeader(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The header of every frame. offset: of the frame, in the transfer of ``nbytes``."""

    token: bytes
    sender: str
    transfer: int
    request_id: str
    nbytes: int
    offset: int


class _IncomingTransfer:
    """One that has begun to arrive."""

    __slots__ = ("end", "nbytes", "region", "request_id", "since")

    def __init__(self, request_id: str, nbytes: int) -> None:
        self.request_id = request_id
        self.nbytes = nbytes
        self.region: Any = None  #: The buffer: the frame itself when it came whole.
        self.since = time.monotonic()  #: The time of its last piece.
        self.end = 0  #: The place where the next piece belongs. They come in order, for they come over one connection.

    def take(self, header: FrameHeader, body: memoryview) -> bool:
        """Is it the next piece? A gap that aligns the next part may lie between parts."""
        gap = header.offset - self.end
        if header.nbytes != self.nbytes or not 0 <= gap < ALIGNMENT:
            return False
        self.end = header.offset + len(body)
        self.since = time.monotonic()
        return True


class _Claim(msgspec.Struct):
    """A waiter."""

    operation: GetOperation
    nbytes: int
    request_id: str
    holder: str
    passed_at: float | None = None  #: When a later transfer came, after the connection broke: this one is lost.


class Arrivals:
    """Transfers between the socket and `get`."""

    def __init__(self, context: RelayContext, pins: Pins, token: bytes, movement: Movement) -> None:
        self._movement = movement
        self._context = context
        self._settings = context.settings
        self._pins = pins
        self._token = token
        self._decode = msgspec.msgpack.Decoder(FrameHeader).decode
        self._lock = threading.Lock()
        self._peers: set[Peer] = set()
        #: Peers that were forgotten: late pieces of theirs are dropped. Bounded: the oldest are forgotten.
        self._gone: collections.OrderedDict[Peer, None] = collections.OrderedDict()
        #: Begun, and complete: a transfer is in one of them. Those in neither ``_claims`` are unclaimed.
        self._in_progress: dict[TransferKey, _IncomingTransfer] = {}
        self._here: dict[TransferKey, _IncomingTransfer] = {}
        self._claims: dict[TransferKey, _Claim] = {}
        #: Why a transfer will not come; its late pieces are ignored. Bounded: the oldest are forgotten.
        self._lost: collections.OrderedDict[TransferKey, str] = collections.OrderedDict()
        self._broke_at: dict[Peer, float] = {}  #: When its connection broke last.
        self._unclaimed_bytes = 0
        self._counts = dict.fromkeys(
            ("received_transfers", "received_bytes", "malformed_messages", "dropped_transfers"), 0
        )

    def open(self, peer: Peer) -> None:
        with self._lock:
            self._peers.add(peer)
            self._gone.pop(peer, None)

    def message(self, frames: Sequence[zmq.Frame]) -> None:
        """One message, in the receiving thread."""
        header = self._header(frames)
        if header is None:
            self._counts["malformed_messages"] += 1
            if self._counts["malformed_messages"] == 1:
                log.warning(
                    "tcp relay: dropped a malformed message, or one of a sender that is gone; more are only counted"
                )
            return
        key = (Peer(header.sender), TransferId(header.transfer))
        self._movement.message(key[0], int(frames[0].get(zmq.SRCFD)))
        body = frames[1].buffer
        with self._lock:
            transfer = self._wanted(key, header, body)
        if transfer is None:
            return
        if transfer.region is None:
            try:
                transfer.region = self._region(header, body)
            except (OSError, MemoryError) as error:  # its next piece would find memory, and this one would be missing
                with self._lock:
                    self._lose(key, f"this process has no memory for its {header.nbytes} bytes: {error}")
                return
        if len(body) != transfer.nbytes or transfer.region.ctypes.data != buffers.address(body):
            transfer.region[header.offset : transfer.end] = np.frombuffer(body, np.uint8)
        if transfer.end == transfer.nbytes:
            self._complete(key, transfer)

    def claim(self, operation: GetOperation, nbytes: int, *, request_id: str, holder: str) -> None:
        """Claim a transfer: now, or when it is here.

        Raises: TransferError: it cannot come any more, or is claimed already.
        """
        key = (operation.peer, operation.transfer)
        claim = _Claim(operation, nbytes, request_id, holder)
        with self._lock:
            if key[0] not in self._peers:
                raise TransferError(f"transfer {key[1]} from {key[0]}, which is not open")
            if key in self._claims or key in self._pins:
                raise TransferError(f"transfer {key[1]} from {key[0]} was fetched twice")
            lost = self._lost.pop(key, None)
            here = self._here.pop(key, None)
            if lost is None and here is None:
                self._claims[key] = claim
            begun = here or self._in_progress.get(key)
            if begun is not None:
                self._unclaimed_bytes -= begun.nbytes
        if lost is not None:
            self._context.on_release(*key)
            raise TransferError(f"transfer {key[1]} from {key[0]}: {lost}")
        if here is not None:
            self._deliver(key, claim, here)

    def disconnected(self, peers: Iterable[Peer]) -> None:
        """Their connections broke: what was under way may be lost, without notice. It runs in the receiving thread."""
        with self._lock:
            self._broke_at.update(dict.fromkeys(peers, time.monotonic()))

    def moved(self, peer: Peer, transfer: TransferId) -> float:
        """When something last came that shows that the transfer may still come, on `time.monotonic`."""
        with self._lock:
            claim = self._claims.get((peer, transfer))
            if claim is not None and claim.passed_at is not None:
                return claim.passed_at
        return self._movement.last(peer)

    def decline(self, peer: Peer, transfer: TransferId) -> None:
        """Release a transfer that is not needed, however much of it has arrived."""
        with self._lock:
            self._drop((peer, transfer), "declined")
        self._context.on_release(peer, transfer)

    def cleanup(self, request_id: str) -> None:
        """Drop what has come for an aborted request, and what is awaited."""
        with self._lock:
            ended = {key: claim for key, claim in self._claims.items() if claim.request_id == request_id}
            for key in [*self._of(lambda _, transfer: transfer.request_id == request_id), *ended]:
                self._drop(key, "its request was aborted")
        for key, claim in ended.items():
            claim.operation.fail(TransferError(f"transfer {key[1]} from {key[0]}: its request was aborted"))
            self._context.on_release(*key)

    def expire(self, now: float) -> None:
        """Drop what was not claimed in time: its announcement was lost, or its request is long over. Forget the
        senders that were never introduced.

        now: of `time.monotonic`.
        """
        oldest = now - self._settings.unclaimed_s
        with self._lock:
            for key in self._of(lambda key, transfer: key not in self._claims and transfer.since < oldest):
                self._drop(key, "it was not claimed in time")
                self._counts["dropped_transfers"] += 1
            self._broke_at = {peer: at for peer, at in self._broke_at.items() if now - at <= BROKEN_S}
            unclaimed = {key[0] for table in (self._in_progress, self._here) for key in table}
            self._movement.keep(self._peers | unclaimed)

    def forget(self, peer: Peer) -> None:
        """That peer is gone: nothing more comes."""
        with self._lock:
            self._peers.discard(peer)
            self._gone[peer] = None
            if len(self._gone) > REMEMBERED:
                self._gone.popitem(last=False)
            self._broke_at.pop(peer, None)
            ended = {key: claim for key, claim in self._claims.items() if key[0] == peer}
            for key in [*self._of(lambda key, _: key[0] == peer), *ended]:
                self._drop(key, "its sender is gone")
            for key in [key for key in self._lost if key[0] == peer]:
                del self._lost[key]
        for key, claim in ended.items():
            claim.operation.fail(TransferError(f"transfer {key[1]}: its sender {peer} is gone"))

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {**self._counts, "unclaimed_bytes": self._unclaimed_bytes, "awaited_transfers": len(self._claims)}

    def _header(self, frames: Sequence[zmq.Frame]) -> FrameHeader | None:
        """The message's header; None when it is not valid."""
        if len(frames) != 2:
            return None
        try:
            header = self._decode(frames[0].buffer)
        except UNDECODABLE:
            return None
        nbytes = len(frames[1].buffer)
        fits = 0 <= header.offset and header.offset + nbytes <= header.nbytes <= self._settings.transfer_bytes
        # The sender may be unknown yet: its first transfer may come before its introduction. It knows the token.
        with self._lock:
            gone = header.sender in self._gone
        return header if fits and not gone and hmac.compare_digest(header.token, self._token) else None

    def _wanted(self, key: TransferKey, header: FrameHeader, body: memoryview) -> _IncomingTransfer | None:
        """The transfer whose next piece this is. The caller holds the lock."""
        if key in self._lost:
            return None
        transfer = self._in_progress.get(key)
        if transfer is None:
            if key in self._here or key in self._pins:
                self._counts["malformed_messages"] += 1
                return None
            claimed = key in self._claims
            if not claimed and self._unclaimed_bytes + header.nbytes > self._settings.unclaimed_bytes:
                self._lose(key, "it came long before it was announced, and found no room")
                return None
            transfer = self._in_progress[key] = _IncomingTransfer(header.request_id, header.nbytes)
            self._unclaimed_bytes += 0 if claimed else header.nbytes
        if not transfer.take(header, body):
            self._lose(key, "a piece of it was lost")
            return None
        return transfer

    def _region(self, header: FrameHeader, body: memoryview) -> Any:
        """The buffer of a transfer that begins: the frame itself if it is the whole, else from the arena, whose pages
        are warm.
        """
        if len(body) == header.nbytes and buffers.address(body) % WORD == 0:
            return np.frombuffer(body, np.uint8)
        region = self._context.arena.allocate_region(header.nbytes)
        return pages.fresh(header.nbytes) if region is None else region

    def _complete(self, key: TransferKey, transfer: _IncomingTransfer) -> None:
        """All is here. It runs in the receiving thread."""
        with self._lock:
            if self._in_progress.pop(key, None) is None:
                return  # dropped meanwhile
            self._counts["received_transfers"] += 1
            self._counts["received_bytes"] += transfer.nbytes
            if self._broke_at:
                self._pass(key)
            claim = self._claims.pop(key, None)
            if claim is None:
                self._here[key] = transfer
                return
        self._on_loop(self._deliver, key, claim, transfer)

    def _pass(self, key: TransferKey) -> None:
        """A transfer has arrived. Earlier ones that have not were lost with a connection. The caller holds the lock."""
        peer, transfer = key
        now, broke_at = time.monotonic(), self._broke_at.get(peer)
        if broke_at is None:
            return
        if now - broke_at > BROKEN_S:
            del self._broke_at[peer]
            return
        for (its, number), claim in self._claims.items():
            if its == peer and number < transfer and claim.passed_at is None:
                claim.passed_at = now

    def _deliver(self, key: TransferKey, claim: _Claim, transfer: _IncomingTransfer) -> None:
        """Give a transfer to its claimant. It runs on the loop."""
        region, transfer.region = transfer.region, None
        self._pins.add(region, *key, request_id=claim.request_id, holder=claim.holder, nbytes=transfer.nbytes)
        if claim.nbytes != transfer.nbytes:
            sizes = f"{transfer.nbytes} bytes came, {claim.nbytes} were announced"
            claim.operation.fail(TransferError(f"transfer {key[1]} from {key[0]}: {sizes}"))
        else:
            claim.operation.arrived(buffers.view(region))

    def _drop(self, key: TransferKey, why: str) -> None:
        """Forget a transfer, arrived or not. The caller holds the lock."""
        claim = self._claims.pop(key, None)
        transfer = self._in_progress.pop(key, None) or self._here.pop(key, None)
        if transfer is not None and claim is None:
            self._unclaimed_bytes -= transfer.nbytes
        self._lost[key] = why
        if len(self._lost) > REMEMBERED:
            self._lost.popitem(last=False)

    def _lose(self, key: TransferKey, why: str) -> None:
        """A transfer cannot be completed. It runs in the receiving thread, and the caller holds the lock."""
        claim = self._claims.get(key)
        self._drop(key, why)
        self._counts["dropped_transfers"] += 1
        if claim is not None:
            del self._lost[key]
            claim.operation.fail(TransferError(f"transfer {key[1]} from {key[0]}: {why}"))
            self._on_loop(self._context.on_release, *key)

    def _of(self, wanted: Callable[[TransferKey, _IncomingTransfer], bool]) -> list[TransferKey]:
        return [key for table in (self._in_progress, self._here) for key, value in table.items() if wanted(key, value)]

    def _on_loop(self, call: Callable[..., object], *arguments: Any) -> None:
        try:
            self._context.loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed, and with it all waiters
            pass
