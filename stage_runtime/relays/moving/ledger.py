"""The account of what this process has put and not got back. Shared by the relays."""

from __future__ import annotations

import asyncio
import collections
import threading

from stage_runtime.relays.base import Peer, TransferId
from stage_runtime.relays.moving.pending_transfers import PutOperation


class Ledger:
    """The values that this process has put and not got back, and who waits for room. Any thread may call this."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._puts: dict[TransferId, PutOperation] = {}
        self._by_request: dict[str, set[TransferId]] = {}
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._nbytes = 0  #: Bytes of all puts in here, and what is reserved.
        self._sent = 0  #: Ever added, as `_sent_nbytes`.
        self._sent_nbytes = 0

    def add(self, put: PutOperation, *, most: int | None = None) -> bool:
        """Account for ``put``. False, and nothing changes, when more than ``most`` bytes would be unreleased."""
        with self._lock:
            if most is not None and self._nbytes + put.nbytes > most:
                return False
            self._nbytes += put.nbytes
            self._sent += 1
            self._sent_nbytes += put.nbytes
            self._puts[put.transfer] = put
            self._by_request.setdefault(put.request_id, set()).add(put.transfer)
            return True

    def reserve(self, nbytes: int, *, most: int) -> bool:
        """Count ``nbytes`` as unreleased until `unreserve`, for puts that follow. False as of `add`."""
        with self._lock:
            if self._nbytes + nbytes > most:
                return False
            self._nbytes += nbytes
            return True

    def unreserve(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes -= nbytes

    def released(self, peer: Peer, transfer: TransferId) -> PutOperation | None:
        """The put that ``peer`` has released, now forgotten here; None when it is not such a put."""
        with self._lock:
            put = self._puts.get(transfer)
            if put is None or put.peer != peer:
                return None
            return self._pop(put)

    def aborted(self, request_id: str) -> tuple[list[PutOperation], list[PutOperation]]:
        """A request's puts that were not announced, now forgotten here, and those that a receiver may know."""
        with self._lock:
            puts = [self._puts[transfer] for transfer in self._by_request.get(request_id, ())]
            return [self._pop(put) for put in puts if not put.announced], [put for put in puts if put.announced]

    def held_by(self, peer: Peer) -> list[PutOperation]:
        """All that was put to ``peer``, now forgotten here."""
        with self._lock:
            return [self._pop(put) for put in list(self._puts.values()) if put.peer == peer]

    def holds(self, peer: Peer) -> bool:
        """Whether ``peer`` has not released something."""
        with self._lock:
            return any(put.peer == peer for put in self._puts.values())

    def all(self) -> list[PutOperation]:
        """Everything, now forgotten here."""
        with self._lock:
            return [self._pop(put) for put in list(self._puts.values())]

    async def room(self) -> None:
        """Wait until something was released. It runs on the loop."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if not future.done() or future.cancelled():
                self._discard(future)

    def wake(self) -> None:
        """Something was released: those that wait for room try again."""
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

    def stats(self) -> dict[str, int]:
        return {
            "sent_transfers": self._sent,
            "sent_bytes": self._sent_nbytes,
            "unreleased_transfers": len(self._puts),
            "unreleased_bytes": self._nbytes,
        }

    def _pop(self, put: PutOperation) -> PutOperation:
        del self._puts[put.transfer]
        self._nbytes -= put.nbytes
        of_request = self._by_request[put.request_id]
        of_request.discard(put.transfer)
        if not of_request:
            del self._by_request[put.request_id]
        return put
