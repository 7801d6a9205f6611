"""The torch traces of a stage's engine processes: begun and ended with those of the stage's own process.

`profiler.recording.children.Parent`. The calls run on the engine's loop; callers wait on other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.profiler.recording.children import PathOf


class EngineTraces:
    """Those of one client's engines."""

    def __init__(self, client: AsyncMPClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._traced: dict[int, Path] = {}  #: The file that was asked for, by rank.

    def start_traces(self, path_of: PathOf, switches: Mapping[str, bool]) -> Future[None]:
        async def start() -> None:
            paths = {rank: path_of(rank, pid) for rank, pid in self._client.pids_by_rank().items()}
            self._traced = paths
            await _each(
                self._client.call_utility_async("start_torch_trace", str(path), dict(switches), rank=rank)
                for rank, path in paths.items()
            )

        return asyncio.run_coroutine_threadsafe(start(), self._loop)

    def stop_traces(self) -> Future[list[Path]]:
        async def stop() -> list[Path]:
            there = self._client.pids_by_rank().keys()  # one that was started later has no trace
            paths = {rank: path for rank, path in self._traced.items() if rank in there}
            self._traced = {}
            names = await _each(self._client.call_utility_async("stop_torch_trace", rank=rank) for rank in paths)
            # An engine may have taken another name in the same folder, because this one was there.
            return [path.with_name(Path(name).name) for path, name in zip(paths.values(), names, strict=True) if name]

        return asyncio.run_coroutine_threadsafe(stop(), self._loop)


async def _each(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Raises: the first failure, once all are done."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
