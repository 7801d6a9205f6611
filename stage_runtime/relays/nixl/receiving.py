"""The nixl relay's receiving side: memory for each transfer, given back when nothing can be written there any more.

All memory lies in an arena of its own, so that what is to be sent never takes the room of what is to come: two
processes that send to each other would wait for each other. A value that was received stays there while its views live;
above half of the arena it is copied out, so that transfers never wait for authors.

A transfer that was given up (an abort, a peer that is gone) may still be written into its memory: a frozen peer does
so when it goes on. That memory is quarantined until the peer reports that nothing moves, or its connection is broken.
It runs on the loop, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, Final

from stage_runtime.payloads.pack import ALIGNMENT
from stage_runtime.relays.base import OnRelease, Peer, TransferId, TransferKey
from stage_runtime.relays.memory.arena import HEADER, PAGE, Arena
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.moving.gets import Get, Gets
from stage_runtime.relays.moving.pending_transfers import GetOperation
from stage_runtime.relays.nixl.nixl_messages import (
    Cancel,
    NixlGrant,
    NixlMemory,
    NixlMetadata,
    TransferStopped,
    Written,
)
from stage_runtime.relays.nixl.worker import Move, NixlRoute, Worker

ASK_S: Final = 1.0  # how often a peer is asked whether it still writes into quarantined memory
SETTLE_S: Final = 2.0  # after a broken connection: what had reached this machine is read by then


class NixlGet(Get):
    """One get under way."""

    __slots__ = ("generation", "metadata", "move")

    def __init__(self, operation: GetOperation, metadata: NixlMetadata, request_id: str, holder: str) -> None:
        super().__init__(operation, metadata.nbytes, request_id, holder)
        self.metadata = metadata
        self.generation = 0
        self.move: Move | None = None  #: The move of a transfer that is read.


def _header_at(incoming: NixlGet) -> int:
    """The address in its memory to which the header of its slot is read."""
    return incoming.nbytes + -incoming.nbytes % ALIGNMENT


class NixlReceiver:
    """Gets by peer and transfer. Each is waiting for memory, coming, or quarantined."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, worker: Worker, arena: Arena, pins: Pins, on_release: OnRelease
    ) -> None:
        self._loop = loop
        self._worker = worker
        self._arena = arena
        self._on_release = on_release
        self._generations = itertools.count(1)
        self._asking: asyncio.TimerHandle | None = None
        self._gets: Gets[NixlRoute, NixlGet] = Gets(
            loop, arena, pins, on_release, room_nbytes=3 * PAGE, begin=self._begun
        )
        self.claim = self._gets.claim
        self.stats = self._gets.stats

    @property
    def memory(self) -> NixlMemory:
        return NixlMemory(self._arena.address, self._arena.nbytes)

    @property
    def expects(self) -> bool:
        """Whether some peer is to notify this process. Any thread may call this."""
        return bool(self._gets.in_progress or self._gets.quarantined)

    def last_moved(self, route: NixlRoute, key: TransferKey) -> float:
        """When something last came from that peer, on `time.monotonic`. A get that waits for memory here
        does not wait for its peer.
        """
        return route.moved_at if key in self._gets.in_progress else time.monotonic()

    def written(self, peer: Peer, notice: Written) -> bool:
        """More of a transfer is here. False: the transfer is not known."""
        found = self._find(peer, notice.transfer, notice.generation)
        if found is None:
            return False
        route, incoming = found
        route.moved_at = time.monotonic()
        incoming.here_nbytes += notice.nbytes
        if incoming.here_nbytes >= incoming.metadata.nbytes:
            self._complete(incoming)
        return True

    def stopped(self, peer: Peer, notice: TransferStopped) -> bool:
        """A transfer will not be completed. False: the transfer is not known."""
        found = self._find(peer, notice.transfer, notice.generation)
        if found is None:
            return False
        incoming = found[1]
        # unsettled: the connection broke while it moved
        incoming.fail(notice.reason[:200], broken=not notice.settled)
        self._give_up(incoming.key)
        if notice.settled:
            self._settled(incoming)
        else:
            self._loop.call_later(SETTLE_S, self._settled, incoming)
        return True

    def cleanup(self, request_id: str) -> None:
        """A request was aborted: what is to come for it is dropped."""
        self._end(lambda _, incoming: incoming.request_id == request_id, "its request was aborted", released=True)

    def forget(self, peer: Peer) -> None:
        """A peer is gone: nothing is awaited from it."""
        self._end(lambda route, _: route.peer == peer, f"its sender {peer} is gone", released=False)

    def keeps(self, peer: Peer) -> bool:
        """Whether memory is quarantined because of that peer."""
        return any(key[0] == peer for key in self._gets.quarantined)

    def close(self) -> None:
        self._gets.close()
        self._end(lambda *_: True, "the relay was closed", released=False)
        if self._asking is not None:
            self._asking.cancel()
        self._gets.quarantined.clear()

    # --- memory -------------------------------------------------------------------------------------------------

    def _begun(self, route: NixlRoute, incoming: NixlGet) -> bool:
        metadata = incoming.metadata
        behind = _header_at(incoming) + HEADER.size if route.reads else 0
        incoming.region = self._arena.allocate_region(max(metadata.nbytes, behind))
        if incoming.region is None:
            return False
        incoming.generation = next(self._generations)
        route.moved_at = max(route.moved_at, time.monotonic())
        self._gets.in_progress[incoming.key] = (route, incoming)
        address = incoming.region.ctypes.data
        if route.reads:
            theirs = route.facts.sends.address + metadata.offset
            self._read_next(route, incoming, address, theirs, metadata.nbytes, self._read)
        else:
            offset = address - self._arena.address
            grant = NixlGrant(route.token, metadata.transfer, incoming.generation, offset, metadata.nbytes)
            self._worker.post(self._grant, route, grant, incoming)
        return True

    # --- ends ---------------------------------------------------------------------------------------------------

    def _complete(self, incoming: NixlGet) -> None:
        """All is here, and nothing of it moves any more."""
        if incoming.key in self._gets.quarantined:
            self._settled(incoming)
            return
        region, incoming.region = incoming.region[: incoming.nbytes], None
        del self._gets.in_progress[incoming.key]
        self._gets.landed(incoming, region)

    def _read_next(
        self,
        route: NixlRoute,
        incoming: NixlGet,
        ours: int,
        theirs: int,
        nbytes: int,
        over: Callable[[NixlRoute, NixlGet, bool, str | None], None],
    ) -> None:
        move = Move(
            route,
            ours,
            theirs,
            nbytes,
            write=False,
            over=lambda move, reason: self._on_loop(over, route, incoming, move.broken, reason),
        )
        incoming.move = move
        self._worker.post(self._worker.move, move)

    def _read(self, route: NixlRoute, incoming: NixlGet, broken: bool, reason: str | None) -> None:
        """The bytes of a transfer that is read by this process move no more."""
        if reason is None and incoming.metadata.generation and incoming.key in self._gets.in_progress:
            # A sender that has forgotten this process uses the slot again: then its header is another one by now.
            ours = incoming.region.ctypes.data + _header_at(incoming)
            theirs = route.facts.sends.address + incoming.metadata.start
            self._read_next(route, incoming, ours, theirs, HEADER.size, self._checked)
        else:
            self._read_through(incoming, broken, reason)

    def _checked(self, route: NixlRoute, incoming: NixlGet, broken: bool, reason: str | None) -> None:
        """The header of its slot is here, too."""
        if reason is None and incoming.region is not None:
            generation, _ = HEADER.unpack_from(incoming.region, _header_at(incoming))
            if generation != incoming.metadata.generation:
                reason = "its slot was reused"
        self._read_through(incoming, broken, reason)

    def _read_through(self, incoming: NixlGet, broken: bool, reason: str | None) -> None:
        """Nothing of it moves any more."""
        if incoming.region is None:
            return
        if reason is None:
            self._complete(incoming)
            return
        incoming.fail(reason, broken=broken)
        self._give_up(incoming.key)
        self._settled(incoming)

    def _end(self, which: Callable[[NixlRoute, NixlGet], bool], why: str, *, released: bool) -> None:
        """released: its sender is notified of what had not begun."""
        self._gets.fail_waiting(which, why, released=released)
        for route, incoming in [pair for pair in self._gets.in_progress.values() if which(*pair)]:
            incoming.fail(why)
            self._give_up(incoming.key)
            if incoming.move is not None:
                incoming.move.stopping = incoming.move.stopping or why
            else:
                self._ask_for(route, incoming)

    # --- quarantine ---------------------------------------------------------------------------------------------

    def _give_up(self, key: TransferKey) -> None:
        """Quarantine what may still be written."""
        found = self._gets.in_progress.pop(key, None)
        if found is not None:
            self._gets.quarantined[key] = found
            if self._asking is None:
                self._asking = self._loop.call_later(ASK_S, self._ask)

    def _settled(self, incoming: NixlGet) -> None:
        """Nothing is written there any more."""
        found = self._gets.quarantined.pop(incoming.key, None)
        if found is None:
            return
        incoming.region = None
        if found[0].gone:
            if not self.keeps(found[0].peer):
                self._worker.post(self._worker.unload, found[0])
        else:
            self._on_release(*incoming.key)

    def _ask(self) -> None:
        """Ask the peers that have not reported that nothing moves."""
        self._asking = self._loop.call_later(ASK_S, self._ask) if self._gets.quarantined else None
        for route, incoming in self._gets.quarantined.values():
            if incoming.move is None:
                self._ask_for(route, incoming)

    def _ask_for(self, route: NixlRoute, incoming: NixlGet) -> None:
        self._worker.post(self._cancel, route, incoming)

    def _find(self, peer: Peer, transfer: int, generation: int) -> tuple[NixlRoute, NixlGet] | None:
        key = (peer, TransferId(transfer))
        found = self._gets.in_progress.get(key) or self._gets.quarantined.get(key)
        return found if found is not None and found[1].generation == generation else None

    # --- in the worker's thread ---------------------------------------------------------------------------------

    def _grant(self, route: NixlRoute, grant: NixlGrant, incoming: NixlGet) -> None:
        if not self._worker.notify(route, grant):
            why = TransferStopped(b"", grant.transfer, grant.generation, False, "its sender is not reached")
            self._on_loop(self.stopped, route.peer, why)

    def _cancel(self, route: NixlRoute, incoming: NixlGet) -> None:
        cancel = Cancel(route.token, incoming.metadata.transfer, incoming.generation)
        if not self._worker.notify(route, cancel) and route.gone:
            # Its connection is broken, so it writes no more; what it had written may still be read here.
            self._on_loop(self._loop.call_later, SETTLE_S, self._settled, incoming)

    def _on_loop(self, call: Callable[..., object], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: nothing waits for it
            pass
