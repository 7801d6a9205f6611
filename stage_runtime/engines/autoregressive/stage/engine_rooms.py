"""The rooms of a stage whose engines are processes of their own: between the stage's transport and each engine.

Here: which engine a room belongs to, and its name there. Not here: links, leases (the transport), blocks (the engine).
An engine that ends takes its rooms with it, and no others. All on the stage's event loop but for `KVSink`'s calls.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from stage_runtime.engines.autoregressive.connectors.crossing import (
    Arrived,
    Ask,
    Asked,
    Close,
    Closed,
    Sent,
    Ship,
    ToEngine,
    Told,
    ToStage,
)
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.errors import EngineDeadError, OmniError, ProtocolError, describe
from stage_runtime.kv_transfer import interface, records
from stage_runtime.kv_transfer.interface import KVTransport, Piece, Room
from stage_runtime.rules.binding import prefixes

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

UNKNOWN = "the request is not known any more"


class RoomClient(Protocol):
    """The part of an engine client that is used here."""

    on_kv: Callable[[int, ToStage], None]
    on_engine_end: Callable[[int], None]

    def choose_engine(self, tokens: Sequence[int], *beside: str) -> int:
        """The rank of the engine that computes a further prompt. Raises: ValueError: none is left."""

    def send_kv(self, rank: int, message: ToEngine) -> None:
        """Raises: EngineDeadError, OmniError: it cannot be sent to."""


class Loop(Protocol):
    """The part of an event loop that is used here."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: Any) -> object: ...


class EngineRooms:
    """`KVSink`."""

    def __init__(
        self,
        transport: KVTransport,
        client: RoomClient,
        role: str,
        *,
        notice: Callable[..., None] = lambda event, name, **metadata: None,
    ) -> None:
        """notice: records an event of the profiler under the engine's name of a request."""
        self._transport = transport
        self._client = client
        self._role = role
        self._notice = notice
        self._generations = itertools.count(1)
        self._engine_of: dict[Room, tuple[int, Room]] = {}  #: The engine of each open room, and its name there.
        self._rooms: dict[tuple[int, Room], Room] = {}  #: The inverse.
        self._lives: Counter[int] = Counter()  #: Engines that have ended, by rank.
        self._loop: Loop | None = None

    def __len__(self) -> int:
        return len(self._engine_of)

    def attach(self, loop: Loop) -> None:
        """The client serves this loop from now on."""
        self._loop = loop
        self._client.on_kv = self.take
        self._client.on_engine_end = self.engine_ended
        self._transport.attach(self)

    def detach(self) -> None:
        """The stage ends: what is open is over."""
        self._loop = None
        for room in list(self._engine_of):
            self._forget(room)
            self._transport.close(room, "the stage ends")

    def bound(self, request: EngineCoreRequest, origin: str | None) -> EngineCoreRequest:
        """The request with the prefill instance that its prompt may come from. origin: the client's request."""
        if self._role != "decode" or origin is None:
            return request
        return msgspec.structs.replace(request, kv_source=interface.source_of(self._transport, origin))

    # --- KVSink: the transport's thread ---------------------------------------------------------------------------

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[Tensor]) -> None:
        self._call(self._asked, room, peer, record, list(tensors))

    def arrived(self, room: Room, header: bytes, tensors: Sequence[Tensor]) -> None:
        self._call(self._arrived, room, header, list(tensors))

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        self._call(self._closed, room, reason, lost)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just been closed: so are the rooms
                loop.call_soon_threadsafe(function, *arguments)

    # --- to engines -----------------------------------------------------------------------------------------------

    def _asked(self, room: Room, peer: str, record: bytes, tensors: list[Any]) -> None:
        try:
            rank = self._client.choose_engine(*_beginning(record, tensors))
        except (ValueError, EngineDeadError) as error:
            self._transport.close(room, str(error))
            return
        self._keep(room, rank, room)
        self._send(room, rank, Asked(room, peer, record, tensors))

    def _arrived(self, room: Room, header: bytes, tensors: list[Any]) -> None:
        found = self._engine_of.get(room)
        if found is not None:
            rank, name = found
            self._send(room, rank, Arrived(name, header, tensors))

    def _closed(self, room: Room, reason: str | None, lost: bool) -> None:
        found = self._forget(room)
        if found is not None:
            rank, name = found
            self._send(room, rank, Closed(name, reason, lost))

    def _send(self, room: Room, rank: int, message: ToEngine) -> None:
        """A room whose engine cannot be sent to is over."""
        try:
            self._client.send_kv(rank, message)
        except OmniError as error:
            if self._forget(room) is not None:
                self._transport.close(room, describe(error))

    # --- from engines ---------------------------------------------------------------------------------------------

    def take(self, rank: int, message: ToStage) -> None:
        match message:
            case Ask():
                self._ask(rank, message)
            case Ship(name, number, header, tensors):
                sent = partial(self._call, self._sent, rank, self._lives[rank], number)
                room = self._rooms.get((rank, name))
                if room is None:
                    self._sent(rank, self._lives[rank], number)
                else:
                    self._transport.ship(room, Piece(header, tensors, sent, final=True))
            case Close(name, reason):
                self._close(rank, name, reason)
            case Told(event, name, metadata):
                self._notice(event, name, **metadata)

    def _ask(self, rank: int, ask: Ask) -> None:
        name = ask.room
        room = self._transport.room(name.request_id, next(self._generations))
        if room is None or (room.owner, room.attempt) != (name.owner, name.attempt):
            with contextlib.suppress(OmniError):
                self._client.send_kv(rank, Closed(name, UNKNOWN, True))
            return
        self._keep(room, rank, name)
        self._transport.ask(room, ask.peer, ask.record, ask.tensors)

    def _close(self, rank: int, name: Room, reason: str | None) -> None:
        room = self._rooms.get((rank, name))
        if room is None or (reason is None and self._role == "prefill"):
            return
        self._forget(room)
        self._transport.close(room, reason)

    def _sent(self, rank: int, life: int, number: int) -> None:
        if self._lives[rank] == life:  # a later engine of this rank has other pieces
            with contextlib.suppress(OmniError):
                self._client.send_kv(rank, Sent(number))

    def engine_ended(self, rank: int) -> None:
        """Its rooms are over; what it had sent was taken before."""
        self._lives[rank] += 1
        for room, (engine, _name) in list(self._engine_of.items()):
            if engine == rank:
                self._forget(room)
                self._transport.close(room, f"engine {rank} has ended")

    def _keep(self, room: Room, rank: int, name: Room) -> None:
        self._engine_of[room] = rank, name
        self._rooms[rank, name] = room

    def _forget(self, room: Room) -> tuple[int, Room] | None:
        found = self._engine_of.pop(room, None)
        if found is not None:
            del self._rooms[found]
        return found


def _beginning(record: bytes, tensors: Sequence[Tensor]) -> tuple[Sequence[int], *tuple[str, ...]]:
    """The first tokens of a prompt that is asked for, and what else its blocks depend on."""
    try:
        ask = records.decode_ask(record, tensors)
    except ProtocolError:  # its engine declines it
        return ((),)
    return tensors[0][: prefixes.TOKENS_MOST].tolist(), ask.cache_salt, ask.adapter
