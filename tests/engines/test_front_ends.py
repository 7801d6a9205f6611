"""Several processes in front of the same engines: each gets its outputs, and one that ends takes its own requests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

import msgspec
import pytest

from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.data_parallel import DPAsyncMPClient, DPLBAsyncMPClient
from stage_runtime.engines.autoregressive.data_parallel.dp_coordinator import DPCoordinator
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    Attach,
    EngineCoreOutputs,
    EngineCoreRequestType,
    SchedulerStats,
)
from stage_runtime.errors import ConfigurationError
from stage_runtime.rules.autoregressive.waves import PublishState
from stage_runtime.sockets import multipart
from tests.engines.front_end import LAUNCH, ask
from tests.engines.test_engine_parallel import Reader, until
from tests.patience import patience

PATIENCE_S = patience(60.0)


async def another(ended: str, kind: str, address: Any) -> Process:
    """Another front end, in a process of its own."""
    given = msgspec.msgpack.encode(address).hex()
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.engines.front_end", ended, kind, given, stdout=PIPE
    )


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def running(client: AsyncMPClient) -> int:
    return sum(one[0] + one[1] for one in await client.call_each_async("stats"))


@pytest.mark.parametrize("garbage", [b"\x81\xa1x" + b"\x91" * 100_000, b"\xc1", b"\x81\xa4type\xa1\xff"], ids=range(3))
def test_a_message_that_cannot_be_decoded_ends_no_coordinator(garbage: bytes) -> None:
    context = multipart.SocketContext()
    with DPCoordinator(1) as coordinator:
        engine = context.connect("PUSH", coordinator.coordination.output)
        client = context.connect("XSUB", coordinator.coordination.stats)
        try:
            engine.send([garbage], block=True)
            client.send([garbage], block=True)
            client.subscribe()
            published = multipart.Poller(client, coordinator.pidfd)
            assert published.wait(PATIENCE_S)
            assert client.receive() is not None, "the coordinator has ended"
            engine.send([garbage, b""], block=True)
            counts = EngineCoreOutputs(scheduler_stats=SchedulerStats(3, 2, 1))
            engine.send([msgspec.msgpack.encode(counts)], block=True)
            assert published.wait(PATIENCE_S)
            frames = client.receive()
            assert frames is not None, "the coordinator has ended"
            assert msgspec.msgpack.decode(frames[0], type=PublishState).counts == ((3, 2),)
        finally:
            for socket in (engine, client):
                socket.close()
            context.close()


@pytest.mark.parametrize("kind", ["one engine", "all engines"])
async def test_two_front_ends_of_the_same_engines_get_their_own_outputs(kind: str) -> None:
    if kind == "one engine":
        client = await AsyncMPClient.start(LAUNCH, front_ends=2)
    else:
        client = await DPLBAsyncMPClient.launch_all(LAUNCH, 2, front_ends=2)
    async with client:
        reader = Reader(client)
        other = await another("killed", kind, client.front_end(1))
        assert (await line(other), await line(other)) == ("[2, 3, 4]", "waiting")
        await client.add_request_async(ask("ours", 450))
        await until(lambda: "ours" in reader.tokens)
        assert await running(client) == 2 and set(reader.tokens) == {"ours"}
        other.kill()
        await other.wait()
        while await running(client) == 2:  # an engine answers when it has looked at its clients
            pass
        await client.add_request_async(ask("after", 3))
        assert await reader.until("ours", "after") == {"ours": "length", "after": "length"}
        assert reader.tokens["ours"] == list(range(2, 452)) and set(reader.tokens) == {"ours", "after"}


async def test_a_front_end_that_leaves_ends_no_engine_of_another() -> None:
    async with await AsyncMPClient.start(LAUNCH, front_ends=2) as client:
        reader = Reader(client)
        other = await another("close", "one engine", client.front_end(1))
        assert await line(other) == "[2, 3, 4]" and await other.wait() == 0
        await client.add_request_async(ask("after", 3))
        assert await reader.until("after") == {"after": "length"}
        with pytest.raises(ValueError, match="front end 2 of 2"):
            client.front_end(2)


async def test_a_client_in_another_process_takes_part_by_the_coordinators_address() -> None:
    coordinator = await asyncio.to_thread(DPCoordinator, 2)
    with coordinator:
        client = await DPAsyncMPClient.start(LAUNCH, coordination=coordinator.coordination, ranks=(0,))
        async with client:
            Reader(client)
            other = await another("close", "own engine", coordinator.coordination)
            await client.add_request_async(ask("ours", 3))
            assert await line(other) == "[2, 3, 4]" and await other.wait() == 0


@pytest.mark.parametrize("attach", [Attach(0, 1), Attach(2, 1), Attach(1, 1 << 22)])
async def test_an_attachment_of_nobody_is_dropped_and_changes_nothing(attach: Attach) -> None:
    async with await AsyncMPClient.start(LAUNCH, front_ends=2) as client:
        reader = Reader(client)
        client._send(0, EngineCoreRequestType.ATTACH, msgspec.msgpack.encode(attach))
        await client.add_request_async(ask("after", 3))
        assert await reader.until("after") == {"after": "length"}


async def test_engines_with_several_front_ends_are_not_scaled() -> None:
    async with await DPLBAsyncMPClient.launch_all(LAUNCH, 1, front_ends=2) as client:
        with pytest.raises(ConfigurationError, match="several front ends"):
            await client.scale_async(2)


async def test_every_front_end_asks_the_engine_that_replaces_another() -> None:
    async with await DPLBAsyncMPClient.launch_all(LAUNCH, 2, elastic=True, front_ends=2) as client:
        second = await DPLBAsyncMPClient.start(EngineLaunch(factory=""), joins=client.front_end(1))
        async with second:
            ours, theirs = Reader(client), Reader(second)
            for turn in range(2):
                killed = client.pids_by_rank()[1]
                os.kill(killed, signal.SIGKILL)
                await until(lambda: 1 in client.lost and 1 in second.lost)
                await client.replace_async(1)
                await until(lambda: 1 in second.ranks)
                assert second.pids_by_rank() == client.pids_by_rank() and killed not in second.pids
                assert second.lost == client.lost == set()
                await second.add_request_async(ask(f"theirs {turn}", 3), data_parallel_rank=1)
                await client.add_request_async(ask(f"ours {turn}", 3), data_parallel_rank=1)
                assert await theirs.until(f"theirs {turn}") == {f"theirs {turn}": "length"}
                assert await ours.until(f"ours {turn}") == {f"ours {turn}": "length"}
            assert set(theirs.tokens) == {"theirs 0", "theirs 1"} and set(ours.tokens) == {"ours 0", "ours 1"}


async def test_every_front_end_learns_of_the_end_of_an_engine() -> None:
    async with await AsyncMPClient.start(LAUNCH, front_ends=2) as client:
        second = await AsyncMPClient.start(EngineLaunch(factory=""), joins=client.front_end(1))
        async with second:
            reader = Reader(second)
            os.kill(client.pids[0], signal.SIGKILL)
            await until(reader.task.done)
            assert second.dead
