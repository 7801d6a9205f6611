"""Several engines of one instance: balanced, in lockstep, added and removed while they serve. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import msgspec
import pytest

from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.data_parallel import DPAsyncMPClient, DPLBAsyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.data_parallel.dp_coordinator import DPCoordinator
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.errors import ConfigurationError, EngineDeadError
from tests.engines.counting_core import LAUNCHED

PATIENCE_S = 100.0
SLOW = 700
LAUNCH = EngineLaunch(factory=LAUNCHED, kwargs={"step_s": 0.002, "slow": SLOW})


def ask(name: str, first: int = 1, count: int = 5) -> EngineCoreRequest:
    return EngineCoreRequest(request_id=name, prompt_token_ids=[first], params=SamplingParams(max_tokens=count))


class Reader:
    """Reads a client's outputs on a task of its own."""

    def __init__(self, client: AsyncMPClient) -> None:
        self.client = client
        self.tokens: dict[str, list[int]] = {}
        self.over: dict[str, str] = {}
        self.task = asyncio.ensure_future(self._read())
        self.task.add_done_callback(lambda task: None if task.cancelled() else task.exception())

    async def _read(self) -> None:
        while True:
            given = await self.client.get_output_async()
            for output in given.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish is not None:
                    self.over[output.request_id] = output.finish.value
            for refused in given.refused:
                self.over[refused.request_id] = refused.code

    async def until(self, *names: str) -> dict[str, str]:
        await until(lambda: set(names) <= set(self.over) or self.task.done())
        return {name: self.over[name] for name in names}


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.005)


async def executed(client: AsyncMPClient, rank: int) -> tuple[int, int]:
    """Steps and dummy batches of an engine."""
    steps, dummies = await client.call_utility_async("executed", rank=rank)
    return steps, dummies


async def test_requests_are_spread_over_engines_and_ranks_and_pins_are_kept() -> None:
    client = await DPLBAsyncMPClient.launch_all(msgspec.structs.replace(LAUNCH, kwargs={"step_s": 0.05}), 2)
    async with client:
        reader = Reader(client)
        for index in range(12):
            await client.add_request_async(ask(f"r{index}", index, 10))
        assert sorted(client.reqs_in_flight.values()) == [0] * 6 + [1] * 6
        await reader.until(*(f"r{index}" for index in range(12)))
        assert reader.tokens == {f"r{index}": list(range(index + 1, index + 11)) for index in range(12)}
        await client.add_request_async(ask("a", 1, 450), data_parallel_rank=1)
        for name in "bcd":
            await client.add_request_async(ask(name, 1, 450), pin="one document")
        assert client.reqs_in_flight["a"] == 1 and len({client.reqs_in_flight[name] for name in "bcd"}) == 1
        with pytest.raises(ValueError, match="data_parallel_rank"):
            await client.add_request_async(ask("e"), data_parallel_rank=2)
        assert "e" not in client.reqs_in_flight
        await until(lambda: any(running for _waiting, running in client.counts))  # reported by the engines
        await client.abort_requests_async(list("abcd"))
        await until(lambda: client.counts == [(0, 0), (0, 0)])
        for name in ("brief", "brief too"):
            await client.add_request_async(ask(name))
        await client.abort_requests_async(["brief", "brief too"])  # perhaps before any report has counted them
        assert client.counts == [(0, 0), (0, 0)]
        assert client.reqs_in_flight == {} and not reader.task.done()
        client._stats.send([b"\xff garbage"])
        client._stats.send([b"\x90"])
        await client.add_request_async(ask("after"))
        assert await reader.until("after") == {"after": "length"}


