"""What stage authors import, as ``import stage_runtime as omni``. Light: no torch, zmq or fastapi until used.

The kinds of stage function (`Simple`, `Batched`, `Streaming`) are declared here; `engines` runs them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.wire.values import (
    Audio,
    Chunk,
    Finish,
    Media,
    Note,
    OmniRequest,
    Result,
    Routed,
    StagePayload,
    Text,
    Usage,
    message,
)

__all__ = [
    "Audio",
    "Batched",
    "Chunk",
    "Finish",
    "InvalidRequest",
    "Media",
    "Note",
    "OmniRequest",
    "RequestError",
    "Result",
    "Routed",
    "Session",
    "Simple",
    "StageContext",
    "StagePayload",
    "Streaming",
    "Text",
    "Usage",
    "message",
]


class Simple(msgspec.Struct, frozen=True):
    """``fn(payload) -> data``: sync, async, generator or async generator.

    concurrency: requests at once. Sync functions run on the stage's worker threads, async ones on its event loop.
    """

    fn: Callable[[StagePayload], Any]
    concurrency: int = 1


class Batched(msgspec.Struct, frozen=True):
    """``fn(list[payload]) -> list[data or Exception]`` of the same length; one batch at a time.

    max_batch: requests in one call at most. max_wait_s: how long the first one waits for company.
    """

    fn: Callable[[list[StagePayload]], list[Any]]
    max_batch: int = 8
    max_wait_s: float = 0.005


class Streaming(msgspec.Struct, frozen=True):
    """Async generator ``fn(session)``, started by a request's first message, payload or chunk."""

    fn: Callable[[Session], AsyncIterator[Any]]
    concurrency: int = 64


class Session(Protocol):
    """One request at a `Streaming` stage."""

    @property
    def request(self) -> OmniRequest: ...

    async def payload(self) -> StagePayload:
        """The request's payload, waiting for it."""

    def chunks(self, source: str | None = None) -> AsyncIterator[Chunk]:
        """Chunks in order, of one source or of all; ends when every source has said done."""


class StageContext(Protocol):
    """What a factory may learn and use of where it runs."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def model_path(self) -> str | None: ...
    @property
    def model_revision(self) -> str | None: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def logger(self) -> logging.Logger: ...

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An output tensor in the relay's arena, so that sending it copies nothing."""

    def emit(self, event: str, request_id: str, **metadata: Any) -> None:
        """Record a profiler event; a no-op while no profile is being taken."""

    def progress(self, message: str) -> None:
        """Say how loading goes: shown by `omni up`, and proof to its start-up timeout that something happens."""
