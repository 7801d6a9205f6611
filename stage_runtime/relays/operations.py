"""Transfers under way: what was put and not released (`PutOperation`, `Ledger`), what is being fetched
(`GetOperation`), and which received buffers somebody still looks at (`Pins`). Shared by the backends.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from stage_runtime.errors import TransferError
from stage_runtime.relays.base import Peer, Release, TransferId

NOTHING: Final = memoryview(b"")


class Completion:
    """Something that ends once, in any thread, and that coroutines of ``loop`` await."""

    __slots__ = ("_error", "_future", "_loop", "_over")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._over = False
        self._error: TransferError | None = None
        self._future: asyncio.Future[None] | None = None

    def done(self) -> bool:
        return self._over

    def finish(self, error: TransferError | None = None) -> None:
        """End it; a second time changes nothing."""
        if self._over:
            return
        self._error = error
        self._over = True  # before the look at the future: `wait` sets the future before it looks here
        if self._future is not None:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed: nobody waits any more
                pass

    async def wait(self, timeout: float | None, what: str, moved: Callable[[], float] = lambda: 0.0) -> None:
        """moved: when something last moved, on `time.monotonic`.

        Raises: TransferError: as it ended, or nothing of ``what`` moved for ``timeout`` seconds.
        """
        if not self._over:
            if self._future is None:
                self._future = self._loop.create_future()
            begun, last = time.monotonic(), moved()
            while not self._over:
                left = None if timeout is None else max(begun, last) + timeout - time.monotonic()
                if left is not None and left <= 0:
                    raise TransferError(f"{what}: not complete after {timeout:.3g} s without progress")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(self._future), left)
                last = moved()
        self.check()

    def check(self) -> None:
        """Raises: TransferError: it ended so."""
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class PutOperation:
    """A put: complete when its receiver has released it."""

    __slots__ = ("_completion", "_metadata", "announced", "nbytes", "peer", "request_id", "resource", "transfer")

    def __init__(
        self,
        completion: Completion,
        transfer: TransferId,
        peer: Peer,
        request_id: str,
        nbytes: int,
        resource: Any,
        metadata: bytes,
    ) -> None:
        self._completion = completion
        self._metadata = metadata
        self.transfer = transfer
        self.peer = peer
        self.request_id = request_id
        self.nbytes = nbytes
        self.resource = resource  #: What the backend frees when it is over: a slot, or buffers.
        self.announced = False  #: Somebody has read `metadata`, so the receiver may know of it.

    @property
    def metadata(self) -> bytes:
        self.announced = True
        return self._metadata

    async def wait_for_completion(self, timeout: float | None = None) -> memoryview:
        await self._completion.wait(timeout, f"transfer {self.transfer} to {self.peer}")
        return NOTHING

    def take(self) -> memoryview:
        return NOTHING

    def done(self) -> bool:
        return self._completion.done()

    def finish(self, error: TransferError | None = None) -> None:
        self._completion.finish(error)


class GetOperation:
    """A get: complete when the bytes are here. It hands the buffer over once, and keeps no view of it."""

    __slots__ = ("_completion", "_moved", "_view", "metadata", "peer", "transfer")

    def __init__(
        self,
        completion: Completion,
        transfer: TransferId,
        peer: Peer,
        metadata: bytes,
        moved: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """moved: when something last came from ``peer``, on `time.monotonic`."""
        self._completion = completion
        self._moved = moved
        self._view: memoryview | None = None
        self.metadata = metadata
        self.transfer = transfer
        self.peer = peer

    async def wait_for_completion(self, timeout: float | None = None) -> memoryview:
        await self.wait(timeout)
        return self.take()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait without taking the buffer."""
        await self._completion.wait(timeout, f"transfer {self.transfer} from {self.peer}", self._moved)

    def take(self) -> memoryview:
        """The buffer of a get that is done, without waiting."""
        self._completion.check()
        view, self._view = self._view, None
        if view is None:
            raise TransferError(f"transfer {self.transfer} from {self.peer}: its buffer was taken already")
        return view

    def done(self) -> bool:
        return self._completion.done()

    def arrived(self, view: memoryview) -> None:
        self._view = view
        self._completion.finish()

    def fail(self, error: TransferError) -> None:
        self._completion.finish(error)


class Ledger:
    """What this process has put and not got back, and who waits for room. From any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._puts: dict[TransferId, PutOperation] = {}
        self._by_request: dict[str, set[TransferId]] = {}
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    def __len__(self) -> int:
        return len(self._puts)

    def add(self, put: PutOperation) -> None:
        with self._lock:
            self._puts[put.transfer] = put
            self._by_request.setdefault(put.request_id, set()).add(put.transfer)

    def released(self, peer: Peer, transfer: TransferId) -> PutOperation | None:
        """The put that ``peer`` has let go of, now forgotten here; None when it is no such put."""
        with self._lock:
            put = self._puts.get(transfer)
            if put is None or put.peer != peer:
                return None
            return self._pop(put)

    def aborted(self, request_id: str) -> tuple[list[PutOperation], list[PutOperation]]:
        """Of a request: the puts that nobody was told of, now forgotten here, and those that a receiver may know."""
        with self._lock:
            puts = [self._puts[transfer] for transfer in self._by_request.get(request_id, ())]
            return [self._pop(put) for put in puts if not put.announced], [put for put in puts if put.announced]

    def held_by(self, peer: Peer) -> list[PutOperation]:
        """All that was put to ``peer``, now forgotten here."""
        with self._lock:
            return [self._pop(put) for put in list(self._puts.values()) if put.peer == peer]

    def all(self) -> list[PutOperation]:
        """Everything, now forgotten here."""
        with self._lock:
            return [self._pop(put) for put in list(self._puts.values())]

    async def room(self) -> None:
        """Wait until something was released. On the loop."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if not future.done() or future.cancelled():
                self._discard(future)

    def wake(self) -> None:
        """Something was released: whoever waits for room tries again."""
        if self._waiting:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed
                pass

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, collections.deque()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _discard(self, future: asyncio.Future[None]) -> None:
        if future in self._waiting:
            self._waiting.remove(future)

    def _pop(self, put: PutOperation) -> PutOperation:
        del self._puts[put.transfer]
        of_request = self._by_request[put.request_id]
        of_request.discard(put.transfer)
        if not of_request:
            del self._by_request[put.request_id]
        return put


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
