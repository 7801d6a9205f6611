"""The messages of two mooncake relays: facts in Hello, metadata in control messages."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Session: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:_\[\]-]{1,300}:[0-9]{1,5}$")]


class MooncakeMemory(msgspec.Struct, frozen=True):
    """A registered region."""

    address: Count
    nbytes: Count

    def holds(self, offset: int, nbytes: int) -> bool:
        return offset + nbytes <= self.nbytes and self.address + self.nbytes < 1 << 63


class MooncakeFacts(msgspec.Struct, frozen=True):
    """The facts that a peer must know to read what we send. session: host and port of the engine; protocol: what it
    moves by.
    """

    session: Session
    sends: MooncakeMemory
    protocol: Literal["tcp", "rdma"] = "tcp"


def address_of(session: str) -> tuple[str, int]:
    """Host and port.

    Raises: ValueError: no socket can have that address.
    """
    host, _, port = session.rpartition(":")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"port {port}")
    host = host.strip("[]")
    host.encode("idna")
    return host, int(port)


class MooncakeMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The place of a transfer in the sender's arena; the slot at ``start`` must still be of that generation."""

    transfer: int
    start: Count
    offset: Count
    nbytes: Count
    generation: int
