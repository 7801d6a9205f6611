"""Members that flap, or say Hello without end: light instances at a real coordinator, over real sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.scalelab.coordinating import Coordinating
from benchmarks.scalelab.fakes import GROUPS, PIPELINE, LightInstance, plan_of
from stage_runtime.rules.graph import edges
from stage_runtime.wire.messages import Hello

PATIENCE_S = 60.0
REQUESTS = 20


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Fleet:
    """A coordinator and one instance of each group, in this process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.endpoint = f"ipc://{folder}/c0"
        self.coordinator = Coordinating(folder, "c0", 60.0)
        self.steady = [self.instance(group) for group in GROUPS]

    def instance(self, group: str) -> LightInstance:
        return LightInstance(
            group,
            "one",
            folder=self._folder,
            coordinators=(self.endpoint,),
            dead_after_s=60.0,
            loop=asyncio.get_running_loop(),
        )

    async def serves(self) -> None:
        """All requests are answered, by the steady ones: no other may be bound any more."""
        async with asyncio.timeout(PATIENCE_S):
            await self.coordinator.until_ready(len(self.steady))
            outcome = await self.coordinator.load(REQUESTS, 100.0)
        assert outcome["failed"] == {}
        assert all(one.served >= REQUESTS for one in self.steady)


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    folder = tempfile.mkdtemp(prefix="omni")
    made = Fleet(folder)
    try:
        await made.coordinator.until_ready(len(GROUPS))
        yield made
    finally:
        for one in made.steady:
            await one.close()
        made.coordinator.close()
        shutil.rmtree(folder)


@pytest.mark.proves("join-and-leave")
async def test_instances_that_join_and_are_gone_at_once_leave_nothing() -> None:
    async with fleet() as made:
        await made.serves()
        before = descriptors()
        for number in range(60):
            flapping = made.instance(GROUPS[number % len(GROUPS)])
            await until(lambda flapping=flapping: bool(flapping.registration.coordinators))  # type: ignore[misc]
            await flapping.close()
        await made.serves()
        await until(lambda: descriptors() <= before)
        usage = await made.coordinator.usage()
        assert usage["ready"] == len(GROUPS)


@pytest.mark.proves("join-and-leave")
async def test_instances_that_join_and_leave_in_order_under_load_cost_no_request() -> None:
    async with fleet() as made:
        await made.coordinator.begin_load(4)
        for number in range(20):
            flapping = made.instance(GROUPS[number % len(GROUPS)])
            await until(lambda flapping=flapping: bool(flapping.registration.coordinators))  # type: ignore[misc]
            await flapping.drain()
            await flapping.close()
        outcome = await made.coordinator.end_load()
        assert (outcome["failed"], outcome["requests"] > 0) == ({}, True)


@pytest.mark.proves("join-and-leave")
async def test_a_member_that_says_hello_without_end_is_answered_now_and_then_and_costs_no_request() -> None:
    async with fleet() as made:
        loud = made.steady[0]
        (coordinator,) = loud.registration.coordinators
        link = loud.channels.link(coordinator)
        assert link is not None
        plan = plan_of(loud.member.group)
        hello = Hello(loud.member, edges.of_process([plan]), PIPELINE, made.endpoint)
        began, welcomes, sent = asyncio.get_running_loop().time(), loud.heard["Welcome"], 0
        await made.coordinator.begin_load(4)
        while sent < 2000:
            for _ in range(50):
                link.send_unordered(hello)
            sent += 50
            await asyncio.sleep(0)
        outcome = await made.coordinator.end_load()
        assert (outcome["failed"], outcome["requests"] > 0) == ({}, True)
        await made.serves()
        most = 2 + asyncio.get_running_loop().time() - began
        assert loud.heard["Welcome"] - welcomes <= most