async def test_an_independent_engine_that_is_killed_takes_its_own_requests_alone() -> None:
    client = await DPLBAsyncMPClient.launch_all(LAUNCH, 2)
    async with client:
        reader = Reader(client)
        await client.add_request_async(ask("lost", SLOW - 1, 300), data_parallel_rank=1)
        await client.add_request_async(ask("kept", 1, 300), data_parallel_rank=0)
        await until(lambda: "lost" in reader.tokens)
        call = asyncio.ensure_future(client.call_utility_async("echo", 1, rank=1))
        await asyncio.sleep(0)
        os.kill(client._engines[1].pid, signal.SIGKILL)
        assert await reader.until("lost", "kept") == {"lost": "stage_failed", "kept": "length"}
        with pytest.raises(EngineDeadError):
            await call
        for name in "abc":
            await client.add_request_async(ask(name))
        assert set(client.reqs_in_flight.values()) == {0}
        await reader.until(*"abc")
        os.kill(client._engines[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(reader.task, PATIENCE_S)


async def test_in_lockstep_all_engines_step_while_one_has_work_and_rest_after_the_wave() -> None:
    client = await DPLBAsyncMPClient.launch_all(LAUNCH, 2, lockstep=True)
    async with client:
        reader = Reader(client)
        for wave in range(2):
            before = await executed(client, 1)
            await client.add_request_async(ask(f"r{wave}", 1, 40), data_parallel_rank=0)
            assert await reader.until(f"r{wave}") == {f"r{wave}": "length"}
            await until(lambda wave=wave: client.current_wave == wave + 1 and not client.engines_running)  # type: ignore[misc]
            after = await executed(client, 1)
            assert (after[0] - before[0], after[1] - before[1]) == (0, 64)  # two meetings, 32 steps each
        own, dummies = await executed(client, 0)
        assert (own, dummies) == (80, 48)
        os.kill(client._engines[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(reader.task, PATIENCE_S)


async def test_clients_of_one_engine_each_wake_the_others_engines_for_a_wave() -> None:
    coordinator = await asyncio.to_thread(DPCoordinator, 2, lockstep=True)
    with coordinator:
        clients = await asyncio.gather(
            *(DPAsyncMPClient.start(LAUNCH, coordination=coordinator.coordination, ranks=(rank,)) for rank in range(2))
        )
        readers = [Reader(client) for client in clients]
        await clients[1].add_request_async(ask("r", 1, 10))
        assert await readers[1].until("r") == {"r": "length"}
        await until(lambda: [client.current_wave for client in clients] == [1, 1])
        assert await executed(clients[0], 0) == (0, 32) and await executed(clients[1], 1) == (10, 22)
        with pytest.raises(ValueError, match="only engine is 1"):
            await clients[1].add_request_async(ask("s"), data_parallel_rank=0)
        for reader in readers:
            reader.task.cancel()
        await asyncio.gather(*(client.close() for client in clients))


async def test_engines_are_added_and_removed_while_they_serve_and_no_request_is_lost() -> None:
    client = await DPLBAsyncMPClient.launch_all(
        msgspec.structs.replace(LAUNCH, kwargs={"step_s": 0.02}), 1, elastic=True
    )
    async with client:
        reader = Reader(client)
        for index in range(4):
            await client.add_request_async(ask(f"a{index}", 1, 300))
        await client.scale_async(3)
        for index in range(9):
            await client.add_request_async(ask(f"b{index}", 1, 300))
        assert set(client.reqs_in_flight.values()) >= {1, 2} and len(client.pids) == 3
        await until(lambda: client.counts[2][1] > 0)  # the coordinator counts it, too
        await client.scale_async(1)
        await client.add_request_async(ask("c"))
        assert client.reqs_in_flight["c"] == 0 and len(client.pids) == 1
        names = [f"a{index}" for index in range(4)] + [f"b{index}" for index in range(9)] + ["c"]
        assert await reader.until(*names) == dict.fromkeys(names, "length")
        with pytest.raises(ConfigurationError):
            await client.scale_async(0)
        with pytest.raises(ConfigurationError, match="could not start"):
            client.launch = msgspec.structs.replace(LAUNCH, kwargs={"fails": "raise"})
            await client.scale_async(2)
        await client.add_request_async(ask("d"))
        assert await reader.until("d") == {"d": "length"}


async def test_an_engine_is_used_again_after_a_removal_that_did_not_wait_for_it() -> None:
    client = await DPLBAsyncMPClient.launch_all(LAUNCH, 2, elastic=True)
    async with client:
        reader = Reader(client)
        await client.add_request_async(ask("lost", SLOW), data_parallel_rank=1)
        await client.scale_async(1, drain_s=0.0)
        await client.scale_async(2)
        assert await reader.until("lost") == {"lost": "stage_failed"}
        await client.add_request_async(ask("new"), data_parallel_rank=1)
        assert await reader.until("new") == {"new": "length"}
        assert len(client.pids) == 2 and client.lost == set()
        pid = client._engines[1].pid
        os.kill(pid, signal.SIGKILL)  # it is watched as the first one was
        await until(lambda: client.lost == {1})
        await client.scale_async(1)
        assert client.lost == set()  # nobody is to replace it


async def test_engines_in_lockstep_that_are_to_be_elastic_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="lockstep"):
        await DPLBAsyncMPClient.launch_all(LAUNCH, 2, lockstep=True, elastic=True)
