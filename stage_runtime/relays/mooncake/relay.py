"""The relay by Mooncake's Transfer Engine: a receiver reads what lies in the sender's arena.

It uses TCP, and RDMA where there is a device, which has not been tried. The sender does nothing after a put but hold
the slot until its release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from stage_runtime.errors import TransferError
from stage_runtime.payloads.pack import Pack
from stage_runtime.relays.abstract import AbstractRelay
from stage_runtime.relays.base import Peer, RelayOperation, TransferId
from stage_runtime.relays.choice.choosing import Medium
from stage_runtime.relays.context import RelayContext, RelaySettings
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.mooncake.engine import TransferEngine
from stage_runtime.relays.mooncake.mooncake_messages import MooncakeFacts, MooncakeMemory, MooncakeMetadata, address_of
from stage_runtime.relays.mooncake.reading import MooncakeGet, MooncakeReader, MooncakeRoute
from stage_runtime.relays.moving.pending_transfers import GetOperation, PutOperation, TransferCompletion

TRIM_S: Final = 5.0  # as `dispatch.TRIM_S`, of the memory that this relay receives into
HEADER_NBYTES: Final = 64  # at the start of a slot, before its data

_kept: list[object] = []  #: Memory of closed relays into which a read that timed out may still write.


class MooncakeRelay(AbstractRelay[MooncakeRoute, MooncakeMetadata]):
    """Mooncake, host memory."""

    name = "mooncake"

    def __init__(self, context: RelayContext, engine: TransferEngine | None = None) -> None:
        """engine: a new one, unless it is given.

        Raises: ConfigurationError: Mooncake is not installed, or does not start here.
        """
        super().__init__(context, MooncakeMetadata)
        settings = context.settings
        if engine is None and context.rdma and settings.mooncake_protocol != "tcp":
            context.memory_lock.require(self.name, context.arena.nbytes + settings.arena_bytes)
        self._engine = engine or TransferEngine(_host(settings), settings.mooncake_protocol, context.rdma)
        self._arena = context.arena
        self._received = Arena(settings.arena_bytes, prefault_nbytes=settings.prefault_bytes)
        # A mapping of its own: `Arena.settle` gives an author's tensor other pages in the arena's.
        self._mapping = context.arena.map_again()
        sent: np.ndarray[Any, Any] = np.frombuffer(self._mapping, np.uint8)
        self._facts = MooncakeFacts(
            self._engine.session, MooncakeMemory(sent.ctypes.data, len(sent)), self._engine.protocol
        )
        if self._engine.protocol == "rdma":
            context.arena.pin()
            self._received.pin()
        self._engine.register(self._facts.sends.address, self._facts.sends.nbytes)
        self._engine.register(self._received.address, self._received.nbytes)
        self._reading = MooncakeReader(self._loop, self._engine, self._received, self._pins, context.on_release)
        self._trimming = self._loop.call_later(TRIM_S, self._trim)
        self._is_closed = False

    def facts(self) -> dict[str, Any]:
        return msgspec.to_builtins(self._facts)  # type: ignore[no-any-return]

    def medium(self, peer: Peer) -> Medium:
        return self._engine.protocol

    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        """Implements `base.Relay.put`. like: an operation of the same pack by this relay, whose slot can be shared."""
        placed = self._placing.place(pack, like.resource if isinstance(like, PutOperation) else None)
        if placed is None:
            return None
        slot, offset, copied, _ = placed
        metadata = MooncakeMetadata(next(self._context.ids), slot.start, offset, pack.nbytes, slot.generation)
        return self._accounted(metadata, pack, placed, request_id=request_id, peer=peer, copied=copied)

    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> GetOperation:
        announced, route = self._incoming(metadata, peer)
        sends = route.facts.sends
        if not sends.holds(announced.offset, announced.nbytes) or not sends.holds(announced.start, HEADER_NBYTES):
            raise TransferError(f"mooncake transfer {announced.transfer} from {peer}: not inside its arena")
        key = (peer, TransferId(announced.transfer))
        operation = GetOperation(
            TransferCompletion(self._loop), key[1], peer, metadata, lambda: self._reading.last_moved(route, key)
        )
        self._reading.claim(route, MooncakeGet(operation, announced, request_id, holder))
        return operation

    def cleanup(self, request_id: str) -> None:
        super().cleanup(request_id)
        self._reading.cleanup(request_id)

    def stats(self) -> dict[str, int]:
        return {"copied_bytes": self._placing.copied_bytes, **super().stats(), **self._reading.stats()}

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._trimming.cancel()
        self._reading.close()
        super().close()
        if not self._reading.still:
            _kept.append((self._engine, self._received, self._reading))
        self._engine.close(again=self._reading.still)
        self._received.close()

    # --- AbstractRelay ------------------------------------------------------------------------------------------

    def _connect(self, peer: Peer, facts: Mapping[str, Any]) -> MooncakeRoute | None:
        """Mooncake connects by the first read."""
        try:
            announced = msgspec.convert(facts, MooncakeFacts)
            address_of(announced.session)
        except ValueError:  # ValidationError and UnicodeError are
            return None
        same = announced.protocol == self._engine.protocol
        return MooncakeRoute(peer, announced) if same and announced.sends.holds(0, 0) else None

    def _disconnect(self, peer: Peer, connection: MooncakeRoute) -> None:
        connection.gone = True
        self._reading.forget(peer)

    def _free(self, put: PutOperation) -> None:
        self._arena.released(put.resource[0])

    def _quarantine(self, put: PutOperation) -> None:
        self._arena.aborted(put.resource[0])

    def _trim(self) -> None:
        self._trimming = self._loop.call_later(TRIM_S, self._trim)  # armed first, should this one raise
        self._received.trim()


def _host(settings: RelaySettings) -> str:
    """The address at which the engine listens, and which peers receive: the tcp relay's."""
    if not settings.bind.startswith("tcp://"):
        return "127.0.0.1"
    return (settings.advertise_host or settings.bind.removeprefix("tcp://").rpartition(":")[0]).strip("[]")
