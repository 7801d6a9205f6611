"""The messages of an engine and the transport of its process about blocks that cross.

The engine's half implements `KVSink`, the process's half `KVTransport`. Header bytes and records are MessagePack that
the engine's half writes and reads; the transport moves them and does not look into them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from stage_runtime.wire.parts import Room

if TYPE_CHECKING:  # a stage of plain functions imports no torch
    from torch import Tensor

__all__ = ["KVSink", "KVTransport", "Piece", "Room"]


class Piece(NamedTuple):
    """The blocks that are shipped at once. tensors: may be views of the cache. sent: called when their memory may
    change.
    """

    header: bytes
    tensors: Sequence[Tensor]
    sent: Callable[[], None]


class KVSink(Protocol):
    """The engine's side. Called in the transport's thread: it must not block, and may not raise."""

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[Tensor]) -> None:
        """Prefill side: ``peer``, an incarnation, asks for a prompt's blocks."""

    def arrived(self, room: Room, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Decode side: a piece. The tensors are the receiver's own."""

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        """The other side has closed the room; lost: it has died, or its link was cut. Nothing arrives afterwards."""


class KVTransport(Protocol):
    """One per stage process. All calls return at once, from any thread."""

    def peer(self, request_id: str) -> str | None:
        """Decode side: the prefill instance that this request is bound to. None: it is prefilled here."""

    def room(self, request_id: str, generation: int) -> Room | None:
        """Decode side: the room of this request's current attempt. None: the request is not known any more."""

    def ask(self, room: Room, peer: str, record: bytes, tensors: Sequence[Tensor]) -> None:
        """Decode → prefill."""

    def ship(self, room: Room, piece: Piece) -> None:
        """Prefill → decode. ``piece.sent`` is called once in any case, also after the room was closed."""

    def close(self, room: Room, reason: str | None) -> None:
        """Either side: done (None), failed or aborted. The other side is told; nothing arrives for it afterwards.

        Only decode knows that all has come: of prefill, None changes nothing.
        """

    def attach(self, sink: KVSink) -> None:
        """The engine is ready. What was asked before is answered by `KVSink.asked` now."""
