"""The relay for peers on the same machine: bytes are copied once, into our arena, and read where they lie.

A peer maps our arena once, through ``/proc/<pid>/fd/<fd>``: that takes the same boot, process-id namespace and user,
and a token in the arena's first bytes proves that it is the one meant. Whoever cannot (a pod elsewhere, a
container with processes of its own) is served by another relay. Nothing is created or removed per message.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stage_runtime.errors import TransferError
from stage_runtime.payloads import buffers
from stage_runtime.payloads.pack import ALIGNMENT, Pack
from stage_runtime.relays import arena, pages
from stage_runtime.relays.abstract import AbstractRelay
from stage_runtime.relays.arena import Arena
from stage_runtime.relays.base import Peer, RelayOperation, TransferId
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.operations import Completion, GetOperation, PutOperation
from stage_runtime.relays.placing import Placing


class Facts(msgspec.Struct, frozen=True):
    """What a peer must know to map our arena."""

    boot_id: str
    pid_namespace: int
    uid: int
    pid: int
    fd: int
    nbytes: int
    token: str


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """The place of a transfer in the sender's arena; the slot at ``start`` must still be of that generation."""

    transfer: int
    start: int
    offset: int
    nbytes: int
    generation: int


class ShmRelay(AbstractRelay[mmap.mmap, Metadata]):
    """Shared memory towards all peers of this machine."""

    name = "shm"
    MEDIUM = "memory"

    def __init__(self, context: RelayContext) -> None:
        super().__init__(context, Metadata)
        self._arena: Arena = context.arena
        self._placing = Placing(context.arena)
        self._counts = dict.fromkeys(("received_transfers", "received_bytes"), 0)

    def facts(self) -> dict[str, Any]:
        return msgspec.to_builtins(_own_facts(self._arena))  # type: ignore[no-any-return]

    def _connect(self, peer: Peer, facts: Mapping[str, Any]) -> mmap.mmap | None:
        try:
            return _mapped(msgspec.convert(facts, Facts))
        except (OSError, ValueError, OverflowError):  # ValidationError is a ValueError
            return None

    def _disconnect(self, peer: Peer, connection: mmap.mmap) -> None:
        """Views that are still held keep the mapping, and so the dead peer's pages."""

    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        """As `base.Relay.put`. like: an operation of the same pack by this relay, whose slot can be shared."""
        placed = self._placing.place(pack, like.resource if isinstance(like, PutOperation) else None)
        if placed is None:
            return None
        slot, offset, copied = placed
        metadata = Metadata(next(self._context.ids), slot.start, offset, pack.nbytes, slot.generation)
        return self._accounted(metadata, pack, placed, request_id=request_id, peer=peer, copied=copied)

    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> GetOperation:
        announced = self._decoded(metadata, peer)
        mapping = self._connections.get(peer)
        if mapping is None:
            raise TransferError(f"shm transfer {announced.transfer} from {peer}, whose arena is not mapped")
        transfer = TransferId(announced.transfer)
        region = self._region(mapping, announced, peer)
        self._pins.add(region, peer, transfer, request_id=request_id, holder=holder, nbytes=announced.nbytes)
        self._counts["received_transfers"] += 1
        self._counts["received_bytes"] += announced.nbytes
        operation = GetOperation(Completion(self._loop), transfer, peer, metadata)
        operation.arrived(buffers.view(region))
        return operation

    def stats(self) -> dict[str, int]:
        return {"copied_bytes": self._placing.copied_bytes, **self._counts, **super().stats()}

    def _free(self, put: PutOperation) -> None:
        self._arena.released(put.resource[0])

    def _quarantine(self, put: PutOperation) -> None:
        self._arena.aborted(put.resource[0])

    def _region(self, mapping: mmap.mmap, announced: Metadata, peer: Peer) -> Any:
        inside = (
            arena.PAGE <= announced.start <= announced.offset - ALIGNMENT
            and announced.offset + announced.nbytes <= len(mapping)
        )
        if announced.nbytes < 0 or not inside:
            raise TransferError(
                f"shm transfer {announced.transfer} from {peer}: not inside its arena of {len(mapping)} bytes"
            )
        generation, size = arena.HEADER.unpack_from(mapping, announced.start)
        if generation != announced.generation or announced.offset + announced.nbytes > announced.start + size:
            raise TransferError(f"shm transfer {announced.transfer} from {peer}: its slot has another use now")
        return pages.region(mapping, announced.offset, announced.nbytes)


def _own_facts(own: Arena) -> Facts:
    return Facts(
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        uid=os.geteuid(),
        pid=os.getpid(),
        fd=own.fd,
        nbytes=own.nbytes,
        token=own.token.hex(),
    )


def _mapped(facts: Facts) -> mmap.mmap | None:
    """The arena that ``facts`` describe; None when it cannot be the one that is reachable here."""
    if (facts.boot_id, facts.pid_namespace) != (_boot_id(), _pid_namespace()):
        return None
    fd = os.open(f"/proc/{facts.pid:d}/fd/{facts.fd:d}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != facts.nbytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        mapping = mmap.mmap(fd, facts.nbytes)
    finally:
        os.close(fd)
    if mapping[: len(arena.MAGIC) + arena.TOKEN_NBYTES] != arena.MAGIC + bytes.fromhex(facts.token):
        mapping.close()
        return None
    return mapping


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
