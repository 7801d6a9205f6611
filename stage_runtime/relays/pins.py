"""Received buffers that somebody still looks at. Shared by the relays."""

from __future__ import annotations

import asyncio
import collections
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from stage_runtime.errors import TransferError
from stage_runtime.relays.base import Peer, Release, TransferId


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A received buffer that somebody still looks at."""

    peer: Peer
    transfer: TransferId
    request_id: str
    holder: str
    nbytes: int
    since: float  #: ``time.monotonic``.


class _Watch(weakref.ref[Any]):
    """A weak reference that knows what it watches."""

    __slots__ = ("key",)
    key: tuple[Peer, TransferId]

    def __new__(cls, region: Any, callback: Callable[[Any], None], key: tuple[Peer, TransferId]) -> _Watch:
        self = super().__new__(cls, region, callback)
        self.key = key
        return self

    if not TYPE_CHECKING:  # typeshed's weakref has no __init__

        def __init__(self, region: Any, callback: Callable[[Any], None], key: tuple[Peer, TransferId]) -> None:
            super().__init__(region, callback)


class Pins:
    """Received buffers, each until its last view dies; then ``on_release`` is called, on the loop.

    Views die in any thread and at any moment, also inside the allocator's or our own locks (the garbage collector
    chooses). So what they call takes no lock: it notes the death and wakes the loop once for all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_release: Release) -> None:
        self._loop = loop
        self._on_release = on_release
        self._pins: dict[tuple[Peer, TransferId], tuple[_Watch, Pin]] = {}
        self._dead: collections.deque[tuple[Peer, TransferId]] = collections.deque()
        self._woken = False

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return (pin for _, pin in list(self._pins.values()))

    def __contains__(self, key: tuple[Peer, TransferId]) -> bool:
        return key in self._pins

    def add(self, region: Any, peer: Peer, transfer: TransferId, *, request_id: str, holder: str, nbytes: int) -> None:
        """Watch ``region``, whose memory all views keep alive. On the loop.

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
        self._pins[key] = (_Watch(region, self._died, key), pin)

    def forget(self, peer: Peer) -> None:
        """Nobody waits for releases by that peer any more."""
        for key in [key for key in self._pins if key[0] == peer]:
            del self._pins[key]

    def flush(self) -> None:
        """Release what has died. On the loop."""
        self._woken = False
        while self._dead:
            key = self._dead.popleft()
            if self._pins.pop(key, None) is not None:
                self._on_release(*key)

    def stats(self) -> dict[str, int]:
        pins = [pin for _, pin in self._pins.values()]
        return {"pinned_transfers": len(pins), "pinned_bytes": sum(pin.nbytes for pin in pins)}

    def _died(self, watch: Any) -> None:
        self._dead.append(watch.key)
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self.flush)
            except RuntimeError:  # the loop is closed: so is the process, and its peers will know
                pass
