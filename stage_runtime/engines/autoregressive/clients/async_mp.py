"""A client of one engine process for an event loop, and what those of several share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from stage_runtime.engines.autoregressive.clients.abstract import LOOK_EVERY_S, MPClient, result_of
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.process.messages.engine_messages import EngineCoreOutputs, UtilityOutput
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import Extension
from stage_runtime.errors import EngineDeadError


class AsyncMPClient(MPClient):
    """Made by `start`. All calls on the loop on which it was started."""

    def __init__(
        self,
        launch: EngineLaunch,
        **options: Any,
    ) -> None:
        """The arguments are those of `MPClient`. The call blocks until the engines are ready: `start` does not."""
        super().__init__(launch, **options)
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()
        self._results: dict[int, tuple[int, asyncio.Future[Any]]] = {}  #: Rank and future of each call.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: dict[int, int] = {}  #: pidfd of each engine that is watched.
        self._looking: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, launch: EngineLaunch, **options: Any) -> Self:
        """Raises: ConfigurationError: an engine could not start."""
        client = await asyncio.to_thread(cls, launch, **options)
        client.attach()
        return client

    def attach(self) -> None:
        """Serve the running loop from now on. A caller needs this that has made the client where no loop runs."""
        self._loop = asyncio.get_running_loop()
        self._looking = self._loop.call_later(LOOK_EVERY_S, self._look_again)
        self._loop.add_reader(self._output.fileno(), self._read)
        self._loop.call_soon(self._read)  # an edge may have come before we listened
        self._watch()

    def _look_again(self) -> None:
        assert self._loop is not None
        self._read()  # what has come since the last turn of the loop counts
        self._look()
        self._looking = self._loop.call_later(LOOK_EVERY_S, self._look_again)

    def _watch(self) -> None:
        assert self._loop is not None
        for rank, engine in self._engines.items():
            if rank not in self._watched:
                self._watched[rank] = engine.pidfd
                self._loop.add_reader(engine.pidfd, self._exited, rank)

    def _unwatch(self, rank: int) -> None:
        descriptor = self._watched.pop(rank, None)
        if descriptor is not None and self._loop is not None:
            self._loop.remove_reader(descriptor)

    async def add_request_async(
        self, request: EngineCoreRequest, *, data_parallel_rank: int | None = None, pin: str | None = None
    ) -> None:
        """data_parallel_rank: the engine. pin: requests with an equal one go to the same engine.

        Raises: EngineDeadError; ValueError, ValueRefused, RequestError: this request alone.
        """
        self._add(request, data_parallel_rank, pin)

    async def extend_request_async(self, request_id: str, more: Extension) -> None:
        """More of an open request's prompt. Raises: EngineDeadError; ValueRefused, RequestError: this request alone."""
        self._extend(request_id, more)

    async def release_requests_async(self, request_ids: Iterable[str]) -> None:
        """These held requests have what they wait for. Raises: EngineDeadError."""
        self._release(request_ids)

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Idempotent."""
        self._abort(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for outputs. Raises: EngineDeadError, for every waiter."""
        if self._outputs.empty():
            self.ensure_alive()
        given = await self._outputs.get()
        if isinstance(given, EngineDeadError):
            self._outputs.put_nowait(given)  # for the next waiter
            raise given
        return given

    async def call_utility_async(self, method: str, *arguments: Any, rank: int | None = None) -> Any:
        """Raises: UtilityFailed, EngineDeadError."""
        self.ensure_alive()
        chosen = self._ranks()[0] if rank is None else rank
        call_id = self._call(chosen, method, arguments)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._results[call_id] = (chosen, future)
        try:
            return result_of(await future)
        finally:
            self._results.pop(call_id, None)

    async def call_each_async(self, method: str, *arguments: Any) -> list[Any]:
        """The result of the utility in each engine, by rank. Raises: as `call_utility_async`."""
        calls = [self.call_utility_async(method, *arguments, rank=rank) for rank in self._ranks()]
        return await asyncio.gather(*calls)

    def _read(self) -> None:
        alive = self._dead is None
        for outputs in self._take(self._on_utility):
            self._on_outputs(self._note(outputs))
        if alive and self._dead is not None:
            self._report_dead()

    def _report_dead(self) -> None:
        assert self._dead is not None
        self._outputs.put_nowait(self._dead)
        for _rank, future in list(self._results.values()):
            if not future.done():
                future.set_exception(self._dead)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._outputs.put_nowait(outputs)

    def _on_utility(self, output: UtilityOutput) -> None:
        _rank, future = self._results.get(output.call_id, (0, None))
        if future is not None and not future.done():
            future.set_result(output)

    def _exited(self, rank: int) -> None:
        """The process has ended: what it has sent is taken first."""
        self._unwatch(rank)
        self._read()
        alive = self._dead is None
        for outputs in self._on_exit(rank):
            self._on_outputs(outputs)
        for called, future in list(self._results.values()):
            if called == rank and not future.done():
                future.set_exception(EngineDeadError(f"engine {rank} has ended"))
        if alive and self._dead is not None:
            self._report_dead()

    async def close(self, *, drain_s: float = 0.0) -> None:
        """End the engines; ``drain_s``: how long they may finish what is under way."""
        if self._looking is not None:
            self._looking.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._output.fileno())
            for rank in list(self._watched):
                self._unwatch(rank)
        await asyncio.to_thread(self._close, drain_s=drain_s)
        self._report_dead()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
