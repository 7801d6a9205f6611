"""Clients of engines that are coordinated: of one (external balancing), or of all of an instance (internal)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

import msgspec

from stage_runtime.engines.autoregressive.clients.abstract import lost
from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.data_parallel.dp_coordinator import DPCoordinator
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch, ForeignProcess
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    Coordination,
    EngineCoreOutputs,
    FrontEnd,
    Replaced,
    ScaleEngines,
    identity,
)
from stage_runtime.errors import UNDECODABLE, ConfigurationError, EngineDeadError
from stage_runtime.rules.autoregressive.balancing import Balancer
from stage_runtime.rules.autoregressive.waves import PublishState
from stage_runtime.rules.binding import prefixes
from stage_runtime.sockets import multipart

log = logging.getLogger(__name__)

HEAR_WITHIN_S: Final = 60.0


class DPAsyncMPClient(AsyncMPClient):
    """Asks one engine; something outside chooses among the ranks' clients. The coordinator is another's: any process
    of this user that has its ``coordination`` may start an engine and ask it.
    """

    program = "stage_runtime.engines.autoregressive.data_parallel.engine_process"

    def __init__(self, launch: EngineLaunch, coordination: Coordination | None = None, **options: Any) -> None:
        """coordination: None only for a client that ``joins``: its `FrontEnd` has it. options: those of `MPClient`."""
        super().__init__(launch, coordination=coordination, **options)
        assert self._coordination is not None, "the engines have no coordinator"
        self.lockstep = self._coordination.lockstep
        self._states = msgspec.msgpack.Decoder(PublishState)
        self._coordinator_end = os.pidfd_open(self._coordination.pid)
        self._stats = self._context.connect("XSUB", self._stats_address)
        self._stats.subscribe()
        if not multipart.Poller(self._stats).wait(HEAR_WITHIN_S):
            raise ConfigurationError("the coordinator of the engines does not answer")

    def attach(self) -> None:
        super().attach()
        assert self._loop is not None
        self._loop.add_reader(self._stats.fileno(), self._read_stats)
        self._loop.call_soon(self._read_stats)
        self._loop.add_reader(self._coordinator_end, self._coordinator_ended)

    def _coordinator_ended(self) -> None:
        """Engines would soon wait for it, and their counts are not known: all callers that wait are notified."""
        assert self._loop is not None
        self._loop.remove_reader(self._coordinator_end)
        self._dead = self._dead or EngineDeadError("the coordinator of the engines has ended")
        self._report_dead()

    def _read_stats(self) -> None:
        while (frames := self._stats.receive()) is not None:
            try:
                state = self._states.decode(frames[0])
            except UNDECODABLE as error:
                self.misread += 1
                log.warning("dropped a message of the coordinator: %s", error)
                continue
            self._on_counts(state.counts)

    def _on_counts(self, counts: Sequence[tuple[int, int]]) -> None:
        """Take the counts of all engines, by rank."""

    def _notify(self, message: ScaleEngines | Replaced) -> None:
        self._stats.send([msgspec.msgpack.encode(message)])
        self._read_stats()  # sending may have taken the edge of what has come

    async def close(self, *, drain_s: float = 0.0) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._stats.fileno())
            self._loop.remove_reader(self._coordinator_end)
        await super().close(drain_s=drain_s)

    def _close(self, *, drain_s: float = 0.0) -> None:
        if hasattr(self, "_stats"):
            self._stats.close()
            os.close(self._coordinator_end)
        super()._close(drain_s=drain_s)


class DPLBAsyncMPClient(DPAsyncMPClient):
    """Asks all engines of an instance: one that has met the prompt's beginning, or the least loaded one. An independent
    engine that ends takes its requests with it and no others; in lockstep all end.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        coordinator: DPCoordinator | None = None,
        *,
        joins: FrontEnd | None = None,
        **options: Any,
    ) -> None:
        """coordinator: ends with this client; None only of one that ``joins``. options: of `MPClient`."""
        self._coordinator = coordinator
        coordination = joins.coordination if coordinator is None and joins is not None else None
        coordination = coordination if coordinator is None else coordinator.coordination
        size = 0 if coordination is None else coordination.size
        self.lost: set[int] = set()  #: Independent engines that have ended and were not replaced.
        index, count = (0, options.get("front_ends", 1)) if joins is None else (joins.index, len(joins.inputs))
        self._balancer = Balancer(size, client_index=index, client_count=count)
        self._expected: set[str] = set()  #: Requests that the balancer has placed since the last counts.
        self._joined, self._size = joins is not None, size
        super().__init__(launch, coordination, ranks=range(size), joins=joins, **options)

    @classmethod
    async def launch_all(
        cls, launch: EngineLaunch, engines: int, *, lockstep: bool = False, elastic: bool = False, front_ends: int = 1
    ) -> Self:
        """A client with a coordinator process of its own, which ends with it.

        Raises: ConfigurationError: the coordinator or an engine could not start.
        """
        if elastic and lockstep:
            raise ConfigurationError("engines in lockstep cannot be added or removed while they serve: elastic=False")
        coordinator = await asyncio.to_thread(DPCoordinator, engines, lockstep=lockstep)
        try:
            client = await cls.start(launch, coordinator=coordinator, elastic=elastic, front_ends=front_ends)
        except BaseException:
            coordinator.close()
            raise
        if not elastic and front_ends == 1:
            coordinator.all_connected()
        return client

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Waiting and running of each engine, as reported and expected."""
        return self._balancer.counts

    def _on_counts(self, counts: Sequence[tuple[int, int]]) -> None:
        self._expected.clear()
        self._balancer.report(counts)

    def _add(self, request: EngineCoreRequest, rank: int | None, pin: str | None) -> int:
        chosen = super()._add(request, rank, pin)
        if rank is None and request.data_parallel_rank is None and not (pin or request.pin):
            self._expected.add(request.request_id)
        return chosen

    def _abort(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        for name in self._expected.intersection(names):
            self._expected.discard(name)
            if name in self.reqs_in_flight:
                self._balancer.withdraw(self.reqs_in_flight[name])
        super()._abort(names)

    def _engine_for(self, rank: int | None, pin: str | None, tokens: Sequence[int], *beside: str) -> int:
        caches = {
            index: one.kv_blocks_used / one.kv_blocks for index, one in self.stats.items() if one.kv_blocks_cached
        }
        prompt = prefixes.token_hashes(tokens, *beside)
        return self._balancer.choose(rank=rank, pin=pin, prompt=prompt, caches=caches)

    def _on_dead(self, rank: int, reason: str) -> list[EngineCoreOutputs]:
        serving = rank in self._balancer.open  # and not removed on purpose
        self._balancer.close(rank)
        if self.lockstep:  # an engine says that it cannot go on without another one: that one's end is the reason
            first = next((one for one in self._ended() if one != rank), rank)
            why = reason if first == rank else f"engine {first} has ended"
            return super()._on_dead(rank, f"{why}; all engines end with one of enable_expert_parallel")
        if not self._balancer.open:
            return super()._on_dead(rank, reason)
        if serving:
            log.error("%s; %d others go on", reason, len(self._balancer.open))
            self.lost.add(rank)
        ended = [name for name, engine in self.reqs_in_flight.items() if engine == rank]
        for name in ended:
            del self.reqs_in_flight[name]
        return [lost(ended, reason)]

    def _on_greeting(self, frames: Sequence[memoryview]) -> None:
        if not self._joined or self.lockstep or self._loop is None or len(frames) != 3:
            return
        pid, rank = (int.from_bytes(one, "little") for one in frames[1:])
        known = self._engines.get(rank)
        if rank < self._size and (known is None or known.pid != pid):
            self._loop.call_soon(self._take_over, rank, pid)  # outputs that have come before are passed on first

    def _take_over(self, rank: int, pid: int) -> None:
        """The process that has started the engines has replaced one: this front end asks the new one from now on."""
        if rank in self._engines:  # its end has not been noticed yet
            self._exited(rank)
        if self._dead is not None:
            return
        try:
            self._engines[rank] = ForeignProcess(rank, pid)
        except ProcessLookupError:
            log.warning("engine %d, pid %d, which replaced another one, has ended", rank, pid)
            return
        self._await_routes({identity(rank)})
        self._attach_to(rank)
        self._watch()
        self.lost.discard(rank)
        self._balancer.open_again(rank)
        self._read()

    async def replace_async(self, rank: int) -> None:
        """Start an engine in place of one that has ended; the others serve meanwhile. The client must be elastic.

        Raises: ConfigurationError: it could not start.
        """
        while rank in self._engines:  # it has said that it ends
            self._engines[rank].signal(signal.SIGKILL)
            await asyncio.sleep(0.01)
        self.ensure_alive()
        await self._add_engines([rank])
        self.lost.discard(rank)
        self._notify(Replaced(rank))
        self._balancer.open_again(rank)

    async def scale_async(self, engines: int, *, drain_s: float = 60.0) -> None:
        """Add engines, or remove the last ones when they have finished; the others serve meanwhile.

        Raises: ConfigurationError: one could not start: nothing is changed then; or this client is not elastic.
        """
        if self._coordinator is None or self.client_count > 1:
            raise ConfigurationError("engines with several front ends cannot be added or removed")
        if self.lockstep:
            raise ConfigurationError(
                "engines of enable_expert_parallel cannot be added or removed: each has its experts"
            )
        if engines < 1:
            raise ConfigurationError(f"cannot scale to {engines} engines")
        self.ensure_alive()
        if not any(rank < engines for rank in self._balancer.open):
            problem = "those that would stay have ended and were not replaced yet"
            raise ConfigurationError(f"cannot scale to {engines} engines: {problem}")
        before = self._coordinator.engines
        if engines > before:
            await self._add_engines(range(before, engines))
        else:
            await self._remove_engines(range(engines, before), drain_s)
        self._coordinator.engines = engines
        self._notify(ScaleEngines(engines))
        self._balancer.resize(engines)
        self.lost = {rank for rank in self.lost if rank < engines}

    async def _add_engines(self, ranks: Iterable[int]) -> None:
        self._take_in(*await asyncio.to_thread(self._launch, list(ranks)))
        self._watch()
        self._read()

    async def _remove_engines(self, ranks: Iterable[int], drain_s: float) -> None:
        removed = list(ranks)
        for rank in removed:
            self._balancer.close(rank)
            if rank in self._engines:
                self._engines[rank].signal(signal.SIGTERM)  # it finishes what it has
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_s
        while any(rank in self._engines for rank in removed) and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for rank in removed:
            if rank in self._engines:
                self._engines[rank].signal(signal.SIGKILL)
        while any(rank in self._engines for rank in removed):  # else its end would be taken for a later engine's
            await asyncio.sleep(0.01)

    async def close(self, *, drain_s: float = 0.0) -> None:
        await super().close(drain_s=drain_s)
        if self._coordinator is not None:
            self._coordinator.close()
