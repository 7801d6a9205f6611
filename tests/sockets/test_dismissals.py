"""Processes that were declared dead or are refused learn that soon, however many they are."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from benchmarks.scalelab.coordinating import Coordinating
from benchmarks.scalelab.fakes import GROUPS, LightInstance
from stage_runtime.sockets.connections.dismissals import DismissalBounds
from stage_runtime.wire.messages import Rejected
from tests.sockets.peers import PATIENCE_S, End, ends

INSTANCES = 100


@pytest.fixture
def folder() -> Iterator[str]:
    """Socket paths are bounded; pytest's are long."""
    path = tempfile.mkdtemp(prefix="omni")
    yield path
    shutil.rmtree(path)


@pytest.mark.long
@pytest.mark.proves("hundreds-refused")
async def test_a_hundred_that_are_declared_dead_at_once_all_learn_it_and_come_back(folder: str) -> None:
    """A place is free when the message is sent: by time alone, it would take for ever here."""
    loop = asyncio.get_running_loop()
    coordinator = Coordinating(folder, "c0", 60.0, dismissals=DismissalBounds(connect_s=10 * PATIENCE_S))
    instances: list[LightInstance] = []
    fenced: dict[str, asyncio.Task[None]] = {}

    def make(group: str) -> None:
        def again(instance: LightInstance) -> None:
            fenced[instance.incarnation] = loop.create_task(instance.close())
            instances.remove(instance)
            make(group)

        endpoint = f"ipc://{folder}/c0"
        instances.append(
            LightInstance(
                group, "one", folder=folder, coordinators=(endpoint,), loop=loop, dead_after_s=60.0, fenced=again
            )
        )

    try:
        async with asyncio.timeout(4 * PATIENCE_S):
            for number in range(INSTANCES):
                make(GROUPS[number % len(GROUPS)])
            await coordinator.until_ready(INSTANCES)
            first = {one.incarnation for one in instances}
            for incarnation in first:
                coordinator._coordinator.lost(incarnation)
            await coordinator.until_ready(INSTANCES)
            await asyncio.gather(*fenced.values())
            assert set(fenced) == first == first - {one.incarnation for one in instances}
    finally:
        for one in instances:
            await one.close()
        coordinator.close()


@pytest.mark.proves("hundreds-refused")
async def test_who_cannot_be_reached_keeps_no_place_longer_than_its_time(folder: str) -> None:
    few = DismissalBounds(connect_s=0.2, at_once=2, at_once_most=2)
    hub = End("hub", f"ipc://{folder}/hub", dismissals=few)
    leaf = End("leaf", f"ipc://{folder}/leaf")
    async with ends(hub, leaf):
        for number in range(4):
            hub.channels.dismiss(f"p{number}", f"ipc://{folder}/{number}", Rejected(f"p{number}", "no room"))
        while not leaf.listener.strangers:
            hub.channels.dismiss("leaf", leaf.endpoint, Rejected("leaf", "no room"))  # as often as it asks
            await asyncio.sleep(0.01)
        await hub.listener.until(lambda: hub.channels.peers == [])
        assert leaf.listener.strangers[0] == "hub"


async def test_who_is_admitted_while_its_refusal_waits_is_not_sent_it(folder: str) -> None:
    hub = End("hub", f"ipc://{folder}/hub", dismissals=DismissalBounds(at_once=1, at_once_most=1))
    first, second = (End(name, f"ipc://{folder}/{name}") for name in ("first", "second"))
    async with ends(hub, first, second):
        for end in (first, second):
            hub.channels.dismiss(end.name, end.endpoint, Rejected(end.name, "no room"))
        second.channels.connect("hub", hub.endpoint)
        hub.channels.connect("second", second.endpoint)
        await first.listener.until(lambda: bool(first.listener.strangers) and hub.channels.peers == ["second"])
        hub.send("second", "welcome")
        await second.listener.until(lambda: second.listener.received_words == ["welcome"])
        assert not any(isinstance(message, Rejected) for _, message in second.listener.messages)


async def test_whoever_waits_is_forgotten_beyond_a_bound(folder: str) -> None:
    bounds = DismissalBounds(waiting_most=3)
    hub = End("hub", f"ipc://{folder}/hub", dismissals=bounds)
    async with ends(hub):
        for number in range(2 * bounds.at_once_most):
            hub.channels.dismiss(f"p{number}", f"ipc://{folder}/{number}", Rejected(f"p{number}", "no room"))
        assert len(hub.channels.peers) <= bounds.at_once_most
        assert len(hub.channels._dismissals._waiting) <= 3
