"""Several engines of one instance: balanced, in lockstep, added and removed while they serve. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.data_parallel import DPLBAsyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.data_parallel.dp_coordinator import DPCoordinator
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.errors import ConfigurationError, EngineDeadError
from stage_runtime.rules.autoregressive.requests import Hold
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
    """Steps of an engine, and how often it met the others."""
    steps, meetings = await client.call_utility_async("executed", rank=rank)
    return steps, meetings


@pytest.mark.parametrize("start", [lambda: DPCoordinator(2), lambda: AsyncMPClient(LAUNCH)])
def test_a_process_that_cannot_be_made_leaves_no_folder(
    start: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_RUN", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(FileNotFoundError):
        start()
    assert not list(tmp_path.iterdir())


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


@pytest.mark.long
async def test_in_lockstep_all_engines_meet_before_each_step_of_one_and_rest_after_the_wave() -> None:
    client = await DPLBAsyncMPClient.launch_all(LAUNCH, 2, lockstep=True)
    async with client:
        reader = Reader(client)
        for wave in range(1, 3):
            await client.add_request_async(ask(f"r{wave}", 1, 40), data_parallel_rank=wave - 1)
            assert await reader.until(f"r{wave}") == {f"r{wave}": "length"}
            await until_met(client, 41 * wave)  # the last one ends the wave
        assert await executed(client, 0) == (40, 82) and await executed(client, 1) == (40, 82)
        with pytest.raises(ConfigurationError, match="enable_expert_parallel cannot be added or removed"):
            await client.scale_async(3)
        os.kill(client._engines[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="all engines end with one of enable_expert_parallel"):
            await asyncio.wait_for(reader.task, PATIENCE_S)


async def until_met(client: AsyncMPClient, times: int) -> None:
    """Waits until each engine has met the others so often."""
    async with asyncio.timeout(PATIENCE_S):
        while [(await executed(client, rank))[1] for rank in client.ranks] != [times] * len(client.ranks):
            await asyncio.sleep(0.02)


@pytest.mark.long
async def test_a_request_that_is_held_lets_all_engines_rest_and_begins_a_wave_when_it_is_released() -> None:
    client = await DPLBAsyncMPClient.launch_all(LAUNCH, 2, lockstep=True)
    async with client:
        reader = Reader(client)
        held = msgspec.structs.replace(ask("held", 1, 10), hold=Hold.REMOTE_KV)
        await client.add_request_async(held, data_parallel_rank=1)
        await client.add_request_async(ask("r", 1, 10), data_parallel_rank=0)
        await reader.until("r")
        await until_met(client, 11)
        await client.release_requests_async(["held"])
        assert await reader.until("held") == {"held": "length"}
        await until_met(client, 22)


@pytest.mark.long
async def test_engines_in_lockstep_end_together_when_one_is_asked_to_and_finish_what_all_have() -> None:
    client = await DPLBAsyncMPClient.launch_all(
        msgspec.structs.replace(LAUNCH, kwargs={"step_s": 0.02}), 2, lockstep=True
    )
    async with client:
        reader = Reader(client)
        for rank, count in ((0, 100), (1, 20)):
            await client.add_request_async(ask(f"r{rank}", 1, count), data_parallel_rank=rank)
        await until(lambda: len(reader.tokens) == 2)
        os.kill(client._engines[1].pid, signal.SIGTERM)
        assert await reader.until("r0", "r1") == {"r0": "length", "r1": "length"}
        with pytest.raises(EngineDeadError, match="has ended"):
            await asyncio.wait_for(reader.task, PATIENCE_S)


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
