"""A peer's arena, mapped into this process, and what it has put there. Used by the relays of one machine.

A peer maps our arena once, through ``/proc/<pid>/fd/<fd>``: that takes the same boot, process-id namespace and user,
and a token in the arena's first bytes proves that it is the one meant. A pod elsewhere, or a container with processes
of its own, cannot.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stage_runtime.errors import TransferError
from stage_runtime.payloads.pack import ALIGNMENT
from stage_runtime.relays.base import Peer
from stage_runtime.relays.memory import arena, pages
from stage_runtime.relays.memory.arena import Arena


class ArenaFacts(msgspec.Struct, frozen=True):
    """The facts that a peer must know to map our arena."""

    boot_id: str
    pid_namespace: int
    uid: int
    pid: int
    fd: int
    nbytes: int
    token: str


class ArenaPlace(Protocol):
    """The place of a transfer in its sender's arena; the slot at ``start`` must still be of that generation."""

    @property
    def transfer(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def generation(self) -> int: ...


def own_facts(own: Arena) -> ArenaFacts:
    return ArenaFacts(
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        uid=os.geteuid(),
        pid=os.getpid(),
        fd=own.fd,
        nbytes=own.nbytes,
        token=own.token.hex(),
    )


def mapped(facts: ArenaFacts) -> mmap.mmap | None:
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


def region(mapping: mmap.mmap, place: ArenaPlace, relay: str, peer: Peer) -> Any:
    """The bytes that lie there, as `pages.region`.

    Raises: TransferError: it is not inside the arena, or is there no more.
    """
    inside = arena.PAGE <= place.start <= place.offset - ALIGNMENT and place.offset + place.nbytes <= len(mapping)
    if place.nbytes < 0 or not inside:
        raise TransferError(
            f"{relay} transfer {place.transfer} from {peer}: not inside its arena of {len(mapping)} bytes"
        )
    generation, size = arena.HEADER.unpack_from(mapping, place.start)
    if generation != place.generation or place.offset + place.nbytes > place.start + size:
        raise TransferError(f"{relay} transfer {place.transfer} from {peer}: its slot was reused")
    return pages.region(mapping, place.offset, place.nbytes)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
