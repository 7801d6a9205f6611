"""The common part of all relays: account of its peers, its puts and the buffers that it has received.

A relay is a subclass in a folder of its own. It defines how a peer is connected, how bytes get there and come from
there, and what a put holds; when that is given back is decided here. `base.Relay` is what callers see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from stage_runtime.errors import UNDECODABLE, TransferError
from stage_runtime.payloads.pack import Pack
from stage_runtime.relays.base import Peer, RelayOperation, TransferId
from stage_runtime.relays.choice.choosing import Medium
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.memory.filling import Filling
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.memory.placing import Placing
from stage_runtime.relays.moving.ledger import Ledger
from stage_runtime.relays.moving.pending_transfers import GetOperation, PutOperation, TransferCompletion


class Announcement(Protocol):
    """A relay's metadata, decoded."""

    @property
    def transfer(self) -> int: ...


Connection = TypeVar("Connection")
Metadata = TypeVar("Metadata", bound=Announcement)


class AbstractRelay(ABC, Generic[Connection, Metadata]):
    """`base.Relay`, but for what differs between relays."""

    name: ClassVar[str]
    MEDIUM: ClassVar[Medium] = "tcp"  #: The value of `medium`, unless it differs between peers.
    #: Advice for an author whose payload is larger than all that may be put at once.
    CURE: ClassVar[str] = "raise OMNI_ARENA_MB, and the memory with it, or send it in parts"

    def __init__(self, context: RelayContext, metadata: type[Metadata]) -> None:
        """metadata: the Struct that this relay announces a transfer with."""
        self._context = context
        self._loop = context.loop
        self._ledger = Ledger(context.loop)
        self._placing = Placing(context.arena)
        self._pins = Pins(context.loop, context.on_release, context.thread)
        self._connections: dict[Peer, Connection] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(metadata).decode

    # --- what each relay defines ----------------------------------------------------------------------------------

    @abstractmethod
    def facts(self) -> dict[str, Any]: ...

    @abstractmethod
    def _connect(self, peer: Peer, facts: Mapping[str, Any]) -> Connection | None:
        """The route to a peer; None when this relay does not reach it. Bad facts never raise."""

    @abstractmethod
    def _disconnect(self, peer: Peer, connection: Connection) -> None:
        """The peer is gone: close the route to it, and fail what is awaited from it."""

    @abstractmethod
    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None: ...

    @abstractmethod
    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> GetOperation: ...

    def _has_room(self, packs: Sequence[Pack]) -> bool:
        """Whether there is room for all of ``packs`` now."""
        return self._placing.has_room(packs)

    def _most_nbytes(self, pieces: int) -> int:
        """Most bytes that may be put at once, in so many packs, when nothing else is in flight."""
        return self._context.arena.most_nbytes(pieces)

    def _free(self, put: PutOperation) -> None:
        """Free what a put holds: it is not read any more."""

    def _quarantine(self, put: PutOperation) -> None:
        """Its request was aborted, and its receiver may still read."""

    # --- base.Relay ---------------------------------------------------------------------------------------------

    def open(self, peer: Peer, facts: Mapping[str, Any]) -> bool:
        if peer not in self._connections:
            connection = self._connect(peer, facts)
            if connection is None:
                return False
            self._connections[peer] = connection
        return True

    def medium(self, peer: Peer) -> Medium:
        return self.MEDIUM

    def prepare(self, peer: Peer) -> None:
        """Does nothing; a relay that connects at the first use overrides it."""

    def put_early(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        return self.put(pack, request_id=request_id, peer=peer, like=like)

    def put_all(self, packs: Sequence[Pack], *, request_id: str, peer: Peer) -> list[PutOperation] | None:
        if not self._has_room(packs):
            return None
        puts: list[PutOperation] = []
        try:
            for pack in packs:
                put = self.put(pack, request_id=request_id, peer=peer)
                if put is None:  # another thread has taken the room meanwhile
                    return None
                puts.append(put)
            return puts
        finally:
            if len(puts) < len(packs):
                for put in puts:
                    self.released(peer, put.transfer)

    def refusal(self, nbytes: int, pieces: int) -> str | None:
        most = min(self._most_nbytes(pieces), self._context.settings.transfer_bytes)
        if nbytes <= most:
            return None
        return f"the relay {self.name} carries at most {most} bytes at once: {self.CURE}"

    async def put_async(self, pack: Pack, *, request_id: str, peer: Peer) -> PutOperation:
        while (put := self.put(pack, request_id=request_id, peer=peer)) is None:
            await self.room()
        return put

    async def room(self) -> None:
        await self._ledger.room()

    async def get_async(self, metadata: bytes, *, request_id: str, peer: Peer) -> GetOperation:
        operation = self.get(metadata, request_id=request_id, peer=peer)
        await operation.wait()
        return operation

    def decline(self, metadata: bytes, *, peer: Peer) -> None:
        self._context.on_release(peer, TransferId(self._decoded(metadata, peer).transfer))

    def released(self, peer: Peer, transfer: TransferId) -> bool:
        put = self._ledger.released(peer, transfer)
        if put is None:
            return False
        self._end(put)
        self._ledger.wake()
        return True

    def cleanup(self, request_id: str) -> None:
        unannounced, announced = self._ledger.aborted(request_id)
        for put in unannounced:
            self._end(put)
        for put in announced:
            self._quarantine(put)
        if unannounced:
            self._freed()

    def forget(self, peer: Peer) -> None:
        connection = self._connections.pop(peer, None)
        if connection is not None:
            self._disconnect(peer, connection)
        for put in self._ledger.held_by(peer):
            self._end(put, TransferError(f"{peer} is gone"))
        self._freed()
        self._pins.forget(peer)

    @property
    def pins(self) -> Pins:
        return self._pins

    def let_go(self) -> None:
        if self._pins.dead:
            self._pins.let_go()

    def release_now(self) -> None:
        self._pins.flush()

    def stats(self) -> dict[str, int]:
        return {**self._ledger.stats(), **self._pins.stats()}

    def close(self) -> None:
        for put in self._ledger.all():
            self._end(put, TransferError("the relay was closed"))
        for peer in list(self._connections):
            self.forget(peer)

    # --- for relays ---------------------------------------------------------------------------------------------

    def _accounted(
        self,
        metadata: Metadata,
        pack: Pack,
        resource: Any,
        *,
        request_id: str,
        peer: Peer,
        most: int | None = None,
        copied: int = 0,
        filling: Filling | None = None,
    ) -> PutOperation | None:
        """A put that begins now, for which so many bytes were ``copied``. None when that would be more than ``most``
        unreleased bytes.

        Raises: TransferError: the peer was forgotten meanwhile; nothing of the put is left.
        """
        transfer = TransferId(metadata.transfer)
        announced = self._encode(metadata)
        completion, nbytes = TransferCompletion(self._loop), pack.nbytes
        put = PutOperation(completion, transfer, peer, request_id, nbytes, resource, announced, copied, filling)
        if not self._ledger.add(put, most=most):
            return None
        # The order matters: `forget` takes the connection before it looks into the ledger.
        if peer not in self._connections and self._ledger.released(peer, transfer) is not None:
            error = TransferError(f"{peer} is gone")
            self._end(put, error)
            raise error
        return put

    def _failed(self, peer: Peer, reason: str) -> None:
        """This relay does not reach ``peer``, which may be alive: another one is used from now on. Any thread may call
        this.
        """
        self._context.failed(peer, self.name, reason)

    def _freed(self) -> None:
        """There may be room again, without a Release. Any thread may call this."""
        self._ledger.wake()
        self._context.freed()

    def _decoded(self, metadata: bytes, peer: Peer) -> Metadata:
        """Raises: TransferError: the metadata is not this relay's."""
        try:
            return self._decode(metadata)
        except UNDECODABLE as error:
            raise TransferError(f"{self.name} metadata from {peer}: {error}") from None

    def _route(self, peer: Peer) -> Connection:
        """The connection that a put uses. Raises: TransferError: this relay is not open towards ``peer``."""
        connection = self._connections.get(peer)
        if connection is None:
            raise TransferError(f"the relay {self.name} is not open towards {peer}")
        return connection

    def _incoming(self, metadata: bytes, peer: Peer) -> tuple[Metadata, Connection]:
        """The announced transfer that a get fetches, and its connection.

        Raises: TransferError: ``metadata`` is not this relay's, or ``peer`` is not open.
        """
        announced = self._decoded(metadata, peer)
        connection = self._connections.get(peer)
        if connection is None:
            raise TransferError(f"{self.name} transfer {announced.transfer} from {peer}, which is not open")
        return announced, connection

    def _end(self, put: PutOperation, error: TransferError | None = None) -> None:
        self._free(put)
        put.finish(error)
