"""Pieces of several requests as one pass of the vocoder, on a thread of its own. Called on `code2wav`'s event loop.

The passes belong to a task of this room, not to a request: a request that is aborted takes none of the others along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from stage_models.qwen3_omni.vocoder import State, Vocoder


class Batches:
    def __init__(self, vocoder: Vocoder, most: int) -> None:
        """most: pieces in one pass. A pass has one where each is computed alone: sound is sent when it is made."""
        self._vocoder = vocoder
        self._most = most if vocoder.batched else 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vocoder")
        self._waiting: list[tuple[State, Tensor, asyncio.Future[Tensor]]] = []
        self._passes: asyncio.Task[None] | None = None

    async def decode(self, state: State, frames: Tensor) -> Tensor:
        """The next samples of one request. Raises: what the vocoder raises."""
        own: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self._waiting.append((state, frames, own))
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run())
        return await own

    async def _run(self) -> None:
        """Decodes batches until nothing waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            batch = [one for one in batch if not one[2].done()]  # the others were aborted
            pieces = [(state, frames) for state, frames, _own in batch]
            found: Sequence[Tensor | Exception]
            try:
                found = await loop.run_in_executor(self._thread, self._decoded, pieces)
            except RuntimeError as error:  # the machine has no thread left
                found = [error] * len(batch)
            for (_state, _frames, own), samples in zip(batch, found, strict=True):
                if own.done():
                    continue
                if isinstance(samples, Exception):
                    own.set_exception(samples)
                else:
                    own.set_result(samples)

    def _decoded(self, pieces: Sequence[tuple[State, Tensor]]) -> Sequence[Tensor | Exception]:
        """Each piece's samples, or the error of all."""
        try:
            return self._vocoder.decode(pieces)
        except Exception as error:
            return [error] * len(pieces)
