"""A put as `dispatch` gives it: its metadata begins with the relay's name, so a receiver needs nothing else."""

from __future__ import annotations

from typing import Any, Protocol

from stage_runtime.relays.base import EarlyPut, Peer, TransferId
from stage_runtime.relays.moving.pieces import PutPieces


class Put(EarlyPut, Protocol):
    """A put by the relay ``backend``; of a pack that was cut, of several transfers."""

    @property
    def backend(self) -> str: ...
    @property
    def transfers(self) -> tuple[TransferId, ...]: ...
    @property
    def copied_nbytes(self) -> int:
        """Bytes that the relay copied for it."""


class Named:
    """A put whose metadata names its relay."""

    __slots__ = ("_early", "_operation", "backend")

    def __init__(self, backend: str, operation: Any, *, early: bool = False) -> None:
        """early: the operation is an `EarlyPut`."""
        self.backend = backend
        self._operation = operation
        self._early = early

    @property
    def metadata(self) -> bytes:
        return self.backend.encode() + b":" + bytes(self._operation.metadata)

    @property
    def transfer(self) -> TransferId:
        return TransferId(self._operation.transfer)

    @property
    def transfers(self) -> tuple[TransferId, ...]:
        if isinstance(self._operation, PutPieces):
            return self._operation.transfers
        return (self.transfer,)

    @property
    def copied_nbytes(self) -> int:
        return int(self._operation.copied_nbytes)

    @property
    def peer(self) -> Peer:
        return Peer(self._operation.peer)

    async def wait_for_completion(self, timeout: float | None = None) -> memoryview:
        view: memoryview = await self._operation.wait_for_completion(timeout)
        return view

    def take(self) -> memoryview:
        view: memoryview = self._operation.take()
        return view

    def done(self) -> bool:
        return bool(self._operation.done())

    def fill(self) -> None:
        if self._early:
            self._operation.fill()
