"""The messages between an engine process and its stage about blocks that cross, and the engine's end of them.

The stage's process has the links, relays and leases; the engine has the blocks. Tensors of a piece are frames of their
own. Decode's engine names a room by itself; its stage gives the room its real generation (`stage.engine_rooms`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from stage_runtime.kv_transfer.interface import KVSink, Piece
from stage_runtime.wire.parts import Room

if TYPE_CHECKING:
    from torch import Tensor


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ASK"):
    room: Room
    peer: str
    record: bytes
    tensors: list[Any]


class Ship(msgspec.Struct, frozen=True, array_like=True, tag="SHIP"):
    """number: of the engine's; `Sent` repeats it."""

    room: Room
    number: int
    header: bytes
    tensors: list[Any]


class Close(msgspec.Struct, frozen=True, array_like=True, tag="CLOSE"):
    room: Room
    reason: str | None


class Told(msgspec.Struct, frozen=True, array_like=True, tag="TOLD"):
    """An event for the profiler. name: of the engine's request."""

    event: str
    name: str
    metadata: dict[str, Any]


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="ASKED"):
    room: Room
    peer: str
    record: bytes
    tensors: list[Any]


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="ARRIVED"):
    room: Room
    header: bytes
    tensors: list[Any]


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="CLOSED"):
    room: Room
    reason: str | None
    lost: bool


class Sent(msgspec.Struct, frozen=True, array_like=True, tag="SENT"):
    """The memory of a piece may change."""

    number: int


ToStage: TypeAlias = Ask | Ship | Close | Told
ToEngine: TypeAlias = Asked | Arrived | Closed | Sent


def prefill_name(room: Room) -> str:
    """The name under which a prefill engine computes the prompt of a room."""
    return f"kv\0{room.owner}\0{room.request_id}\0{room.attempt}\0{room.generation}"


def request_of(role: str, name: str, origin: Callable[[str], str | None]) -> str | None:
    """The client's request for which an engine's request ``name`` is computed. origin: of decode's own."""
    return name.split("\0")[2] if role == "prefill" else origin(name)


class CrossingRooms:
    """`KVRooms` in an engine process. ``take`` is called on the input thread, the rest in any."""

    def __init__(self, put: Callable[[ToStage], None]) -> None:
        """put: sends to the stage, in order."""
        self._put = put
        self._sink: KVSink | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        #: Functions to call for pieces that the stage has not sent, by piece.
        self._unsent: dict[int, Callable[[], None]] = {}

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    def memory(self, nbytes: int) -> Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8)

    def ask(self, room: Room, peer: str, record: bytes, tensors: Sequence[Tensor]) -> None:
        self._put(Ask(room, peer, record, list(tensors)))

    def ship(self, room: Room, piece: Piece) -> None:
        with self._lock:
            number = next(self._numbers)
            self._unsent[number] = piece.sent
        self._put(Ship(room, number, piece.header, list(piece.tensors)))

    def close(self, room: Room, reason: str | None) -> None:
        self._put(Close(room, reason))

    def attach(self, sink: KVSink) -> None:
        self._sink = sink

    def tell(self, event: str, name: str, **metadata: Any) -> None:
        self._put(Told(event, name, metadata))

    def take(self, message: ToEngine, *, draining: bool) -> None:
        """draining: no new prompt is computed."""
        sink = self._sink
        match message:
            case Sent(number):
                with self._lock:
                    sent = self._unsent.pop(number, None)
                if sent is not None:
                    sent()
            case Asked(room) if sink is None or draining:
                self.close(room, "the engine takes no prompts" if sink is None else "the engine is shutting down")
            case Asked(room, peer, record, tensors) if sink is not None:
                sink.asked(room, peer, record, tensors)
            case Arrived(room, header, tensors) if sink is not None:
                sink.arrived(room, header, tensors)
            case Closed(room, reason, lost) if sink is not None:
                sink.closed(room, reason, lost=lost)
