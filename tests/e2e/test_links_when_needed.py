"""Links of real processes: opened by the first request, and refused at a limit while what runs goes on."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
from pathlib import Path

import pytest

from omnipipeline_spec.cluster import ProcessGroup
from tests.e2e import descriptors
from tests.e2e.local_pipelines import APART, Client, diamond, eventually, replicas, running

#: Links of each instance of the diamond after a request: to the coordinator, and to those it sends to.
LINKED = {"front": 3.0, "side": 2.0, "joiner": 2.0, "voice": 1.0}
#: Once payloads came by relay: to those that sent them, too, which are told of their release.
RELEASED = {"front": 3.0, "side": 3.0, "joiner": 4.0, "voice": 2.0}


async def connections(client: Client) -> dict[str, float]:
    """How many connections each instance has, by its group, as its last beat said."""
    instances = (await client.status())["instances"]
    return {one["group"]: one["gauges"].get("control_connected", 0) for one in instances}


async def test_instances_are_connected_by_the_first_request_that_is_bound_to_both(base: Path) -> None:
    async with running(diamond(APART), base) as pipeline, Client(pipeline.url) as client:

        async def all_connected() -> bool:
            return all(count for count in (await connections(client)).values())

        await eventually(all_connected)
        assert set((await connections(client)).values()) == {1.0}, "to the coordinator alone"
        await client.answer("the first one")

        async def linked() -> bool:
            return await connections(client) == LINKED

        await eventually(linked)
        await asyncio.gather(*(client.answer(f"more {number}", size=1 << 18) for number in range(20)))
        found = await connections(client)
        assert all(LINKED[group] <= found[group] <= RELEASED[group] for group in LINKED), "what is linked stays linked"


async def test_a_death_without_a_link_is_known_from_the_coordinator(base: Path) -> None:
    """Nobody has sent anything to the one that is killed; the next request must not be sent there."""
    spec = diamond(APART, process_groups=replicas(side=2))
    async with running(spec, base) as pipeline, Client(pipeline.url) as client:
        os.kill(pipeline.pids()["side"], signal.SIGKILL)
        answers = await asyncio.gather(*(client.answer(f"request {number}") for number in range(20)))
        assert [one["text"] for one in answers] == [f"request {number}" for number in range(20)]


@pytest.mark.long
@pytest.mark.proves("no-descriptors")
@pytest.mark.parametrize(
    ("left", "reason"), [(16, "no room for another instance"), (6, "new peers are refused")], ids=["few", "hardly any"]
)
async def test_a_coordinator_without_descriptors_refuses_the_new_instance_and_serves_on(
    base: Path, left: int, reason: str
) -> None:
    spec = diamond(APART, process_groups=[ProcessGroup(name="side", replicas=1)])
    async with running(spec, base) as pipeline, Client(pipeline.url) as client:
        await client.answer("before")
        pid = pipeline.pids()["coordinator"]
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard, "it has raised its limit"
        used = {int(entry.name) for entry in os.scandir(f"/proc/{pid}/fd")}
        free = (number for number in itertools.count() if number not in used)
        await descriptors.allow(pid, next(itertools.islice(free, left, None)), hard)
        scaling = asyncio.create_task(pipeline.scale("side", 2))

        async def refused() -> bool:
            return reason in (base / "log").read_text()

        await eventually(refused)
        log = (base / "log").read_text()
        assert "RLIMIT_NOFILE" in log and "raise the hard limit" in log
        await client.answer("meanwhile")
        assert not scaling.done()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        await scaling
        sides = [one for one in (await client.status())["instances"] if one["group"] == "side"]
        assert [one["ready"] for one in sides] == [True, True]
