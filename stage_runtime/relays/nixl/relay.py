"""The relay by NIXL: between pods over TCP, by RDMA where both have it. One agent a process, named by its incarnation.

The receiver asks: it grants memory by a NIXL notification, the sender's thread writes there, and NIXL notifies the
receiver behind the bytes. Nothing arrives that was not asked for, so the receiver bounds its memory. The receiver reads
instead where both ends share memory or have RDMA: over TCP, UCX only emulates that.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from stage_runtime.errors import TransferError
from stage_runtime.payloads.pack import Pack
from stage_runtime.relays.abstract import AbstractRelay
from stage_runtime.relays.base import Peer, RelayOperation, TransferId
from stage_runtime.relays.choice.choosing import Medium
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.memory.arena import HEADER, Arena
from stage_runtime.relays.memory.placing import Placed
from stage_runtime.relays.moving.pending_transfers import GetOperation, PutOperation, TransferCompletion
from stage_runtime.relays.nixl import environment
from stage_runtime.relays.nixl.agent import Agent
from stage_runtime.relays.nixl.nixl_messages import (
    Cancel,
    NixlFacts,
    NixlGrant,
    NixlMemory,
    NixlMetadata,
    Notice,
    Written,
    facts_of,
)
from stage_runtime.relays.nixl.receiving import NixlGet, NixlReceiver
from stage_runtime.relays.nixl.sending import NixlPut, NixlSender
from stage_runtime.relays.nixl.worker import NixlRoute, Worker

log = logging.getLogger(__name__)

EARLY_NBYTES: Final = 1 << 20  # from here on a put is announced before it is copied: a smaller copy takes 0.1 ms
TRIM_S: Final = 5.0  # as `dispatch.TRIM_S`, of the memory that this relay receives into


class NixlRelay(AbstractRelay[NixlRoute, NixlMetadata]):
    """NIXL with UCX, host memory."""

    name = "nixl"

    def __init__(self, context: RelayContext) -> None:
        """Raises: ConfigurationError: NIXL is not installed, or does not start here."""
        super().__init__(context, NixlMetadata)
        settings = context.settings
        if "rdma" in environment.used(context.rdma):
            context.memory_lock.require(self.name, context.arena.nbytes + settings.arena_bytes)
        environment.prepare(
            settings.bind, settings.advertise_host, rdma=bool(context.rdma), allow_tcp=settings.allow_tcp
        )
        self._agent = Agent(context.incarnation)
        self._arena = context.arena
        self._received = Arena(settings.arena_bytes, prefault_nbytes=settings.prefault_bytes)
        # A mapping of its own: `Arena.settle` gives an author's tensor other pages in the arena's.
        self._mapping = context.arena.map_again()
        sent: np.ndarray[Any, Any] = np.frombuffer(self._mapping, np.uint8)
        self._sent = NixlMemory(sent.ctypes.data, len(sent))
        if context.rdma:  # whether or not UCX uses them
            context.arena.pin()
            self._received.pin()
        for memory in (self._sent, NixlMemory(self._received.address, self._received.nbytes)):
            self._agent.register(memory.address, memory.nbytes)
        self._token = secrets.token_bytes(16)
        self._strays = 0
        self._sending = NixlSender(self._sent.address, self._unused)
        self._worker = Worker(self._agent, noticed=self._noticed, expects=self._expects)
        self._receiving = NixlReceiver(self._loop, self._worker, self._received, self._pins, context.on_release)
        self._facts = self._own_facts()
        self._trimming = self._loop.call_later(TRIM_S, self._trim)
        self._is_closed = False
        self._worker.start()

    def facts(self) -> dict[str, Any]:
        return msgspec.to_builtins(self._facts)  # type: ignore[no-any-return]

    def medium(self, peer: Peer) -> Medium:
        theirs = self._connections[peer].facts
        if self._facts.rdma and theirs.rdma:
            return "rdma"
        return "memory" if _reads(self._facts, theirs) else "tcp"

    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        """Implements `base.Relay.put`. like: an operation of the same pack by this relay, whose slot can be shared."""
        route = self._route(peer)
        shared = _shared(like)
        placed = self._placing.place(pack, shared if shared is None or shared.is_filled else None)
        return None if placed is None else self._begun(pack, placed, route, request_id)

    def put_early(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        """Implements `base.Relay.put_early`: the receiver grants memory and gets the first pieces while the others are
        copied.
        """
        route = self._route(peer)
        if route.reads or pack.nbytes < EARLY_NBYTES:
            return self.put(pack, request_id=request_id, peer=peer, like=like)
        placed = self._placing.place_early(pack, _shared(like), self._freed)
        return None if placed is None else self._begun(pack, placed, route, request_id)

    def _begun(self, pack: Pack, placed: Placed, route: NixlRoute, request_id: str) -> PutOperation | None:
        metadata = NixlMetadata(
            next(self._context.ids), placed.offset, pack.nbytes, placed.slot.start, placed.slot.generation
        )
        outgoing = NixlPut(placed, route.peer, metadata.transfer, pack.nbytes, read=route.reads)
        self._sending.add(outgoing)
        filling = placed.filling if placed.copied_nbytes else None  # who shares a slot does not fill it
        try:
            put = self._accounted(
                metadata,
                pack,
                outgoing,
                request_id=request_id,
                peer=route.peer,
                copied=placed.copied_nbytes,
                filling=filling,
            )
        except TransferError:
            if filling is not None:
                filling.give_up()
            raise
        self._worker.wake()
        return put

    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> GetOperation:
        announced, route = self._incoming(metadata, peer)
        sends = route.facts.sends
        if not sends.holds(announced.offset, announced.nbytes) or not sends.holds(announced.start, HEADER.size):
            raise TransferError(f"nixl transfer {announced.transfer} from {peer}: not inside its arena")
        key = (peer, TransferId(announced.transfer))
        operation = GetOperation(
            TransferCompletion(self._loop), key[1], peer, metadata, lambda: self._receiving.last_moved(route, key)
        )
        self._receiving.claim(route, NixlGet(operation, announced, request_id, holder))
        return operation

    def cleanup(self, request_id: str) -> None:
        super().cleanup(request_id)
        self._receiving.cleanup(request_id)

    def stats(self) -> dict[str, int]:
        return {
            "copied_bytes": self._placing.copied_bytes,
            "stray_notices": self._strays,
            "library_bytes": self._agent.moved_nbytes,
            **super().stats(),
            **self._sending.stats(),
            **self._receiving.stats(),
        }

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._trimming.cancel()
        self._receiving.close()
        super().close()
        self._worker.close()
        self._received.close()

    # --- AbstractRelay ------------------------------------------------------------------------------------------

    def _connect(self, peer: Peer, facts: Mapping[str, Any]) -> NixlRoute | None:
        """Nothing is connected before the first use: a process opens many peers to which it sends nothing."""
        try:
            announced, metadata, token = facts_of(facts)
        except ValueError:  # ValidationError is one
            return None
        if announced.agent != peer or not _meet(self._facts, announced):
            return None
        return NixlRoute(peer, announced, metadata, token, reads=_reads(self._facts, announced))

    def _disconnect(self, peer: Peer, connection: NixlRoute) -> None:
        connection.gone = True
        self._receiving.forget(peer)
        if not self._receiving.keeps(peer):
            self._worker.post(self._worker.unload, connection)

    def _free(self, put: PutOperation) -> None:
        self._sending.free(put.resource)

    def _quarantine(self, put: PutOperation) -> None:
        self._arena.aborted(put.resource.placed[0])

    def _unused(self, outgoing: NixlPut) -> None:
        """Nothing reads that slot any more. Any thread may call this."""
        self._arena.released(outgoing.placed[0])
        self._freed()

    # --- the worker's thread ------------------------------------------------------------------------------------

    def _expects(self) -> bool:
        return self._sending.expects or self._receiving.expects

    def _noticed(self, name: str, notice: Notice | None) -> None:
        """Handle a peer's notice. Nothing in it is used before its token was checked."""
        peer = Peer(name)
        if notice is None or not hmac.compare_digest(notice.token, self._token):
            self._stray(name)
        elif isinstance(notice, NixlGrant | Cancel):
            route = self._connections.get(peer)
            if route is None:
                self._stray(name)
            elif isinstance(notice, NixlGrant):
                self._sending.granted(self._worker, route, notice)
            else:
                self._sending.cancelled(self._worker, route, notice)
        else:
            try:
                self._loop.call_soon_threadsafe(self._came, peer, notice)
            except RuntimeError:  # the loop is closed: nothing waits for it
                pass

    def _came(self, peer: Peer, notice: Any) -> None:
        """A peer's notice has come. The loop calls it."""
        known = self._receiving.written if isinstance(notice, Written) else self._receiving.stopped
        if not known(peer, notice):
            self._stray(peer)

    def _stray(self, name: str) -> None:
        """Counted each time, logged once."""
        self._strays += 1
        if self._strays == 1:
            log.warning("nixl relay: dropped a notice of %.80r that fits nothing here; more will only be counted", name)

    # --- its own ------------------------------------------------------------------------------------------------

    def _own_facts(self) -> NixlFacts:
        used = environment.used(self._context.rdma)
        return NixlFacts(
            agent=self._context.incarnation,
            metadata=self._agent.metadata().hex(),
            token=self._token.hex(),
            sends=self._sent,
            receives=self._receiving.memory,
            machine=_machine(),
            shares="memory" in used,
            rdma="rdma" in used,
            tcp="tcp" in used,
        )

    def _trim(self) -> None:
        self._trimming = self._loop.call_later(TRIM_S, self._trim)  # armed first, should this one raise
        self._received.trim()


def _shared(like: RelayOperation | None) -> Placed | None:
    return like.resource.placed if isinstance(like, PutOperation) else None


def _reads(own: NixlFacts, theirs: NixlFacts) -> bool:
    """Whether receivers read: both ends know the same of each other, so they agree."""
    return (own.rdma and theirs.rdma) or (own.shares and theirs.shares and own.machine == theirs.machine)


def _meet(own: NixlFacts, theirs: NixlFacts) -> bool:
    """Whether there is a way that both may use."""
    return _reads(own, theirs) or (own.tcp and theirs.tcp)


def _machine() -> str:
    """The identity of what shares memory: the boot and the process-id namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
