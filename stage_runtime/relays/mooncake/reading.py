"""The mooncake relay's fetching side: memory for each transfer, a few threads that read, quarantine.

A read cannot be cancelled: the bytes of one that was given up come when the frozen peer goes on. Its memory is not used
again before they have, or Mooncake has closed the connection, or the peer's process is gone. All memory lies in an
arena of its own, as the nixl relay's; above half of it, what has come is copied out, so that transfers never wait for
authors. It runs on the loop, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from stage_runtime.payloads.pack import ALIGNMENT
from stage_runtime.relays.base import OnRelease, Peer, TransferKey
from stage_runtime.relays.memory import arena
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.mooncake.engine import ReadId, ReadState, TransferEngine
from stage_runtime.relays.mooncake.mooncake_messages import MooncakeFacts, MooncakeMetadata, address_of
from stage_runtime.relays.mooncake.turns import STALL_S, Turns
from stage_runtime.relays.moving.gets import Get, Gets
from stage_runtime.relays.moving.pace import Pace
from stage_runtime.relays.moving.pending_transfers import GetOperation
from stage_runtime.rules.flow.watched_time import WatchedTime

THREADS: Final = 2  # each reads one piece
MOST_NBYTES: Final = 16 << 20  # of a piece, at whose end an abort is heeded; with 4 MiB, 256 MiB took a third longer
MOST_THREADS: Final = 8  # with those that read from stalled peers
LATE_S: Final = 5.0  # a piece that takes longer is given up: its peer is frozen, or not reached any more
QUICK_S: Final = 100e-6  # so long, a thread only lets others run between two looks at its read
LOOKS: Final = 16  # later it sleeps this part of the time that the piece has taken: few looks, and hardly late
LONG_PAUSE_S: Final = 5e-3
SETTLE_S: Final = 2.0  # after a broken connection: what had reached this machine is read by then
ASK_S: Final = 1.0  # how often quarantined reads are looked at, and whether the processes of their peers are gone


class MooncakeRoute:
    """The route to one peer."""

    def __init__(self, peer: Peer, facts: MooncakeFacts) -> None:
        self.peer = peer
        self.facts = facts
        self.gone = False
        self.moved_at = 0.0  #: When something last came from it, on `time.monotonic`.
        self.pace = Pace(MOST_NBYTES)


class MooncakeGet(Get):
    """One get under way. ``region`` has room for the slot's header behind the bytes."""

    __slots__ = ("late", "metadata", "stopping")

    def __init__(self, operation: GetOperation, metadata: MooncakeMetadata, request_id: str, holder: str) -> None:
        super().__init__(operation, metadata.nbytes, request_id, holder)
        self.metadata = metadata
        self.stopping = False
        self.late: ReadId | None = None  #: The read that has it in quarantine.


class _ReadFailure(msgspec.Struct, frozen=True):
    """Why a transfer is not here. moves: its bytes may still come, by ``late``. broken: the peer is not reached."""

    reason: str
    moves: bool = False
    late: ReadId | None = None
    broken: bool = False


