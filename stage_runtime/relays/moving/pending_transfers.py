"""Transfers under way: a put until it is released (`PutOperation`), a get until the bytes are here (`GetOperation`).
Shared by the relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final

import msgspec

from stage_runtime.errors import RelayFailed, TransferError
from stage_runtime.payloads.pack import Arrived
from stage_runtime.relays.base import Peer, TransferId
from stage_runtime.relays.memory.filling import Filling
from stage_runtime.rules.flow.watched_time import LOOKS, WatchedTime

NOTHING: Final = memoryview(b"")


def _never() -> float:
    return 0.0


class TransferCompletion(msgspec.Struct, eq=False):
    """Something that ends once, in any thread, and that coroutines of its loop await. A Struct, as are the operations:
    they are made per transfer, and their fields are set in C.
    """

    _loop: asyncio.AbstractEventLoop
    _over: bool = False
    _error: TransferError | None = None
    _future: asyncio.Future[None] | None = None

    def done(self) -> bool:
        return self._over

    def finish(self, error: TransferError | None = None) -> None:
        """End it; a second time changes nothing."""
        if self._over:
            return
        self._error = error
        self._over = True  # before the future is read: `wait` sets the future before it reads ``_ended``
        if self._future is not None:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed, and with it all waiters
                pass

    async def wait(self, timeout: float | None, what: str, moved: Callable[[], float] = _never) -> None:
        """moved: when something last moved, on `time.monotonic`.

        Raises: TransferError: as it ended. RelayFailed: nothing of ``what`` moved for ``timeout`` seconds, in which
            this loop ran.
        """
        if not self._over:
            if self._future is None:
                self._future = self._loop.create_future()
            look_s = None if timeout is None else timeout / LOOKS
            begun, _, silent_s = time.monotonic(), moved(), 0.0
            watched = WatchedTime(begun, look_s or 0.0)
            while not self._over:
                if timeout is not None and silent_s >= timeout:
                    raise RelayFailed(f"{what}: not complete after {timeout:.3g} s without progress")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(self._future), look_s)
                now, last = time.monotonic(), moved()
                silent_s = min(silent_s + watched.look(now), now - max(begun, last))
        self.check()

    def check(self) -> None:
        """Raises: TransferError: it ended so."""
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class PutOperation(msgspec.Struct, eq=False):
    """A put: complete when its receiver has released it."""

    _completion: TransferCompletion
    transfer: TransferId
    peer: Peer
    request_id: str
    nbytes: int
    resource: Any  #: A slot or buffers, which the backend frees when the operation is over.
    _metadata: bytes
    copied_nbytes: int = 0
    _filling: Filling | None = None  #: The filling of `base.Relay.put_early`.
    announced: bool = False  #: `metadata` was read, so the receiver may know of it.

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

    def fill(self) -> None:
        if self._filling is not None:
            self._filling.fill()

    def finish(self, error: TransferError | None = None) -> None:
        self._completion.finish(error)


class GetOperation(msgspec.Struct, eq=False):
    """A get: complete when the bytes are here. It hands the buffer over once, and keeps no view of it."""

    copied_nbytes: ClassVar[int] = 0

    _completion: TransferCompletion
    transfer: TransferId
    peer: Peer
    metadata: bytes
    _moved: Callable[[], float] = _never  #: When something last came from ``peer``, on `time.monotonic`.
    _view: memoryview | None = None
    _on_device: Arrived | None = None

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

    def take_device(self) -> Arrived | None:
        """The end of the flat buffer that lies on a GPU; None when nothing does, or it was taken."""
        found, self._on_device = self._on_device, None
        return found

    def arrived(self, view: memoryview, on_device: Arrived | None = None) -> None:
        self._view = view
        self._on_device = on_device
        self._completion.finish()

    def fail(self, error: TransferError) -> None:
        self._completion.finish(error)
