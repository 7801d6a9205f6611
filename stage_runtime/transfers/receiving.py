"""Receiving payloads: from a message's body to a buffer, at once where that is possible. It runs on the I/O thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from stage_runtime.errors import ProtocolError, RelayFailed, TransferError
from stage_runtime.payloads import encoding
from stage_runtime.payloads.pack import Arrived
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.relays.base import Fetch
from stage_runtime.relays.dispatch import Relays
from stage_runtime.transfers import recording
from stage_runtime.wire.parts import Body

STALLED_S: Final = 10.0  # without a byte of its sender's a transfer is lost; slow, or queued behind others, it is not
NOTHING: Final = Body()

log = logging.getLogger(__name__)


class Fetched(msgspec.Struct, eq=False):
    """A payload that has arrived. Its tensors are views of one buffer; when they are gone, its slot is free."""

    _body: Body
    _buffer: memoryview | bytearray | bytes | None
    _on_device: Arrived | None = None  #: The buffer's end, when it lies on a GPU.

    @classmethod
    def whole(cls, body: Body) -> Fetched:
        """A payload that came in its message."""
        return cls(body, None)

    def open(self, *, torch: bool = True) -> Any:
        """Decode it, once. Raises: ProtocolError: it is not a payload."""
        body, buffer, on_device = self._body, self._buffer, self._on_device
        self._buffer = self._on_device = None
        if body.inline and buffer is None:
            buffer = bytearray(body.inline) if torch else body.inline  # writable: torch knows no read-only tensors
        if on_device is not None:
            on_device.taken()
        return encoding.restore(body.value, body.refs, buffer, on_device, torch=torch)

    @property
    def nbytes(self) -> int:
        """The size of its buffer, before it is opened."""
        here = 0 if self._buffer is None else len(self._buffer)
        return here if self._on_device is None else self._on_device.start + len(self._on_device.flat)

    @property
    def held_nbytes(self) -> int:
        """The memory that it takes before it is opened: its buffer, and what came in its message."""
        return self.nbytes + len(self._body.value) + len(self._body.inline)

    def copy_out(self) -> None:
        """Copy it out of the sender's slot, because it will wait: what it waits for may need the slot."""
        if self._body.transfer and isinstance(self._buffer, memoryview):
            self._buffer = bytearray(self._buffer)
            self._on_device = self._on_device and self._on_device.copied()

    def discard(self) -> None:
        """Drop it unopened."""
        self._body, self._buffer, self._on_device = NOTHING, None, None


def _recorded(then: Callable[[Fetched], None], body: Body, key: str, holder: str) -> Callable[[Fetched], None]:
    """The same as ``then``, but it also records for a profile when the body was announced and when it came."""
    begun_ns = time.time_ns()

    def landed(fetched: Fetched) -> None:
        recording.received(key, holder, body.transfer, fetched.nbytes, begun_ns)
        then(fetched)

    return landed


class Fetching:
    """Payloads under way to this process."""

    def __init__(self, relays: Relays, loop: asyncio.AbstractEventLoop, *, stalled_s: float = STALLED_S) -> None:
        self._relays = relays
        self._stalled_s = stalled_s
        self._loop = loop
        self._tasks: dict[asyncio.Task[None], str] = {}  #: The request for which each waits, as `put` got it.

    def fetch(
        self,
        peer: str,
        body: Body,
        request_id: str,
        then: Callable[[Fetched], None],
        failed: Callable[[Exception], None],
        *,
        holder: str = "",
    ) -> None:
        """Get the buffer behind ``body`` and call ``then``: now if it is here, else when it has come.

        holder: the stage that will look at it.
        failed: called instead when it cannot be had (`TransferError`, `ProtocolError`).
        """
        if not body.transfer:
            then(Fetched.whole(body))
            return
        if recorder.active:
            then = _recorded(then, body, request_id, holder)
        try:
            operation = self._relays.get(body.transfer, request_id=request_id, peer=peer, holder=holder)
            if operation.done():
                self._landed(body, operation.take(), operation.take_device(), then)
                return
        except (TransferError, ProtocolError) as error:
            # Its slot may have another use since an abort; the sender's credit is free only after our Release.
            with contextlib.suppress(TransferError):
                self._relays.decline(body.transfer, peer=peer)
            self._relays.cleanup(request_id)
            if isinstance(error, RelayFailed):
                self._relays.report(body.transfer, peer=peer, error=error)
            failed(error)
            return
        task = self._loop.create_task(self._await(operation, peer, body, request_id, then, failed))
        self._tasks[task] = request_id
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def drop(self, prefix: str) -> None:
        """Requests whose keys begin so have ended: what arrives for them is released."""
        for task, request_id in list(self._tasks.items()):
            if request_id.startswith(prefix):
                task.cancel()
                self._relays.cleanup(request_id)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _await(
        self,
        operation: Fetch,
        peer: str,
        body: Body,
        request_id: str,
        then: Callable[[Fetched], None],
        failed: Callable[[Exception], None],
    ) -> None:
        try:
            buffer = await operation.wait_for_completion(self._stalled_s)
        except (TransferError, ProtocolError) as error:
            self._relays.cleanup(request_id)  # or its claim would stay until the peer is forgotten
            if isinstance(error, RelayFailed):  # its sender learns of it first: the request may be tried again at once
                self._relays.report(body.transfer, peer=peer, error=error)
            failed(error)
            return
        except Exception as error:  # as below: there may be no memory to put its pieces together
            log.exception("a value of request %s could not be fetched", request_id)
            self._relays.cleanup(request_id)
            failed(error)
            return
        try:
            self._landed(body, buffer, operation.take_device(), then)
        except Exception as error:  # this task is not awaited: unreported, the request would wait for its deadline
            log.exception("handling a transfer of request %s failed", request_id)
            failed(error)

    def _landed(
        self, body: Body, buffer: memoryview, on_device: Arrived | None, then: Callable[[Fetched], None]
    ) -> None:
        if not body.copy_now:
            then(Fetched(body, buffer, on_device))
            return
        copy, on_device = bytearray(buffer), on_device and on_device.copied()
        buffer.release()
        del buffer
        self._relays.release_now()  # its sender has no credit left
        then(Fetched(body, copy, on_device))
