"""A small fleet over real sockets: two coordinators and sixty light instances, of which a tenth dies at once.

`benchmarks/scale.py` does the same with up to 3,000, and measures it.
"""

from __future__ import annotations

import asyncio
import tempfile

import pytest

from benchmarks.scalelab import fakes, fleet
from benchmarks.scalelab.children import Child

INSTANCES = 60


@pytest.mark.long
@pytest.mark.proves("tenth-of-fleet-dies")
async def test_a_tenth_of_a_fleet_that_dies_at_once_loses_no_request_and_a_roll_of_the_rest_neither() -> None:
    made, joined = await fleet.start(INSTANCES, 2)
    try:
        assert joined.coordinator_descriptors_per_peer < 4
        died = await fleet.kill_a_tenth(made)
        assert (died.failed, died.reasons) == (0, {}) and died.requests > 0
        rolled = await fleet.roll(made, at_once=10)
        assert (rolled.failed, rolled.reasons) == (0, {}) and rolled.requests > 0
    finally:
        await fleet.stop(made)


@pytest.mark.proves("coordinator-dies-at-registration")
async def test_a_coordinator_that_dies_while_a_fleet_registers_is_replaced_by_one_that_all_register_with() -> None:
    folder = tempfile.TemporaryDirectory(prefix="scale-")

    async def coordinator() -> Child:
        return await Child.start("benchmarks.scalelab.coordinating", folder.name, "c0", "60")

    first = await coordinator()
    instances = await Child.start("benchmarks.scalelab.instances", folder.name, "60", f"ipc://{folder.name}/c0")
    second: Child | None = None
    try:
        beginning = asyncio.create_task(
            instances.ask("begin", of_each_group=INSTANCES // len(fakes.GROUPS), unit_revision="one")
        )
        while not (await first.ask("usage"))["ready"]:
            await asyncio.sleep(0.01)
        await first.kill()
        await beginning
        second = await coordinator()
        async with asyncio.timeout(100):
            await second.ask("until_ready", instances=INSTANCES)
            served = await second.ask("load", requests=100, per_second=100.0)
        assert served["failed"] == {}
    finally:
        for child in (first, instances, second):
            if child is not None:
                await child.kill()
        folder.cleanup()


async def test_a_fleet_is_divided_evenly_with_a_tenth_of_each_group_in_the_last_process() -> None:
    for of_each_group in (1, 6, 10, 30, 100, 300):
        shares = fleet.shares(of_each_group)
        assert sum(shares) == of_each_group
        assert shares[-1] == max(1, of_each_group // 10)
        assert all(0 < share * len(fakes.GROUPS) <= fleet.MOST_IN_A_PROCESS for share in shares)
