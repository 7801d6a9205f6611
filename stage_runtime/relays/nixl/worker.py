"""The nixl relay's thread: the only one that touches the agent. It moves bytes, and passes on the notices of peers.

NIXL gives nothing to wait on, so the thread asks again and again while something is outstanding, less and less often,
and once a second when nothing is. A thread that asks without pause takes the processor from UCX's own.
"""

from __future__ import annotations

import atexit
import collections
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from stage_runtime.errors import UNDECODABLE
from stage_runtime.relays.base import Peer
from stage_runtime.relays.memory.filling import Filling
from stage_runtime.relays.moving.pace import Pace
from stage_runtime.relays.nixl import nixl_messages
from stage_runtime.relays.nixl.agent import Agent, Handle, Unreachable
from stage_runtime.relays.nixl.nixl_messages import NixlFacts, Notice

log = logging.getLogger(__name__)

MOST_NBYTES: Final = 4 << 20  # of a piece, at whose end progress is seen
PIECES: Final = 2  # of a transfer, under way at once
#: How long nothing has happened, and how long to sleep then; 0: let other threads run.
PAUSES_S: Final = ((100e-6, 0.0), (5e-3, 50e-6), (50e-3, 200e-6), (1.0, 1e-3))
LONG_PAUSE_S: Final = 5e-3
IDLE_S: Final = 1.0  # how often it asks while nothing is expected: a receiver may give up what is here no more
WAKEABLE_S: Final = 1e-3  # from here on, what is posted ends a pause


class NixlRoute:
    """The route to one peer. ``loaded`` and ``leaving`` belong to the worker's thread."""

    def __init__(self, peer: Peer, facts: NixlFacts, metadata: bytes, token: bytes, *, reads: bool) -> None:
        self.peer = peer
        self.facts = facts
        self.metadata = metadata
        self.token = token
        self.reads = reads  #: The receiver reads, instead of being written to.
        self.loaded = False
        self.leaving = False  #: It is unloaded when nothing moves on it.
        self.gone = False  #: The peer was forgotten: it is not connected to again.
        self.moved_at = 0.0  #: When something last came from it, on `time.monotonic`.
        self.pace = Pace(MOST_NBYTES)  #: The pace of what is moved from here.


class Move:
    """Bytes on their way between an address here and one at a peer, in pieces. The worker's thread owns them."""

    __slots__ = (
        "broken",
        "filling",
        "message",
        "moved_at",
        "nbytes",
        "ours",
        "over",
        "pieces",
        "posted",
        "route",
        "stopping",
        "theirs",
        "write",
    )

    def __init__(
        self,
        route: NixlRoute,
        ours: int,
        theirs: int,
        nbytes: int,
        *,
        write: bool,
        over: Callable[[Move, str | None], None],
        message: Callable[[int], bytes] = lambda nbytes: b"",
        filling: Filling | None = None,
    ) -> None:
        """over: called when nothing moves any more: with a reason when not all has been moved.
        message: what the peer is notified of behind a piece of that size.
        filling: how much may be moved already; None: all.
        """
        self.route = route
        self.ours = ours
        self.theirs = theirs
        self.nbytes = nbytes
        self.write = write
        self.over = over
        self.message = message
        self.filling = filling
        self.posted = 0
        self.moved_at = 0.0  #: When its last piece was over, on `time.monotonic`.
        self.pieces: collections.deque[_Piece] = collections.deque()
        self.stopping: str | None = None  #: Why no further piece is posted.
        self.broken = False  #: A piece has failed: of what was sent, some may be on its way still.

    @property
    def ready_nbytes(self) -> int:
        """So many of its bytes may be moved now."""
        return self.nbytes if self.filling is None else self.filling.nbytes


class _Piece(NamedTuple):
    """One that moves."""

    handle: Handle
    nbytes: int
    posted_at: float


