"""Coordinators of one fleet that do not agree on who is dead: light instances, over real sockets."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.scalelab.coordinating import Coordinating
from benchmarks.scalelab.fakes import GROUPS, LightInstance
from stage_runtime.wire.messages import Members
from tests.thoroughness import rows

PATIENCE_S = 60.0
OF_EACH_GROUP = 2
REQUESTS = 100
DEAD_AFTER_S = 60.0  # a busy machine loses nobody


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


class Fleet:
    """Two coordinators and two instances of each group, in this process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.coordinators = [Coordinating(folder, name, DEAD_AFTER_S) for name in ("c0", "c1")]
        self.reborn: list[str] = []
        self.instances = [self._instance(group) for group in GROUPS for _ in range(OF_EACH_GROUP)]

    def _instance(self, group: str) -> LightInstance:
        return LightInstance(
            group,
            "one",
            folder=self._folder,
            coordinators=(f"ipc://{self._folder}/c0", f"ipc://{self._folder}/c1"),
            dead_after_s=DEAD_AFTER_S,
            loop=asyncio.get_running_loop(),
            fenced=lambda instance: self.reborn.append(instance.incarnation),
        )

    async def replace(self, numbers: list[int]) -> None:
        """End these coordinators and start others at their addresses."""
        for number in numbers:
            self.coordinators[number].close()
        lost = {self.coordinators[number]._coordinator.incarnation for number in numbers}
        await until(lambda: not any(lost & set(one.registration.coordinators) for one in self.instances))
        for number in numbers:
            self.coordinators[number] = Coordinating(self._folder, f"c{number}", DEAD_AFTER_S)
        await self.ready(len(self.instances))

    async def halve(self) -> set[str]:
        """End one instance of each group, as in a roll. Returns: their incarnations."""
        ending = [self.of(group)[0] for group in GROUPS]
        await asyncio.gather(*(one.drain() for one in ending))
        for one in ending:
            await one.close()
            self.instances.remove(one)
        return {one.incarnation for one in ending}

    def of(self, group: str) -> list[LightInstance]:
        return [one for one in self.instances if one.member.group == group]

    async def ready(self, instances: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for one in self.coordinators:
                await one.until_ready(instances)

    async def serve(self, number: int) -> int:
        """Requests of that coordinator. Returns: how many were sent again."""
        coordinator = self.coordinators[number]
        before: int = (await coordinator.usage())["retried"]
        async with asyncio.timeout(PATIENCE_S):
            outcome = await coordinator.load(REQUESTS, 500.0)
        assert outcome["failed"] == {}
        after: int = (await coordinator.usage())["retried"]
        return after - before

    async def settled(self, number: int) -> None:
        """Wait until no request of that coordinator meets a link that the other end had closed."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.serve(number):
                await asyncio.sleep(0.1)

    async def serve_all(self, number: int) -> None:
        """Wait until that coordinator has bound requests to every instance."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await self.serve(number)
                known = self.coordinators[number]._coordinator.membership.state.instances
                if all(one.bound_total for one in known.values()):
                    return


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    folder = tempfile.mkdtemp(prefix="omni")
    made = Fleet(folder)
    try:
        await made.ready(len(made.instances))
        yield made
    finally:
        for one in made.instances:
            await one.close()
        for coordinator in made.coordinators:
            coordinator.close()
        shutil.rmtree(folder)


@pytest.mark.proves("one-coordinator-loses")
async def test_an_instance_dead_for_one_coordinator_alone_loses_no_requests_of_the_other() -> None:
    async with fleet() as made:
        for number in (0, 1):
            await made.serve_all(number)
        one = made.of("stage4")[0]
        first = made.coordinators[0]
        first._channels.dismiss = lambda *_: None  # type: ignore[method-assign]  # the partition: it does not hear
        first._coordinator.lost(one.incarnation)
        neighbours = made.of("stage3") + made.of("stage5")
        await until(lambda: all(each.heard["Members"] for each in neighbours))
        served = one.served
        assert await made.serve(1) == 0
        assert await made.serve(1) == 0
        assert one.served > served
        assert sum(each.unsent for each in made.instances) == 0


@pytest.mark.proves("one-coordinator-loses")
async def test_who_is_dead_for_one_coordinator_is_introduced_by_the_other_that_had_not_yet() -> None:
    """Those that knew it from the first one alone have closed their links, and open them again."""
    async with fleet() as made:
        await made.serve_all(0)
        one = made.of("stage4")[0]
        first = made.coordinators[0]
        first._channels.dismiss = lambda *_: None  # type: ignore[method-assign]
        first._coordinator.lost(one.incarnation)
        neighbours = made.of("stage3") + made.of("stage5")
        await until(lambda: not any(one.incarnation in each.members for each in neighbours))
        await made.serve_all(1)
        await made.settled(1)
        served = one.served
        assert await made.serve(1) == 0
        assert one.served > served


@pytest.mark.proves("one-coordinator-loses")
async def test_who_is_dead_for_all_coordinators_is_forgotten_by_its_neighbours() -> None:
    async with fleet() as made:
        for number in (0, 1):
            await made.serve_all(number)
        one = made.of("stage4")[0]
        await one.close()
        made.instances.remove(one)
        for coordinator in made.coordinators:
            coordinator._coordinator.lost(one.incarnation)
        await until(lambda: not any(one.incarnation in each.members for each in made.instances))
        await until(lambda: not any(one.incarnation in each.channels.peers for each in made.instances))


@pytest.mark.proves("introducer-ends")
@pytest.mark.parametrize("numbers", rows([[0], [0, 1]], each_run=1), ids=lambda numbers: f"{2 - len(numbers)} left")
async def test_who_leaves_after_the_coordinator_that_introduced_it_is_forgotten_by_all(
    numbers: list[int],
) -> None:
    async with fleet() as made:
        await made.serve_all(0)
        await made.replace(numbers)
        gone = await made.halve()
        await until(lambda: not any(gone & one.members for one in made.instances))
        await until(lambda: not any(gone & set(one.channels.peers) for one in made.instances))
        assert await made.serve(0) == await made.serve(1) == 0


@pytest.mark.proves("introducer-ends")
async def test_links_that_a_coordinator_has_introduced_outlive_it() -> None:
    async with fleet() as made:
        await made.serve_all(0)
        known = {one.incarnation: one.members for one in made.instances}
        received = made.coordinators[1]._heard
        await made.replace([0])
        await until(lambda: received[Members] == len(made.instances))
        assert await made.serve(1) == 0
        assert all(known[one.incarnation] <= one.members for one in made.instances)


@pytest.mark.proves("frozen-coordinator")
@pytest.mark.parametrize("how", rows(["both have", "an instance has lost it", "it has lost them"], each_run=1))
async def test_an_instance_that_one_coordinator_alone_has_lost_comes_back_to_it_as_it_is(how: str) -> None:
    """A coordinator that was frozen, and a partition of its machine: the other one's requests do not notice."""
    async with fleet() as made:
        for number in (0, 1):
            await made.serve_all(number)
        first = made.coordinators[0]._coordinator
        incarnations = [one.incarnation for one in made.instances]
        await made.coordinators[1].begin_load(4)
        if how != "it has lost them":
            for one in made.instances:
                one.channels.drop(first.incarnation)
                one.lost(first.incarnation)
        if how != "an instance has lost it":
            for incarnation in incarnations:
                first.lost(incarnation)
        heard = sum(one.heard["Welcome"] for one in made.instances)
        await until(lambda: sum(one.heard["Welcome"] for one in made.instances) >= heard + len(incarnations))
        await made.ready(len(incarnations))
        outcome = await made.coordinators[1].end_load()
        assert (outcome["failed"], made.reborn) == ({}, [])
        assert (await made.coordinators[1].usage())["retried"] == 0
        assert set(first.membership.state.instances) == set(incarnations)
        await made.settled(0)
        assert await made.serve(0) == await made.serve(1) == 0


@pytest.mark.proves("frozen-stage")
async def test_who_is_declared_dead_by_all_coordinators_comes_back_under_a_new_incarnation() -> None:
    async with fleet() as made:
        one = made.of("stage4")[0]
        for coordinator in made.coordinators:
            coordinator._coordinator.lost(one.incarnation)
        one.beat()
        await until(lambda: made.reborn == [one.incarnation])


async def test_an_instance_that_comes_back_and_its_neighbours_open_new_links_and_no_request_meets_an_old_one() -> None:
    async with fleet() as made:
        await made.serve_all(0)
        one = made.of("stage4")[0]
        neighbours = {each.incarnation for each in made.of("stage3") + made.of("stage5")}
        welcomes = one.heard["Welcome"]
        made.coordinators[0]._coordinator.lost(one.incarnation)
        one.beat()
        await until(lambda: one.heard["Welcome"] > welcomes)
        await made.ready(len(made.instances))
        assert one.dropped >= 1 and not neighbours & one.members  # its ack may be refused beside its beat
        served = one.served
        async with asyncio.timeout(PATIENCE_S):
            while not neighbours & one.members or one.served == served:
                assert await made.serve(0) == 0
