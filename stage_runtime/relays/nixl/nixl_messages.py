"""The messages of two nixl relays: facts in Hello, metadata in control messages, notices over NIXL.

Notices are NIXL notifications, which anybody on the pods' network can send. Each carries the receiver's token, which
is sent in Hello; one without it is counted and dropped.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

import msgspec

METADATA_NBYTES: Final = 64 << 10  # far more than an agent with two regions has
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class NixlMemory(msgspec.Struct, frozen=True):
    """A registered region."""

    address: Count
    nbytes: Count

    def holds(self, offset: int, nbytes: int) -> bool:
        return 0 <= offset and offset + nbytes <= self.nbytes


class NixlFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a peer must know.

    agent: the incarnation. metadata: NIXL's, in hexadecimal. sends, receives: what it sends from and receives into.
    machine: boot and process-id namespace. shares: UCX may use shared memory. rdma: it may use an RDMA
    device. tcp: it may use TCP.
    """

    agent: str
    metadata: str
    token: str
    sends: NixlMemory
    receives: NixlMemory
    machine: str
    shares: bool
    rdma: bool
    tcp: bool = True


class NixlMetadata(msgspec.Struct, frozen=True, array_like=True):
    """A transfer: where it lies in what its sender sends from.

    start, generation: of its slot. A reader checks afterwards whether the slot still has that generation; 0: its
    sender does not announce one.
    """

    transfer: int
    offset: Count
    nbytes: Count
    start: Count = 0
    generation: Count = 0


class NixlGrant(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Receiver to sender: write that transfer to ``offset`` of what I receive into. generation: of this grant."""

    token: bytes
    transfer: int
    generation: int
    offset: Count
    nbytes: Count


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Receiver to sender: the transfer was given up. Write no further, and notify when nothing moves."""

    token: bytes
    transfer: int
    generation: int


class Written(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Sender to receiver, by NIXL behind the bytes: so many more of the transfer are there."""

    token: bytes
    transfer: int
    generation: int
    nbytes: Count


class TransferStopped(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Sender to receiver: nothing of that transfer moves any more. reason: why it will not be completed.

    settled: all that was sent has arrived; else some of it may still be under way.
    """

    token: bytes
    transfer: int
    generation: int
    settled: bool
    reason: str


Notice: TypeAlias = NixlGrant | Cancel | Written | TransferStopped

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Notice).decode


def facts_of(announced: Mapping[str, Any]) -> tuple[NixlFacts, bytes, bytes]:
    """Facts as a peer announced them, and its metadata and token as bytes.

    Raises: ValueError: they are invalid.
    """
    facts = msgspec.convert(announced, NixlFacts)
    if len(facts.metadata) > 2 * METADATA_NBYTES:
        raise ValueError("metadata too long")
    for memory in (facts.sends, facts.receives):
        if memory.address + memory.nbytes >= 1 << 63:
            raise ValueError("no address of a process")
    try:
        return facts, binascii.unhexlify(facts.metadata), binascii.unhexlify(facts.token)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
