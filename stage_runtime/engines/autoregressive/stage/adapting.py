"""Adapters in all engine processes of a stage: loaded in each of them or in none. It runs on the client's event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.core import engine_operations
from stage_runtime.errors import InvalidRequest, OmniError, describe
from stage_runtime.rules.members.adapters import LIST, LOAD, UNLOAD

log = logging.getLogger(__name__)

LISTED: Final = "lora_modules"  #: The setting by which an engine loads them when it starts.
TAKEN: Final = "max_loras"  #: The setting of a stage that takes any.


class EngineAdapters:
    """The adapters of a client's engines. An engine that starts later, in place of one that ends or beside them, begins
    with the same ones.
    """

    def __init__(self, client: AsyncMPClient) -> None:
        self._client = client
        self._under_way: set[str] = set()  #: Names that are being loaded or unloaded.

    async def carry_out(self, operation: str, arguments: Sequence[Any]) -> Any:
        """Load an adapter, by ``(name, path)``, or unload one, by ``(name,)``.

        Returns: the names that all engines have.
        Raises: InvalidRequest, UtilityFailed, EngineDeadError: of the first engine that failed; nothing is changed.
        """
        name = arguments[0]
        if not isinstance(name, str):
            raise InvalidRequest(f"{operation}: an adapter's name is a text")
        if name in self._under_way:
            raise InvalidRequest(f"{operation}: the adapter {name!r:.150} is being loaded or unloaded")
        self._under_way.add(name)
        try:
            if operation == UNLOAD:
                result = await self._unload(name)
            else:
                result = await self._load(name, arguments[1])
        finally:
            self._under_way.discard(name)
        await self.align()
        return result

    async def align(self) -> None:
        """Let engines that have been started meanwhile have what the others have."""
        if not self._client.launch.kwargs.get(TAKEN):
            return
        for rank in self._client.ranks:
            try:
                await self._align(rank)
            except OmniError as error:
                log.error("engine %d does not have the adapters of the others: %s", rank, describe(error))

    async def _align(self, rank: int) -> None:
        call = self._client.call_utility_async
        there: dict[str, str] = await call(LIST, rank=rank)
        wanted = self._listed
        for name in there.keys() - wanted.keys() - self._under_way:
            await call(UNLOAD, name, rank=rank)
        for name in wanted.keys() - there.keys() - self._under_way:
            await call(LOAD, name, wanted[name], rank=rank)

    @property
    def _listed(self) -> dict[str, str]:
        return self._client.launch.kwargs.get(LISTED) or {}

    def _list(self, modules: dict[str, str]) -> None:
        self._client.launch.kwargs[LISTED] = modules

    async def _load(self, name: str, path: Any) -> Any:
        ranks = self._client.ranks
        results = await self._asked(ranks, LOAD, name, path)
        failures = [one for one in results if isinstance(one, BaseException)]
        if failures:
            loaded = [rank for rank, one in zip(ranks, results, strict=True) if not isinstance(one, BaseException)]
            await self._asked(loaded, UNLOAD, name)
            raise failures[0]
        self._list({**self._listed, name: path})
        return engine_operations.joined(results)

    async def _unload(self, name: str) -> Any:
        results = await self._asked(self._client.ranks, UNLOAD, name)
        found = [one for one in results if not isinstance(one, BaseException)]
        self._list({other: path for other, path in self._listed.items() if other != name})
        if not found:  # one that lacks the adapter has unloaded it, too
            raise results[0]
        return engine_operations.joined(found)

    async def _asked(self, ranks: list[int], operation: str, *arguments: Any) -> list[Any]:
        """The result or the error of each engine."""
        calls = [self._client.call_utility_async(operation, *arguments, rank=rank) for rank in ranks]
        return await asyncio.gather(*calls, return_exceptions=True)
