"""What the mooncake relay fetches: memory for each transfer, two threads that read, quarantine.

A read that timed out cannot be cancelled: its bytes come when the frozen peer goes on. Its memory is not used again
before the peer's process is gone. All memory lies in an arena of its own, as the nixl relay's; above half of it, what
has come is copied out, so that transfers never wait for authors. On the loop, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from stage_runtime.payloads.pack import ALIGNMENT
from stage_runtime.relays import arena
from stage_runtime.relays.arena import Arena
from stage_runtime.relays.base import Peer, Release
from stage_runtime.relays.gets import Get, Gets, Key
from stage_runtime.relays.mooncake.engine import Engine
from stage_runtime.relays.mooncake.messages import Facts, Metadata, address_of
from stage_runtime.relays.operations import GetOperation
from stage_runtime.relays.pins import Pins

THREADS: Final = 2  # each burns a core while it reads
PIECE_NBYTES: Final = 16 << 20  # progress is seen, and an abort is heeded, once a piece
LATE_S: Final = 4.0  # a read that failed after so long has timed out; else its connection is broken
SETTLE_S: Final = 2.0  # after a broken connection: what had reached this machine is read by then
ASK_S: Final = 2.0  # how often it is looked whether a frozen peer's process is gone


class Route:
    """The way to one peer."""

    def __init__(self, peer: Peer, facts: Facts) -> None:
        self.peer = peer
        self.facts = facts
        self.gone = False
        self.moved_at = 0.0  #: When something last came from it, on `time.monotonic`.


class Incoming(Get):
    """One get under way. ``region`` has room for the slot's header behind the bytes."""

    __slots__ = ("metadata", "stopping")

    def __init__(self, operation: GetOperation, metadata: Metadata, request_id: str, holder: str) -> None:
        super().__init__(operation, metadata.nbytes, request_id, holder)
        self.metadata = metadata
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
        self._on_release = on_release
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="omni-relay-mooncake")
        self._asking: asyncio.TimerHandle | None = None
        self._gets: Gets[Route, Incoming] = Gets(
            loop, memory, pins, on_release, room_nbytes=3 * arena.PAGE, begin=self._begun
        )
        self.claim = self._gets.claim
        self.stats = self._gets.stats

    @property
    def still(self) -> bool:
        """Whether nothing is being read, nor may be."""
        return not self._gets.coming and not self._gets.quarantined

    def last_moved(self, route: Route, key: Key) -> float:
        """When something last came from that peer. What waits here, for memory or a thread, does not wait for it."""
        return route.moved_at if key in self._gets.coming and route.moved_at else time.monotonic()

    def cleanup(self, request_id: str) -> None:
        """A request was aborted: what is to come for it is not wanted."""
        self._end(lambda _, incoming: incoming.request_id == request_id, "its request was aborted")

    def forget(self, peer: Peer) -> None:
        """A peer is gone: nothing is awaited from it."""
        self._end(lambda route, _: route.peer == peer, f"its sender {peer} is gone")

    def close(self) -> None:
        """What is being read goes on: its memory stays, as long as the process does if need be."""
        self._end(lambda *_: True, "the relay was closed")
        self._gets.close()
        if self._asking is not None:
            self._asking.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- reading ------------------------------------------------------------------------------------------------

    def _begun(self, route: Route, incoming: Incoming) -> bool:
        nbytes = incoming.metadata.nbytes
        incoming.region = self._memory.allocate_region(nbytes + -nbytes % ALIGNMENT + arena.HEADER.size)
        if incoming.region is None:
            return False
        self._gets.coming[incoming.key] = (route, incoming)
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
        del self._gets.coming[incoming.key]
        if failure is None and not incoming.stopping:
            region, incoming.region = incoming.region[: incoming.nbytes], None
            self._gets.landed(incoming, region)
            return
        if failure is not None:
            incoming.fail(failure.reason, broken=failure.broken)
        if not route.gone:
            self._on_release(*incoming.key)
        if failure is not None and failure.moves:
            self._gets.quarantined[incoming.key] = (route, incoming)
            self._ask_later()
        elif failure is not None:
            self._loop.call_later(SETTLE_S, setattr, incoming, "region", None)

    def _end(self, which: Callable[[Route, Incoming], bool], why: str) -> None:
        self._gets.fail_waiting(which, why)
        for _, incoming in [pair for pair in self._gets.coming.values() if which(*pair)]:
            incoming.stopping = True
            incoming.fail(why)

    # --- quarantine ---------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Look whether the processes are gone that may still send into quarantined memory."""
        self._asking = None
        for peer in {route.peer: route for route, _ in self._gets.quarantined.values()}.values():
            self._pool.submit(self._look_for, peer)
        if self._gets.quarantined:
            self._ask_later()

    def _ask_later(self) -> None:
        if self._asking is None:
            self._asking = self._loop.call_later(ASK_S, self._ask)

    def _look_for(self, route: Route) -> None:
        """In a thread of the pool."""
        if _listens(route.facts.session):
            return
        try:
            self._loop.call_soon_threadsafe(self._loop.call_later, SETTLE_S, self._settle, route)
        except RuntimeError:  # the loop is closed
            pass

    def _settle(self, route: Route) -> None:
        for key in [key for key, (other, _) in self._gets.quarantined.items() if other is route]:
            del self._gets.quarantined[key]


def _listens(session: str) -> bool:
    """Whether some process listens there, frozen or not; True when that cannot be known."""
    try:
        socket.create_connection(address_of(session), timeout=1.0).close()
    except OSError as error:
        return error.errno != errno.ECONNREFUSED
    return True
