"""What the mooncake relay fetches: memory for each transfer, two threads that read, quarantine.

A read that timed out cannot be cancelled: its bytes come when the frozen peer goes on. Its memory is not used again
before the peer's process is gone. All memory lies in an arena of its own, as the nixl relay's; above half of it, what
has come is copied out, so that transfers never wait for authors. On the loop, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from stage_runtime.errors import RelayFailed, TransferError
from stage_runtime.payloads import buffers
from stage_runtime.payloads.pack import ALIGNMENT
from stage_runtime.relays import arena, pages
from stage_runtime.relays.arena import Arena
from stage_runtime.relays.base import Peer, Release, TransferId
from stage_runtime.relays.mooncake.engine import Engine
from stage_runtime.relays.mooncake.messages import Facts, Metadata
from stage_runtime.relays.operations import GetOperation
from stage_runtime.relays.pins import Pins

THREADS: Final = 2  # each burns a core while it reads
PIECE_NBYTES: Final = 16 << 20  # progress is seen, and an abort is heeded, once a piece
ROOM_S: Final = 2e-3  # how often memory is looked for by what found none
LATE_S: Final = 4.0  # a read that failed after so long has timed out; else its connection is broken
SETTLE_S: Final = 2.0  # after a broken connection: what had reached this machine is read by then
ASK_S: Final = 2.0  # how often it is looked whether a frozen peer's process is gone

Key = tuple[Peer, TransferId]


class Route:
    """The way to one peer."""

    def __init__(self, peer: Peer, facts: Facts) -> None:
        self.peer = peer
        self.facts = facts
        self.gone = False
        self.moved_at = 0.0  #: When something last came from it, on `time.monotonic`.


class Incoming:
    """One get under way."""

    __slots__ = ("here_nbytes", "holder", "key", "metadata", "operation", "region", "request_id", "stopping")

    def __init__(self, operation: GetOperation, metadata: Metadata, request_id: str, holder: str) -> None:
        self.operation = operation
        self.key: Key = (operation.peer, operation.transfer)
        self.metadata = metadata
        self.request_id = request_id
        self.holder = holder
        self.region: Any = None  #: Its memory, and behind it room for the slot's header.
        self.here_nbytes = 0
        self.stopping = False


class _Failure(msgspec.Struct, frozen=True):
    """Why a transfer is not here. moves: its bytes may still come. broken: nothing is read from that peer."""

    reason: str
    moves: bool
    broken: bool = False


class Reading:
    """Gets by peer and transfer: each waits for memory, is read, or is quarantined."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, engine: Engine, memory: Arena, pins: Pins, on_release: Release
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._memory = memory
        self._pins = pins
        self._on_release = on_release
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="omni-relay-mooncake")
        self._waiting: collections.deque[tuple[Route, Incoming]] = collections.deque()
        self._coming: dict[Key, tuple[Route, Incoming]] = {}
        self._quarantined: dict[Key, tuple[Route, Incoming]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._counts = dict.fromkeys(("received_transfers", "received_bytes", "copied_out_bytes"), 0)

    @property
    def still(self) -> bool:
        """Whether nothing is being read, nor may be."""
        return not self._coming and not self._quarantined

    def claim(self, route: Route, incoming: Incoming) -> None:
        """Fetch a transfer, now or as soon as there is memory for it.

        Raises: TransferError: it was fetched before, or no memory is as large.
        """
        key, nbytes = incoming.key, incoming.metadata.nbytes
        waits = any(other.key == key for _, other in self._waiting)
        if waits or key in self._coming or key in self._quarantined or key in self._pins:
            raise TransferError(f"transfer {key[1]} from {key[0]} was fetched twice")
        if nbytes + 3 * arena.PAGE > self._memory.nbytes:
            room = f"this process receives into {self._memory.nbytes} bytes"
            raise TransferError(f"transfer {key[1]} from {key[0]} has {nbytes} bytes, and {room}")
        if not nbytes:
            self._arrived(incoming, pages.fresh(0))
        elif self._waiting or not self._begun(route, incoming):
            self._waiting.append((route, incoming))
            self._later("room", ROOM_S, self._look)

    def last_moved(self, route: Route, key: Key) -> float:
        """When something last came from that peer. What waits here, for memory or a thread, does not wait for it."""
        return route.moved_at if key in self._coming and route.moved_at else time.monotonic()

    def cleanup(self, request_id: str) -> None:
        """A request was aborted: what is to come for it is not wanted."""
        self._end(lambda _, incoming: incoming.request_id == request_id, "its request was aborted")

    def forget(self, peer: Peer) -> None:
        """A peer is gone: nothing is awaited from it."""
        self._end(lambda route, _: route.peer == peer, f"its sender {peer} is gone")

    def stats(self) -> dict[str, int]:
        held = [incoming.metadata.nbytes for _, incoming in list(self._quarantined.values())]
        return {
            **self._counts,
            "receive_bytes_in_use": self._memory.in_use,
            "waiting_transfers": len(self._waiting),
            "coming_transfers": len(self._coming),
            "coming_here_bytes": sum(incoming.here_nbytes for _, incoming in list(self._coming.values())),
            "quarantined_receives": len(held),
            "quarantined_receive_bytes": sum(held),
        }

    def close(self) -> None:
        """What is being read goes on: its memory stays, as long as the process does if need be."""
        self._end(lambda *_: True, "the relay was closed")
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- reading ------------------------------------------------------------------------------------------------

    def _begun(self, route: Route, incoming: Incoming) -> bool:
        nbytes = incoming.metadata.nbytes
        incoming.region = self._memory.allocate_region(nbytes + -nbytes % ALIGNMENT + arena.HEADER.size)
        if incoming.region is None:
            return False
        self._coming[incoming.key] = (route, incoming)
        self._pool.submit(self._read, route, incoming)
        return True

    def _read(self, route: Route, incoming: Incoming) -> None:
        """In a thread of the pool."""
        try:
            failure = self._failure(route, incoming)
        except Exception as error:  # outermost of its thread: the get fails, and the thread reads on
            failure = _Failure(f"{type(error).__name__}: {error}", moves=True)
        try:
            self._loop.call_soon_threadsafe(self._over, route, incoming, failure)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    def _failure(self, route: Route, incoming: Incoming) -> _Failure | None:
        """Read it. Returns: why it is not here, or None."""
        metadata, sent = incoming.metadata, route.facts.sends.address
        ours = incoming.region.ctypes.data
        route.moved_at = time.monotonic()
        for start in range(0, metadata.nbytes, PIECE_NBYTES):
            if incoming.stopping:
                return _Failure("it was given up", moves=False)
            nbytes = min(PIECE_NBYTES, metadata.nbytes - start)
            failure = self._piece(route, ours + start, sent + metadata.offset + start, nbytes)
            if failure is not None:
                return failure
            incoming.here_nbytes += nbytes
        # A sender that has forgotten this process uses the slot again: then its header is another one by now.
        behind = metadata.nbytes + -metadata.nbytes % ALIGNMENT
        failure = self._piece(route, ours + behind, sent + metadata.start, arena.HEADER.size)
        if failure is None and arena.HEADER.unpack_from(incoming.region, behind)[0] != metadata.generation:
            failure = _Failure("its slot has another use now", moves=False)
        return failure

    def _piece(self, route: Route, ours: int, theirs: int, nbytes: int) -> _Failure | None:
        begun = time.monotonic()
        is_here = self._engine.read(route.facts.session, ours, theirs, nbytes)
        now = time.monotonic()
        if not is_here:
            return _Failure(f"{route.peer} is not reached", moves=now - begun >= LATE_S, broken=True)
        route.moved_at = now
        return None

    def _over(self, route: Route, incoming: Incoming, failure: _Failure | None) -> None:
        """Nothing is read for it any more, except by a read that timed out."""
        del self._coming[incoming.key]
        if failure is None and not incoming.stopping:
            self._landed(incoming)
            return
        if failure is not None:
            why = f"transfer {incoming.key[1]} from {incoming.key[0]}: {failure.reason}"
            incoming.operation.fail((RelayFailed if failure.broken else TransferError)(why))
        if not route.gone:
            self._on_release(*incoming.key)
        if failure is not None and failure.moves:
            self._quarantined[incoming.key] = (route, incoming)
            self._later("gone", ASK_S, self._ask)
        elif failure is not None:
            self._loop.call_later(SETTLE_S, setattr, incoming, "region", None)

    def _landed(self, incoming: Incoming) -> None:
        region, incoming.region = incoming.region[: incoming.metadata.nbytes], None
        if self._memory.in_use > self._memory.nbytes // 2:
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

    def _end(self, which: Callable[[Route, Incoming], bool], why: str) -> None:
        for route, incoming in [pair for pair in self._waiting if which(*pair)]:
            self._waiting.remove((route, incoming))
            incoming.operation.fail(TransferError(f"transfer {incoming.key[1]} from {incoming.key[0]}: {why}"))
            if not route.gone:
                self._on_release(*incoming.key)
        for _, incoming in [pair for pair in self._coming.values() if which(*pair)]:
            incoming.stopping = True
            incoming.operation.fail(TransferError(f"transfer {incoming.key[1]} from {incoming.key[0]}: {why}"))

    def _look(self) -> None:
        while self._waiting and self._begun(*self._waiting[0]):
            self._waiting.popleft()
        if self._waiting:
            self._later("room", ROOM_S, self._look)

    # --- quarantine ---------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Look whether the processes are gone that may still send into quarantined memory."""
        for peer in {route.peer: route for route, _ in self._quarantined.values()}.values():
            self._pool.submit(self._look_for, peer)
        if self._quarantined:
            self._later("gone", ASK_S, self._ask)

    def _look_for(self, route: Route) -> None:
        """In a thread of the pool."""
        if _listens(route.facts.session):
            return
        try:
            self._loop.call_soon_threadsafe(self._loop.call_later, SETTLE_S, self._settle, route)
        except RuntimeError:  # the loop is closed
            pass

    def _settle(self, route: Route) -> None:
        for key in [key for key, (other, _) in self._quarantined.items() if other is route]:
            del self._quarantined[key]

    def _later(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        """Call it once, unless it is to be called already."""
        if name not in self._timers:

            def due() -> None:
                del self._timers[name]
                call()

            self._timers[name] = self._loop.call_later(delay_s, due)


def _listens(session: str) -> bool:
    """Whether some process listens there, frozen or not; True when that cannot be known."""
    host, _, port = session.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError as error:
        return error.errno != errno.ECONNREFUSED
    return True
