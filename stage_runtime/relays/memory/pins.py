"""Received buffers that are still referenced, and how their ends are noticed. Shared by the relays.

A wake-up of the loop costs as much as to send a message, and so does the release that follows. So a small buffer's end
is noticed when the loop wakes anyway: at a later arrival, or by a timer that an arrival has set. A large one's is
noticed at once, by the thread that lets go of it if that thread has announced that it will look (`Relays.letting_go`).
"""

from __future__ import annotations

import asyncio
import collections
import time
import weakref
from collections.abc import Iterator
from threading import local
from typing import Any, Final

import msgspec

from stage_runtime.errors import TransferError
from stage_runtime.relays.base import OnRelease, Peer, TransferId

SMALL_NBYTES: Final = 256 << 10  # a sender needs a larger buffer back sooner
DELAY_S: Final = 0.01  # most that a small one's release is held back: that of several visits goes in one message
MANY: Final = 16  # small ones, 4 MiB at most: half of what small transfers of an edge share


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A received buffer that is still referenced."""

    peer: Peer
    transfer: TransferId
    request_id: str
    holder: str
    nbytes: int
    since: float  #: ``time.monotonic``.


class _Watch(weakref.ref[Any]):
    """A weak reference that knows what it watches: set right after it is made, which is in C."""

    __slots__ = ("key", "small")
    key: tuple[Peer, TransferId]
    small: bool


class Pins:
    """Received buffers, each until its last view dies; then ``on_release`` is called, on the loop or in a thread that
    lets go.

    Views die in any thread and at any moment, also inside the allocator's or our own locks (the garbage collector
    chooses). So what they call takes no lock: it notes the death, and wakes the loop once for all where it must.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_release: OnRelease, thread: local) -> None:
        """thread: of all pins of the process. Its ``lets_go`` is True while a thread drops buffers and calls `let_go`
        next, so that it need not wake the loop.
        """
        self.dead: collections.deque[tuple[Peer, TransferId]] = collections.deque()  #: Not reported yet.
        self._loop = loop
        self._on_release = on_release
        self._pins: dict[tuple[Peer, TransferId], tuple[_Watch, Pin]] = {}
        self._urgent = False  #: One of the dead is large.
        self._timed = False  #: A timer is set. Set and reset on the loop.
        self._woken = False
        self._thread = thread

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return (pin for _, pin in list(self._pins.values()))

    def __contains__(self, key: tuple[Peer, TransferId]) -> bool:
        return key in self._pins

    def add(self, region: Any, peer: Peer, transfer: TransferId, *, request_id: str, holder: str, nbytes: int) -> None:
        """Watch ``region``, whose memory all views keep alive. It runs on the loop.

        Raises: TransferError: that transfer is here already.
        """
        key = (peer, transfer)
        if key in self._pins:
            raise TransferError(f"transfer {transfer} from {peer} was fetched twice")
        pin = Pin(
            peer=peer,
            transfer=transfer,
            request_id=request_id,
            holder=holder,
            nbytes=nbytes,
            since=time.monotonic(),
        )
        watch = _Watch(region, self._died)
        watch.key = key
        watch.small = nbytes < SMALL_NBYTES
        self._pins[key] = (watch, pin)
        if len(self.dead) >= MANY // 2:
            self.flush()
        if not self._timed:
            self._timed = True
            self._loop.call_later(DELAY_S, self._look)

    def forget(self, peer: Peer) -> None:
        """Drop what that peer has put: it needs no releases any more."""
        for key in [key for key in list(self._pins) if key[0] == peer]:
            self._pins.pop(key, None)

    def let_go(self) -> None:
        """Release what has died, as far as it is not to wait for the loop. Any thread may call this."""
        if self.dead and not self._may_wait():
            self.flush()

    def flush(self) -> None:
        """Release what has died. Any thread may call this."""
        self._urgent = False  # before the dead ones are read: one that dies meanwhile sets it again
        while self.dead:
            try:
                key = self.dead.popleft()
            except IndexError:  # another thread was faster
                return
            if self._pins.pop(key, None) is not None:
                self._on_release(*key)

    def stats(self) -> dict[str, int]:
        pins = [pin for _, pin in list(self._pins.values())]
        return {"pinned_transfers": len(pins), "pinned_bytes": sum(pin.nbytes for pin in pins)}

    def _died(self, watch: Any) -> None:
        self.dead.append(watch.key)
        if not watch.small:
            self._urgent = True
        if self._woken or getattr(self._thread, "lets_go", False) or self._may_wait():
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed: so is the process, and its peers will know
            pass

    def _may_wait(self) -> bool:
        """Whether the timer, or an arrival before it, is soon enough for all that is dead."""
        return self._timed and not self._urgent and len(self.dead) < MANY

    def _wake(self) -> None:
        self._woken = False
        self.flush()

    def _look(self) -> None:
        self._timed = False  # before the dead ones are read: one that dies meanwhile wakes the loop
        if self.dead:
            self.flush()