class MooncakeReader:
    """Gets by peer and transfer: each waits for memory, is read, or is quarantined."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: TransferEngine,
        memory: Arena,
        pins: Pins,
        on_release: OnRelease,
        *,
        listens: Callable[[str], bool] | None = None,
        late_s: float = LATE_S,
    ) -> None:
        """listens: whether some process listens at a session's address; called in a thread, for a second at most."""
        self._late_s = late_s
        self._loop = loop
        self._listens = listens or _listens
        self._engine = engine
        self._memory = memory
        self._on_release = on_release
        self._pool = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="omni-relay-mooncake")
        self._lookers = ThreadPoolExecutor(1, thread_name_prefix="omni-relay-mooncake-look")
        self._turns: Turns[MooncakeRoute, MooncakeGet] = Turns(moving=THREADS, most=MOST_THREADS)
        self._beginning: asyncio.TimerHandle | None = None  #: Looks for stalled peers while gets wait for a thread.
        self._lacks_thread = False  #: The pool has queued a read and could start no thread for it.
        self._asking: asyncio.TimerHandle | None = None
        #: Routes that `_lookers` look for, now or when those before were: one look each.
        self._looked_for: set[MooncakeRoute] = set()
        self._gets: Gets[MooncakeRoute, MooncakeGet] = Gets(
            loop, memory, pins, on_release, room_nbytes=3 * arena.PAGE, begin=self._begun
        )
        self.claim = self._gets.claim
        self.stats = self._gets.stats

    @property
    def still(self) -> bool:
        """Whether nothing is being read, nor may be."""
        return not self._gets.in_progress and not self._gets.quarantined

    def last_moved(self, route: MooncakeRoute, key: TransferKey) -> float:
        """When something last came from that peer. A get that waits here, for memory or a
        thread, does not wait for the peer.
        """
        awaited = key in self._gets.in_progress and self._turns.reads(route)
        return route.moved_at if awaited else time.monotonic()

    def cleanup(self, request_id: str) -> None:
        """A request was aborted: what is to come for it is dropped."""
        self._end(lambda _, incoming: incoming.request_id == request_id, "its request was aborted")

    def forget(self, peer: Peer) -> None:
        """A peer is gone: nothing is awaited from it."""
        self._end(lambda route, _: route.peer == peer, f"its sender {peer} is gone")

    def close(self) -> None:
        """Reads under way go on: their memory is kept, if necessary until the process ends."""
        self._end(lambda *_: True, "the relay was closed")
        self._gets.close()
        for timer in (self._asking, self._beginning):
            if timer is not None:
                timer.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._lookers.shutdown(wait=False, cancel_futures=True)

    # --- reading ------------------------------------------------------------------------------------------------

    def _begun(self, route: MooncakeRoute, incoming: MooncakeGet) -> bool:
        nbytes = incoming.metadata.nbytes
        incoming.region = self._memory.allocate_region(nbytes + -nbytes % ALIGNMENT + arena.HEADER.size)
        if incoming.region is None:
            return False
        self._gets.in_progress[incoming.key] = (route, incoming)
        self._turns.add(route, incoming)
        self._read_next()
        return True

    def _read_next(self) -> None:
        """Read those whose turn it is."""
        for route, incoming in self._turns.begin(time.monotonic()):
            self._submit(self._read, route, incoming)
        if (self._turns or self._lacks_thread) and self._beginning is None:
            self._beginning = self._loop.call_later(STALL_S / 4, self._look_for_stalled)

    def _submit(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._pool.submit(call, *arguments)
            self._lacks_thread = False
        except RuntimeError:  # the machine has no thread left; the pool keeps the call for the next one that starts
            self._lacks_thread = True

    def _look_for_stalled(self) -> None:
        self._beginning = None
        if self._lacks_thread:
            self._submit(_start_thread)
        self._read_next()

    def _read(self, route: MooncakeRoute, incoming: MooncakeGet) -> None:
        """Reads the bytes of a get, and reports on the loop whether they came. A thread of the pool runs it."""
        try:
            failure = self._failure(route, incoming)
        except Exception as error:  # outermost of its thread: the get fails, and the thread reads on
            failure = _ReadFailure(f"{type(error).__name__}: {error}", moves=True)
        try:
            self._loop.call_soon_threadsafe(self._over, route, incoming, failure)
        except RuntimeError:  # the loop is closed: nothing waits for it
            pass

    def _failure(self, route: MooncakeRoute, incoming: MooncakeGet) -> _ReadFailure | None:
        """Read it. Returns: why it is not here, or None."""
        metadata, sent = incoming.metadata, route.facts.sends.address
        ours = incoming.region.ctypes.data
        while (start := incoming.here_nbytes) < metadata.nbytes:
            if incoming.stopping:
                return _ReadFailure("it was given up")
            nbytes = min(route.pace.next_nbytes(), metadata.nbytes - start)
            failure = self._piece(route, ours + start, sent + metadata.offset + start, nbytes)
            if failure is not None:
                return failure
            incoming.here_nbytes += nbytes
        # A sender that has forgotten this process uses the slot again: then its header is another one by now.
        behind = metadata.nbytes + -metadata.nbytes % ALIGNMENT
        failure = self._piece(route, ours + behind, sent + metadata.start, arena.HEADER.size)
        if failure is None and arena.HEADER.unpack_from(incoming.region, behind)[0] != metadata.generation:
            failure = _ReadFailure("its slot was reused")
        return failure

    def _piece(self, route: MooncakeRoute, ours: int, theirs: int, nbytes: int) -> _ReadFailure | None:
        not_reached = f"{route.peer} is not reached"
        read = self._engine.begin(route.facts.session, ours, theirs, nbytes)
        if read is None:
            return _ReadFailure(not_reached, broken=True)
        begun, past = time.monotonic(), 0.0
        watched = WatchedTime(begun, LONG_PAUSE_S)
        while (state := self._engine.state(read)) is ReadState.MOVES:
            past += watched.look(time.monotonic())
            if past > self._late_s:
                route.pace.gave_up()
                return _ReadFailure(not_reached, moves=True, late=read, broken=True)
            time.sleep(0 if past < QUICK_S else min(past / LOOKS, LONG_PAUSE_S))
        route.moved_at = time.monotonic()
        route.pace.took(nbytes, route.moved_at - begun)
        return None if state is ReadState.HERE else _ReadFailure(not_reached, broken=True)

    def _over(self, route: MooncakeRoute, incoming: MooncakeGet, failure: _ReadFailure | None) -> None:
        """No read is under way for it, except a late one."""
        self._turns.over(route)
        self._read_next()
        del self._gets.in_progress[incoming.key]
        if failure is None and not incoming.stopping:
            region, incoming.region = incoming.region[: incoming.nbytes], None
            self._gets.landed(incoming, region)
            return
        if failure is not None:
            incoming.fail(failure.reason, broken=failure.broken)
        if not route.gone:
            self._on_release(*incoming.key)
        if failure is not None and failure.moves:
            incoming.late = failure.late
            self._gets.quarantined[incoming.key] = (route, incoming)
            self._ask_later()
        elif failure is not None:
            self._loop.call_later(SETTLE_S, setattr, incoming, "region", None)

    def _end(self, which: Callable[[MooncakeRoute, MooncakeGet], bool], why: str) -> None:
        self._gets.fail_waiting(which, why)
        for route, incoming in self._turns.withdraw(which):
            del self._gets.in_progress[incoming.key]
            incoming.region = None
            incoming.fail(why)
            if not route.gone:
                self._on_release(*incoming.key)
        for _, incoming in [pair for pair in self._gets.in_progress.values() if which(*pair)]:
            incoming.stopping = True
            incoming.fail(why)

    # --- quarantine ---------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Look whether late reads are over, and whether the processes are gone that have not ended theirs."""
        self._asking = None
        for key, (_, incoming) in list(self._gets.quarantined.items()):
            state = ReadState.MOVES if incoming.late is None else self._engine.state(incoming.late)
            if state is not ReadState.MOVES:
                incoming.late = None
                self._loop.call_later(SETTLE_S, self._gets.quarantined.pop, key, None)
        for route in {route for route, _ in self._gets.quarantined.values()} - self._looked_for:
            with contextlib.suppress(RuntimeError):  # the machine has no thread left: it is tried again
                self._lookers.submit(self._look_for, route)
                self._looked_for.add(route)
        if self._gets.quarantined:
            self._ask_later()

    def _ask_later(self) -> None:
        if self._asking is None:
            self._asking = self._loop.call_later(ASK_S, self._ask)

    def _look_for(self, route: MooncakeRoute) -> None:
        """Looks whether a peer is there, and reports that on the loop. A thread of the pool runs it."""
        is_there = True
        try:
            is_there = self._listens(route.facts.session)
        finally:
            try:
                self._loop.call_soon_threadsafe(self._found, route, is_there)
            except RuntimeError:  # the loop is closed
                pass

    def _found(self, route: MooncakeRoute, is_there: bool) -> None:
        self._looked_for.discard(route)
        if not is_there:
            self._loop.call_later(SETTLE_S, self._settle, route)

    def _settle(self, route: MooncakeRoute) -> None:
        for key in [key for key, (other, _) in self._gets.quarantined.items() if other is route]:
            del self._gets.quarantined[key]


def _start_thread() -> None:
    """Does nothing: a thread that starts for it makes the reads that wait."""


def _listens(session: str) -> bool:
    """Whether some process listens there, frozen or not; True when that is unknown.

    A peer that does not answer may be frozen, with a full backlog, or cut off for a while: its bytes come when it goes
    on.
    """
    try:
        socket.create_connection(address_of(session), timeout=1.0).close()
    except OSError as error:
        return error.errno != errno.ECONNREFUSED
    return True
