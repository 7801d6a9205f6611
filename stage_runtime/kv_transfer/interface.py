"""The messages of an engine and the transport of its process about blocks that cross.

The engine's half implements `KVSink`, the process's half `KVTransport`. Header bytes and records are MessagePack that
the engine's half writes and reads; the transport moves them and does not look into them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from stage_runtime.wire.parts import Room

if TYPE_CHECKING:  # a stage of plain functions imports no torch
    from torch import Tensor

__all__ = ["KVRooms", "KVSink", "KVTransport", "Piece", "Room", "Source", "source_of"]


class Piece(NamedTuple):
    """The blocks that are shipped at once. tensors: may be views of the cache, unless it is ``final``. sent: called
    when their memory may change. final: nobody writes into it any more, so that it need not be copied to wait.
    """

    header: bytes
    tensors: Sequence[Tensor]
    sent: Callable[[], None]
    final: bool = False


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A place from which a request's prompt may come. peer: the prefill instance. room: of its attempt, of generation
    0.
    """

    peer: str
    room: Room


class KVSink(Protocol):
    """The engine's side. Called in the transport's thread: it must not block, and may not raise."""

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[Tensor]) -> None:
        """Prefill side: ``peer``, an incarnation, asks for a prompt's blocks."""

    def arrived(self, room: Room, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Decode side: a piece. The tensors are the receiver's own."""

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        """The other side has closed the room; lost: it has died, or its link was cut. Nothing arrives afterwards."""


class KVRooms(Protocol):
    """The part that an engine uses, also in a process of its own. All calls return at once, from any thread."""

    def memory(self, nbytes: int) -> Tensor:
        """Memory for a piece, uint8 ``[nbytes]``; relays send it without another copy, where there is room for it."""

    def ask(self, room: Room, peer: str, record: bytes, tensors: Sequence[Tensor]) -> None:
        """Decode → prefill."""

    def ship(self, room: Room, piece: Piece) -> None:
        """Prefill → decode. ``piece.sent`` is called once in any case, also after the room was closed."""

    def close(self, room: Room, reason: str | None) -> None:
        """Either side: done (None), failed or aborted. The other side is told; nothing arrives for it afterwards.

        Only decode knows that all has come: of prefill, None changes nothing.
        """

    def attach(self, sink: KVSink) -> None:
        """The engine is ready. Questions that came before are answered by `KVSink.asked` now."""


class KVTransport(KVRooms, Protocol):
    """One per stage process."""

    def peer(self, request_id: str) -> str | None:
        """Decode side: the prefill instance that this request is bound to. None: it is prefilled here."""

    def room(self, request_id: str, generation: int) -> Room | None:
        """Decode side: the room of this request's current attempt. None: the request is not known any more."""


def source_of(transport: KVTransport, request_id: str) -> Source | None:
    """Decode side: None: the request is prefilled here, or is not known any more."""
    peer = transport.peer(request_id)
    room = None if peer is None else transport.room(request_id, 0)
    return None if peer is None or room is None else Source(peer, room)
