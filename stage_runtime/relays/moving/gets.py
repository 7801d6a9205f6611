"""Gets under way at a receiver that chooses where bytes land: each waits for memory, comes, or is quarantined.

Used by the relays that receive into an arena of their own. How the bytes come is theirs: ``begin``.
It runs on the loop, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from stage_runtime.errors import RelayFailed, TransferError
from stage_runtime.payloads import buffers
from stage_runtime.relays.base import OnRelease, Peer, TransferKey
from stage_runtime.relays.memory import pages
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.moving.pending_transfers import GetOperation

ROOM_S: Final = 2e-3  # how often memory is looked for by what found none


class GetRoute(Protocol):
    """The facts that a get needs of its peer."""

    @property
    def peer(self) -> Peer: ...

    @property
    def gone(self) -> bool:
        """The peer was forgotten."""


class Get:
    """One get under way."""

    __slots__ = ("here_nbytes", "holder", "key", "nbytes", "operation", "region", "request_id")

    def __init__(self, operation: GetOperation, nbytes: int, request_id: str, holder: str) -> None:
        self.operation = operation
        self.key: TransferKey = (operation.peer, operation.transfer)
        self.nbytes = nbytes
        self.request_id = request_id
        self.holder = holder
        self.here_nbytes = 0
        self.region: Any = None  #: Its memory; the last reference to it gives it back.

    def fail(self, why: str, *, broken: bool = False) -> None:
        """broken: the relay does not reach the peer."""
        kind = RelayFailed if broken else TransferError
        self.operation.fail(kind(f"transfer {self.key[1]} from {self.key[0]}: {why}"))


W = TypeVar("W", bound=GetRoute)
G = TypeVar("G", bound=Get)


class Gets(Generic[W, G]):
    """All gets of a relay, by peer and transfer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        memory: Arena,
        pins: Pins,
        on_release: OnRelease,
        *,
        room_nbytes: int,
        begin: Callable[[W, G], bool],
    ) -> None:
        """room_nbytes: what a transfer takes beside its own bytes.
        begin: find memory and let the bytes come, after adding to ``in_progress``. False: it finds no memory now.
        """
        self._loop = loop
        self._memory = memory
        self._pins = pins
        self._on_release = on_release
        self._room_nbytes = room_nbytes
        self._begin = begin
        self._looking: asyncio.TimerHandle | None = None
        self._counts = dict.fromkeys(("received_transfers", "received_bytes", "copied_out_bytes"), 0)
        self.waiting: collections.deque[tuple[W, G]] = collections.deque()  #: Gets that wait for memory.
        self.in_progress: dict[TransferKey, tuple[W, G]] = {}
        self.quarantined: dict[TransferKey, tuple[W, G]] = {}  #: Given up; bytes may still come.

    def claim(self, route: W, get: G) -> None:
        """Fetch a transfer, now or as soon as there is memory for it.

        Raises: TransferError: it was fetched before, or no memory is as large.
        """
        key, nbytes = get.key, get.nbytes
        waits = any(other.key == key for _, other in self.waiting)
        if waits or key in self.in_progress or key in self.quarantined or key in self._pins:
            raise TransferError(f"transfer {key[1]} from {key[0]} was fetched twice")
        if nbytes + self._room_nbytes > self._memory.nbytes:
            room = f"this process receives into {self._memory.nbytes} bytes"
            raise TransferError(f"transfer {key[1]} from {key[0]} has {nbytes} bytes, and {room}")
        if not nbytes:
            self._arrived(get, pages.fresh(0))
        elif self.waiting or not self._begin(route, get):
            self.waiting.append((route, get))
            self._look_later()

    def landed(self, get: G, region: Any) -> None:
        """All is in ``region``, of its size. It is copied out while the arena is more than half full, if the system has
        memory for that.
        """
        if self._memory.in_use > self._memory.nbytes // 2:
            with contextlib.suppress(OSError, MemoryError):
                copy = pages.fresh(len(region))
                copy[:] = region
                self._counts["copied_out_bytes"] += len(region)
                region = copy
        self._arrived(get, region)

    def fail_waiting(self, which: Callable[[W, G], bool], why: str, *, released: bool = True) -> None:
        """Fail those that have not begun. released: their senders are notified, if they are not gone."""
        for route, get in [pair for pair in self.waiting if which(*pair)]:
            self.waiting.remove((route, get))
            get.fail(why)
            if released and not route.gone:
                self._on_release(*get.key)

    def stats(self) -> dict[str, int]:
        held = [get.nbytes for _, get in list(self.quarantined.values())]
        return {
            **self._counts,
            "receive_bytes_in_use": self._memory.in_use,
            "waiting_transfers": len(self.waiting),
            "incoming_transfers": len(self.in_progress),
            "incoming_bytes": sum(get.here_nbytes for _, get in list(self.in_progress.values())),
            "quarantined_receives": len(held),
            "quarantined_receive_bytes": sum(held),
        }

    def close(self) -> None:
        """Look for memory no more."""
        if self._looking is not None:
            self._looking.cancel()

    def _arrived(self, get: G, region: Any) -> None:
        self._pins.add(region, *get.key, request_id=get.request_id, holder=get.holder, nbytes=get.nbytes)
        self._counts["received_transfers"] += 1
        self._counts["received_bytes"] += get.nbytes
        get.operation.arrived(buffers.view(region))

    def _look(self) -> None:
        self._looking = None
        while self.waiting and self._begin(*self.waiting[0]):
            self.waiting.popleft()
        if self.waiting:
            self._look_later()

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = self._loop.call_later(ROOM_S, self._look)
