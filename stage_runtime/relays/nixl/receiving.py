"""What the nixl relay receives: memory for each transfer, given back when nothing can be written there any more.

All memory lies in an arena of its own, so that what is to be sent never takes the room of what is to come: two
processes that send to each other would wait for each other. What is received stays there while its views live; above
half of the arena it is copied out, so that transfers never wait for authors.

A transfer that was given up (an abort, a peer that is gone) may still be written into its memory: a frozen peer does
so when it goes on. That memory is quarantined until the peer says that nothing moves, or its connection is broken.
On the loop, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import time
from collections.abc import Callable
from typing import Any, Final

from stage_runtime.errors import RelayFailed, TransferError
from stage_runtime.payloads import buffers
from stage_runtime.relays import pages
from stage_runtime.relays.arena import PAGE, Arena
from stage_runtime.relays.base import Peer, Release, TransferId
from stage_runtime.relays.nixl.messages import Cancel, Grant, Memory, Metadata, Stopped, Written
from stage_runtime.relays.nixl.worker import Move, Route, Worker
from stage_runtime.relays.operations import GetOperation
from stage_runtime.relays.pins import Pins

ROOM_S: Final = 2e-3  # how often memory is looked for by what found none
ASK_S: Final = 1.0  # how often a peer is asked whether it still writes into quarantined memory
SETTLE_S: Final = 2.0  # after a broken connection: what had reached this machine is read by then

Key = tuple[Peer, TransferId]


class Incoming:
    """One get under way."""

    __slots__ = ("generation", "here_nbytes", "holder", "key", "metadata", "move", "operation", "region", "request_id")

    def __init__(self, operation: GetOperation, metadata: Metadata, request_id: str, holder: str) -> None:
        self.operation = operation
        self.key: Key = (operation.peer, operation.transfer)
        self.metadata = metadata
        self.request_id = request_id
        self.holder = holder
        self.generation = 0
        self.here_nbytes = 0
        self.region: Any = None  #: Its memory; the last reference to it gives it back.
        self.move: Move | None = None  #: Of a transfer that is read.


class Receiving:
    """Gets by peer and transfer. Each is waiting for memory, coming, or quarantined."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, worker: Worker, arena: Arena, pins: Pins, on_release: Release
    ) -> None:
        self._loop = loop
        self._worker = worker
        self._arena = arena
        self._pins = pins
        self._on_release = on_release
        self._generations = itertools.count(1)
        self._waiting: collections.deque[tuple[Route, Incoming]] = collections.deque()
        self._coming: dict[Key, tuple[Route, Incoming]] = {}
        self._quarantined: dict[Key, tuple[Route, Incoming]] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._counts = dict.fromkeys(("received_transfers", "received_bytes", "copied_out_bytes"), 0)

    @property
    def memory(self) -> Memory:
        return Memory(self._arena.address, self._arena.nbytes)

    @property
    def expects(self) -> bool:
        """Whether some peer is to notify this process. From any thread."""
        return bool(self._coming or self._quarantined)

    def claim(self, route: Route, incoming: Incoming) -> None:
        """Fetch a transfer, now or as soon as there is memory for it.

        Raises: TransferError: it was fetched before, or no memory is as large.
        """
        key, nbytes = incoming.key, incoming.metadata.nbytes
        waits = any(other.key == key for _, other in self._waiting)
        if waits or key in self._coming or key in self._quarantined or key in self._pins:
            raise TransferError(f"transfer {key[1]} from {key[0]} was fetched twice")
        if nbytes + 2 * PAGE > self._arena.nbytes:
            room = f"this process receives into {self._arena.nbytes} bytes"
            raise TransferError(f"transfer {key[1]} from {key[0]} has {nbytes} bytes, and {room}")
        if not nbytes:
            self._arrived(incoming, pages.fresh(0))
        elif self._waiting or not self._begun(route, incoming):
            self._waiting.append((route, incoming))
            self._look_later()

    def last_moved(self, route: Route, key: Key) -> float:
        """When something last came from that peer, on `time.monotonic`. What waits for memory here does not wait for
        its peer.
        """
        return route.moved_at if key in self._coming else time.monotonic()

    def written(self, peer: Peer, notice: Written) -> bool:
        """More of a transfer is here. False: there is no such transfer."""
        found = self._find(peer, notice.transfer, notice.generation)
        if found is None:
            return False
        route, incoming = found
        route.moved_at = time.monotonic()
        incoming.here_nbytes += notice.nbytes
        if incoming.here_nbytes >= incoming.metadata.nbytes:
            self._complete(incoming)
        return True

    def stopped(self, peer: Peer, notice: Stopped) -> bool:
        """A transfer will not be completed. False: there is no such transfer."""
        found = self._find(peer, notice.transfer, notice.generation)
        if found is None:
            return False
        incoming = found[1]
        kind = TransferError if notice.settled else RelayFailed  # unsettled: the connection broke while it moved
        incoming.operation.fail(kind(f"transfer {notice.transfer} from {peer}: {notice.reason[:200]}"))
        self._give_up(incoming.key)
        if notice.settled:
            self._settled(incoming)
        else:
            self._loop.call_later(SETTLE_S, self._settled, incoming)
        return True

    def cleanup(self, request_id: str) -> None:
        """A request was aborted: what is to come for it is not wanted."""
        self._end(lambda _, incoming: incoming.request_id == request_id, "its request was aborted", released=True)

    def forget(self, peer: Peer) -> None:
        """A peer is gone: nothing is awaited from it."""
        self._end(lambda route, _: route.peer == peer, f"its sender {peer} is gone", released=False)

    def keeps(self, peer: Peer) -> bool:
        """Whether memory is quarantined because of that peer."""
        return any(key[0] == peer for key in self._quarantined)

    def stats(self) -> dict[str, int]:
        held = [incoming.metadata.nbytes for _, incoming in list(self._quarantined.values())]
        return {
            **self._counts,
            "receive_bytes_in_use": self._arena.in_use,
            "waiting_transfers": len(self._waiting),
            "coming_transfers": len(self._coming),
            "coming_here_bytes": sum(incoming.here_nbytes for _, incoming in list(self._coming.values())),
            "quarantined_receives": len(held),
            "quarantined_receive_bytes": sum(held),
        }

    def close(self) -> None:
        for timer in (self._looking, self._asking):
            if timer is not None:
                timer.cancel()
        self._end(lambda *_: True, "the relay was closed", released=False)
        if self._asking is not None:
            self._asking.cancel()
        self._quarantined.clear()

    # --- memory -------------------------------------------------------------------------------------------------

    def _begun(self, route: Route, incoming: Incoming) -> bool:
        metadata = incoming.metadata
        incoming.region = self._arena.allocate_region(metadata.nbytes)
        if incoming.region is None:
            return False
        incoming.generation = next(self._generations)
        route.moved_at = max(route.moved_at, time.monotonic())
        self._coming[incoming.key] = (route, incoming)
        address = incoming.region.ctypes.data
        if route.reads:
            incoming.move = Move(
                route,
                address,
                route.facts.sends.address + metadata.offset,
                metadata.nbytes,
                write=False,
                over=lambda move, reason: self._on_loop(self._read, incoming, move.broken, reason),
            )
            self._worker.post(self._worker.move, incoming.move)
        else:
            offset = address - self._arena.address
            grant = Grant(route.token, metadata.transfer, incoming.generation, offset, metadata.nbytes)
            self._worker.post(self._grant, route, grant, incoming)
        return True

    def _look(self) -> None:
        self._looking = None
        while self._waiting and self._begun(*self._waiting[0]):
            self._waiting.popleft()
        if self._waiting:
            self._look_later()

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = self._loop.call_later(ROOM_S, self._look)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _complete(self, incoming: Incoming) -> None:
        """All is here, and nothing of it moves any more."""
        region, incoming.region = incoming.region, None
        if self._quarantined.pop(incoming.key, None) is not None:
            self._on_release(*incoming.key)
            return
        del self._coming[incoming.key]
        if self._arena.in_use > self._arena.nbytes // 2:
            copy = pages.fresh(len(region))
            copy[:] = region
            self._counts["copied_out_bytes"] += len(region)
            region = copy
        self._arrived(incoming, region)

    def _arrived(self, incoming: Incoming, region: Any) -> None:
        nbytes = incoming.metadata.nbytes
        self._pins.add(region, *incoming.key, request_id=incoming.request_id, holder=incoming.holder, nbytes=nbytes)
        self._counts["received_transfers"] += 1
        self._counts["received_bytes"] += nbytes
        incoming.operation.arrived(buffers.view(region))

    def _read(self, incoming: Incoming, broken: bool, reason: str | None) -> None:
        """A transfer that is read by this process moves no more."""
        if incoming.region is None:
            return
        if reason is None:
            self._complete(incoming)
            return
        kind = RelayFailed if broken else TransferError
        incoming.operation.fail(kind(f"transfer {incoming.key[1]} from {incoming.key[0]}: {reason}"))
        self._give_up(incoming.key)
        self._settled(incoming)

    def _end(self, which: Callable[[Route, Incoming], bool], why: str, *, released: bool) -> None:
        """released: its sender is told of what had not begun."""
        for route, incoming in [pair for pair in self._waiting if which(*pair)]:
            self._waiting.remove((route, incoming))
            self._fail(incoming, why)
            if released:
                self._on_release(*incoming.key)
        for route, incoming in [pair for pair in self._coming.values() if which(*pair)]:
            self._fail(incoming, why)
            self._give_up(incoming.key)
            if incoming.move is not None:
                incoming.move.stopping = incoming.move.stopping or why
            else:
                self._ask_for(route, incoming)

    def _fail(self, incoming: Incoming, why: str) -> None:
        incoming.operation.fail(TransferError(f"transfer {incoming.key[1]} from {incoming.key[0]}: {why}"))

    # --- quarantine ---------------------------------------------------------------------------------------------

    def _give_up(self, key: Key) -> None:
        """Quarantine what may still be written."""
        found = self._coming.pop(key, None)
        if found is not None:
            self._quarantined[key] = found
            if self._asking is None:
                self._asking = self._loop.call_later(ASK_S, self._ask)

    def _settled(self, incoming: Incoming) -> None:
        """Nothing is written there any more."""
        found = self._quarantined.pop(incoming.key, None)
        if found is None:
            return
        incoming.region = None
        if found[0].gone:
            if not self.keeps(found[0].peer):
                self._worker.post(self._worker.unload, found[0])
        else:
            self._on_release(*incoming.key)

    def _ask(self) -> None:
        """Ask who has not said that nothing moves."""
        self._asking = self._loop.call_later(ASK_S, self._ask) if self._quarantined else None
        for route, incoming in self._quarantined.values():
            if incoming.move is None:
                self._ask_for(route, incoming)

    def _ask_for(self, route: Route, incoming: Incoming) -> None:
        self._worker.post(self._cancel, route, incoming)

    def _find(self, peer: Peer, transfer: int, generation: int) -> tuple[Route, Incoming] | None:
        key = (peer, TransferId(transfer))
        found = self._coming.get(key) or self._quarantined.get(key)
        return found if found is not None and found[1].generation == generation else None

    # --- in the worker's thread ---------------------------------------------------------------------------------

    def _grant(self, route: Route, grant: Grant, incoming: Incoming) -> None:
        if not self._worker.notify(route, grant):
            why = Stopped(b"", grant.transfer, grant.generation, False, "its sender is not reached")
            self._on_loop(self.stopped, route.peer, why)

    def _cancel(self, route: Route, incoming: Incoming) -> None:
        cancel = Cancel(route.token, incoming.metadata.transfer, incoming.generation)
        if not self._worker.notify(route, cancel) and route.gone:
            # Its connection is broken, so it writes no more; what it had written may still be read here.
            self._on_loop(self._loop.call_later, SETTLE_S, self._settled, incoming)

    def _on_loop(self, call: Callable[..., object], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass
