"""The relay by torch.distributed: NCCL between GPUs, gloo between CPUs, the same code.

The ranks are these: for each direction of a pair of processes there is a world of two, rank 0 the receiver, rank 1 the
sender. The receiver makes it by its first get, in the sender's TCPStore under a random name. A process that restarts is
a peer with another incarnation, other ports and other worlds; the old ones end with their connection. The pipeline's
rank and world size are not used: no world has more than these two.
"""

from __future__ import annotations

import atexit
import secrets
import socket
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from stage_runtime.errors import ConfigurationError
from stage_runtime.payloads.pack import Pack
from stage_runtime.relays.abstract import AbstractRelay
from stage_runtime.relays.base import Peer, RelayOperation, TransferId
from stage_runtime.relays.context import RelayContext, RelaySettings
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.moving.pending_transfers import GetOperation, PutOperation, TransferCompletion
from stage_runtime.relays.nccl import worlds
from stage_runtime.relays.nccl.nccl_messages import NcclFacts, NcclMetadata
from stage_runtime.relays.nccl.receiving import NcclGet, NcclReceiver, NcclRoute
from stage_runtime.relays.nccl.sending import NcclPut, NcclSender

TRIM_S: Final = 5.0  # as `dispatch.TRIM_S`, of the memory that this relay receives into
BACKLOG: Final = 128


class NcclRelay(AbstractRelay[NcclRoute, NcclMetadata]):
    """torch.distributed, host memory at both ends."""

    name = "nccl"

    def __init__(self, context: RelayContext) -> None:
        """Raises: ConfigurationError: torch is not installed, or has no gloo, or the address is not here."""
        super().__init__(context, NcclMetadata)
        settings = context.settings
        bind, host = _hosts(settings)
        gpu = worlds.gpu(settings.gpus)
        self._device = worlds.device(settings.gpus)
        self._store = worlds.WorldStore(bind)
        try:
            family = socket.AF_INET6 if ":" in bind else socket.AF_INET
            listening = socket.create_server((bind, 0), family=family, backlog=BACKLOG, dualstack_ipv6=bind == "::")
        except OSError as error:
            raise ConfigurationError(f"relay 'nccl': {bind}: {error}") from error
        self._facts = NcclFacts(
            host=host,
            orders=listening.getsockname()[1],
            store=self._store.port,
            token=secrets.token_hex(16),
            gpu=gpu,
        )
        self._arena = context.arena
        self._received = Arena(settings.arena_bytes, prefault_nbytes=settings.prefault_bytes)
        # A mapping of its own: `Arena.settle` gives an author's tensor other pages in the arena's.
        self._mapping = context.arena.map_again()
        sent: np.ndarray[Any, Any] = np.frombuffer(self._mapping, np.uint8)
        self._sending = NcclSender(sent, self._facts, listening, self._unused, self._device)
        self._receiving = NcclReceiver(self._loop, self._received, self._pins, context.on_release)
        self._trimming = self._loop.call_later(TRIM_S, self._trim)
        self._is_closed = False
        self._sending.start(lambda peer: peer in self._connections)
        atexit.register(self.close)  # the interpreter ends a daemon's thread within a call of the library's

    def facts(self) -> dict[str, Any]:
        return msgspec.to_builtins(self._facts)  # type: ignore[no-any-return]

    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        """Implements `base.Relay.put`. like: an operation of the same pack by this relay, whose slot can be shared."""
        shared = like.resource.placed if isinstance(like, PutOperation) else None
        placed = self._placing.place(pack, shared)
        if placed is None:
            return None
        metadata = NcclMetadata(next(self._context.ids), pack.nbytes)
        outgoing = NcclPut(placed, peer, metadata.transfer, pack.nbytes)
        self._sending.add(outgoing)
        return self._accounted(metadata, pack, outgoing, request_id=request_id, peer=peer, copied=placed.copied_nbytes)

    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> GetOperation:
        announced, route = self._incoming(metadata, peer)
        key = (peer, TransferId(announced.transfer))
        operation = GetOperation(
            TransferCompletion(self._loop), key[1], peer, metadata, lambda: self._receiving.last_moved(route, key)
        )
        self._receiving.claim(route, NcclGet(operation, announced, request_id, holder))
        return operation

    def cleanup(self, request_id: str) -> None:
        super().cleanup(request_id)
        self._receiving.cleanup(request_id)

    def stats(self) -> dict[str, int]:
        return {
            "copied_bytes": self._placing.copied_bytes,
            "stray_notices": self._sending.strays,
            **super().stats(),
            **self._sending.stats(),
            **self._receiving.stats(),
        }

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._trimming.cancel()
        self._receiving.close()
        super().close()
        self._sending.close()
        self._received.close()

    # --- AbstractRelay ------------------------------------------------------------------------------------------

    def _connect(self, peer: Peer, facts: Mapping[str, Any]) -> NcclRoute | None:
        """Nothing is connected before the first get."""
        try:
            announced = msgspec.convert(facts, NcclFacts)
            announced.host.encode("idna")
        except ValueError:  # ValidationError and UnicodeError are
            return None
        own = self._facts
        # NCCL joins no two processes on one device.
        backend: worlds.CollectiveBackend = "nccl" if own.gpu and announced.gpu and own.gpu != announced.gpu else "gloo"
        return NcclRoute(peer, announced, own, self._context.incarnation, backend, self._device)

    def _disconnect(self, peer: Peer, connection: NcclRoute) -> None:
        self._receiving.forget(connection)
        self._sending.forget(peer)

    def _free(self, put: PutOperation) -> None:
        self._sending.free(put.resource)

    def _quarantine(self, put: PutOperation) -> None:
        self._arena.aborted(put.resource.placed[0])

    def _unused(self, outgoing: NcclPut) -> None:
        """Nothing reads that slot any more. Any thread may call this."""
        self._arena.released(outgoing.placed[0])
        self._freed()

    # --- its own ------------------------------------------------------------------------------------------------

    def _trim(self) -> None:
        self._trimming = self._loop.call_later(TRIM_S, self._trim)  # armed first, should this one raise
        self._received.trim()


def _hosts(settings: RelaySettings) -> tuple[str, str]:
    """The address at which to listen, and the one that peers receive: the tcp relay's."""
    if not settings.bind.startswith("tcp://"):
        return "127.0.0.1", "127.0.0.1"
    host = settings.bind.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host, (settings.advertise_host or host).strip("[]")