class Worker:
    """The thread, from `start` to `close`."""

    def __init__(
        self, agent: Agent, *, noticed: Callable[[str, Notice | None], None], expects: Callable[[], bool]
    ) -> None:
        """noticed: called in the thread with what a peer notifies, and its agent's name; None: no notice of ours.
        expects: whether a notice may come.
        """
        self._agent = agent
        self._noticed = noticed
        self._expects = expects
        self._moves: list[Move] = []
        self._posted: collections.deque[tuple[Callable[..., object], tuple[Any, ...]]] = collections.deque()
        self._awake = threading.Event()
        self._closing = False
        self._failed = False  #: A turn has raised, which was logged.
        self._thread = threading.Thread(target=self._run, name="omni-relay-nixl", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.close)  # the interpreter ends a daemon's thread within a call of NIXL's: C++ aborts then

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have it called in the thread. Any thread may call this."""
        self._posted.append((call, arguments))
        self._awake.set()

    def wake(self) -> None:
        """Ask at the short interval from now on, because a notice is expected. Any thread may call this."""
        self._awake.set()

    def close(self) -> None:
        """End the thread, and with the agent all that moves."""
        if self._closing:
            return
        atexit.unregister(self.close)
        self._closing = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._moves.clear()
        self._agent.close()

    # --- in the thread ------------------------------------------------------------------------------------------

    def notify(self, route: NixlRoute, notice: Notice) -> bool:
        """Notify a peer; on a new connection when the last one is broken. False: it cannot be reached."""
        message = nixl_messages.encode(notice)
        for _ in range(2):
            try:
                self._load(route)
                self._agent.notify(route.peer, message)
                return True
            except Unreachable as error:
                log.debug("nixl relay: %s is not reached: %s", route.peer, error)
                if route.gone:
                    return False
                self.unload(route)
        return False

    def unload(self, route: NixlRoute) -> None:
        """Close the route to a peer, as soon as nothing moves on it: NIXL would call a transfer failed that goes on.
        The next use opens it anew.
        """
        route.leaving = any(move.route is route and move.pieces for move in self._moves)
        if route.loaded and not route.leaving:
            route.loaded = False
            self._agent.unload(route.peer)

    def move(self, move: Move) -> None:
        """Start it."""
        self._moves.append(move)
        self._advance(move)

    def _run(self) -> None:
        quiet_since = time.monotonic()
        while not self._closing:
            try:
                worked = self._turn()
            except Exception:
                worked = False
                if not self._failed:  # outermost loop: it goes on, and logs this once
                    self._failed = True
                    log.exception("nixl relay: unexpected error in its thread")
            if worked:
                quiet_since = time.monotonic()
            elif self._moves or self._expects():
                self._pause(time.monotonic() - quiet_since)
            elif not self._posted:
                self._awake.wait(IDLE_S)
                self._awake.clear()
                quiet_since = time.monotonic()

    def _pause(self, quiet_s: float) -> None:
        pause_s = next((pause_s for until_s, pause_s in PAUSES_S if quiet_s < until_s), LONG_PAUSE_S)
        if pause_s < WAKEABLE_S:
            time.sleep(pause_s)
        else:
            self._awake.wait(pause_s)
            self._awake.clear()

    def _turn(self) -> bool:
        """One turn of the loop. Returns: whether there was anything to do."""
        worked = False
        while self._posted:
            call, arguments = self._posted.popleft()
            call(*arguments)
            worked = True
        for name, found in self._agent.notifications().items():
            worked = True
            for message in found:
                self._noticed(name, _decoded(message))
        for move in list(self._moves):
            worked = self._advance(move) or worked
        return worked

    def _advance(self, move: Move) -> bool:
        """Post what may be posted, note what has arrived. Whether anything has."""
        arrived = False
        while move.pieces:
            piece = move.pieces[0]
            try:
                if not self._agent.done(piece.handle):
                    break
                now = time.monotonic()
                move.route.pace.took(piece.nbytes, now - max(piece.posted_at, move.moved_at))
                move.moved_at = move.route.moved_at = now
            except Unreachable as error:
                move.stopping, move.broken = str(error), True
            move.pieces.popleft()
            arrived = True
        while len(move.pieces) < PIECES and move.posted < move.ready_nbytes and move.stopping is None:
            try:
                self._post_piece(move)
            except Unreachable as error:
                move.stopping, move.broken = str(error), True
        if move.pieces or (move.posted < move.nbytes and move.stopping is None):
            return arrived
        self._moves.remove(move)
        if move.broken or move.route.leaving:
            self.unload(move.route)
        move.over(move, move.stopping if move.broken or move.posted < move.nbytes else None)
        return True

    def _post_piece(self, move: Move) -> None:
        nbytes = min(move.route.pace.next_nbytes(), move.ready_nbytes - move.posted)
        self._load(move.route)
        handle = self._agent.begin(
            write=move.write,
            peer=move.route.peer,
            ours=move.ours + move.posted,
            theirs=move.theirs + move.posted,
            nbytes=nbytes,
            message=move.message(nbytes),
        )
        move.posted += nbytes
        move.pieces.append(_Piece(handle, nbytes, time.monotonic()))

    def _load(self, route: NixlRoute) -> None:
        if not route.loaded:
            if route.gone:
                raise Unreachable("it is gone")
            self._agent.load(route.peer, route.metadata)
            route.loaded = True


def _decoded(message: bytes) -> Notice | None:
    try:
        notice: Notice = nixl_messages.decode(message)
        return notice
    except UNDECODABLE:
        return None
