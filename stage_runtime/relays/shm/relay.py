"""The relay for peers on the same machine: bytes are copied once, into our arena, and read where they lie.

How a peer maps it: `peer_arenas`. A peer that cannot is served by another relay. Nothing is created or removed per
message.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import msgspec

from stage_runtime.payloads import buffers
from stage_runtime.payloads.pack import Pack
from stage_runtime.relays.abstract import AbstractRelay
from stage_runtime.relays.base import Peer, RelayOperation, TransferId
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.memory import peer_arenas
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.peer_arenas import ArenaFacts
from stage_runtime.relays.moving.pending_transfers import GetOperation, PutOperation, TransferCompletion


class ShmMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The place of a transfer in the sender's arena; the slot at ``start`` must still be of that generation."""

    transfer: int
    start: int
    offset: int
    nbytes: int
    generation: int


class ShmRelay(AbstractRelay[mmap.mmap, ShmMetadata]):
    """Shared memory towards all peers of this machine."""

    name = "shm"
    MEDIUM = "memory"

    def __init__(self, context: RelayContext) -> None:
        super().__init__(context, ShmMetadata)
        self._arena: Arena = context.arena
        self._counts = dict.fromkeys(("received_transfers", "received_bytes"), 0)

    def facts(self) -> dict[str, Any]:
        return msgspec.to_builtins(peer_arenas.own_facts(self._arena))  # type: ignore[no-any-return]

    def _connect(self, peer: Peer, facts: Mapping[str, Any]) -> mmap.mmap | None:
        try:
            return peer_arenas.mapped(msgspec.convert(facts, ArenaFacts))
        except (OSError, ValueError, OverflowError):  # ValidationError is a ValueError
            return None

    def _disconnect(self, peer: Peer, connection: mmap.mmap) -> None:
        """Views that are still held keep the mapping, and so the dead peer's pages."""

    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        """Implements `base.Relay.put`. like: an operation of the same pack by this relay, whose slot can be shared."""
        placed = self._placing.place(pack, like.resource if isinstance(like, PutOperation) else None)
        if placed is None:
            return None
        slot, offset, copied, _ = placed
        metadata = ShmMetadata(next(self._context.ids), slot.start, offset, pack.nbytes, slot.generation)
        return self._accounted(metadata, pack, placed, request_id=request_id, peer=peer, copied=copied)

    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> GetOperation:
        announced, mapping = self._incoming(metadata, peer)
        transfer = TransferId(announced.transfer)
        region = peer_arenas.region(mapping, announced, self.name, peer)
        self._pins.add(region, peer, transfer, request_id=request_id, holder=holder, nbytes=announced.nbytes)
        self._counts["received_transfers"] += 1
        self._counts["received_bytes"] += announced.nbytes
        operation = GetOperation(TransferCompletion(self._loop), transfer, peer, metadata)
        operation.arrived(buffers.view(region))
        return operation

    def stats(self) -> dict[str, int]:
        return {"copied_bytes": self._placing.copied_bytes, **self._counts, **super().stats()}

    def _free(self, put: PutOperation) -> None:
        self._arena.released(put.resource[0])

    def _quarantine(self, put: PutOperation) -> None:
        self._arena.aborted(put.resource[0])
