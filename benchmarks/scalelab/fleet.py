"""One fleet of light instances with its coordinators, and what is measured of it. Called by `benchmarks/scale.py`."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from typing import Any, Final

import msgspec

from benchmarks.scalelab.children import Child
from benchmarks.scalelab.fakes import GROUPS
from stage_runtime.rules.members import beats

MOST_IN_A_PROCESS: Final = 500
#: Heartbeats of more instances have 60 s: thousands of instances that share a few processors start and answer late.
MOST_ALIVE: Final = 1000
IDLE_S: Final = beats.LONGEST_S
BEATS: Final = 20_000
BEATS_S: Final = 3.0
SLICES: Final = 20  # in which what is compared takes turns
WORK_S: Final = 0.5
PER_SECOND: Final = 100.0  # requests of one coordinator, where their cost is measured
PER_SECOND_EACH: Final = 40.0  # of each of several: a request costs more where they come rarely, in any fleet
AT_ONCE: Final = 20  # requests in flight at each coordinator, during a roll or a death
WARM_UP_S: Final = 0.02  # for each instance, and five seconds: the links that requests use are open then
MEMBERSHIP: Final = ("Welcome", "Members", "Neighbours", "Hello", "Ready")


class Fleet(msgspec.Struct):
    """Its processes."""

    folder: tempfile.TemporaryDirectory[str]
    coordinators: list[Child]
    instances: list[Child]  #: The last one has a tenth of all, of each group.
    size: int


class Joined(msgspec.Struct, frozen=True):
    instances: int
    coordinators: int
    join_s: float  #: Time until all are ready at each coordinator.
    join_processor_s: float  #: Processor time of one coordinator, meanwhile.
    messages_per_join: float  #: Messages of the membership, to and from all processes.
    coordinator_bytes_per_peer: float
    coordinator_descriptors_per_peer: float
    fenced: int = 0  #: Instances that were declared dead meanwhile and joined again: the machine was too busy.


class Served(msgspec.Struct, frozen=True):
    """Costs of a fleet, beside those of a fleet of ten instances that served the same in turns."""

    instances: int
    #: Processor time of the coordinator for one request, without what it spends while no request comes.
    processor_us: float
    base_processor_us: float  #: Processor time with ten instances.
    idle_processor: float  #: Part of a core that the coordinator spends on beats and heartbeats.
    p50_ms: float
    p99_ms: float
    base_p99_ms: float
    links: int  #: Open at all instances together.
    most_links: int  #: The most links at one instance.
    bytes_per_link: float  #: Bytes of the instances' processes, for each link that the requests opened.
    descriptors_per_link: float
    failed: int
    beat_us: float = 0.0  #: Processor time of the coordinator for a beat, where many come together.

    @property
    def cost(self) -> float:
        """Times what a request costs with ten instances."""
        return self.processor_us / self.base_processor_us


class SideBySide(msgspec.Struct, frozen=True):
    """Coordinators of one fleet that share its requests; the numbers of them took turns."""

    instances: int
    coordinators: int
    processor_us: float  #: Processor time of all coordinators together, for one request.
    worst: float  #: Requests in flight at the busiest instance of a group, over time, divided by the group's mean.


class Changed(msgspec.Struct, frozen=True):
    """A roll or a death under load."""

    instances: int
    what: str
    seconds: float
    requests: int
    failed: int
    retried: int
    reasons: dict[str, int] = {}


class Restarted(msgspec.Struct, frozen=True):
    """A coordinator was killed, and another one started in its place at once."""

    instances: int
    serves_s: float  #: Time until it has answered a request.
    joined_s: float  #: Time until all instances are ready at it.


async def start(instances: int, coordinators: int) -> tuple[Fleet, Joined]:
    """instances: a multiple of 10, the number of groups."""
    folder = tempfile.TemporaryDirectory(prefix="scale-")
    names = [f"c{number}" for number in range(coordinators)]
    dead_after = _dead_after_s(instances)
    began = [await _coordinator(folder.name, name, instances) for name in names]
    parts = shares(instances // len(GROUPS))
    endpoints = [f"ipc://{folder.name}/{name}" for name in names]
    children = [await Child.start("benchmarks.scalelab.instances", folder.name, dead_after, *endpoints) for _ in parts]
    before = await _usage(began)
    await _usage(children)
    begun = time.perf_counter()
    await asyncio.gather(
        *(
            child.ask("begin", of_each_group=share, unit_revision="one")
            for child, share in zip(children, parts, strict=True)
        )
    )
    await asyncio.gather(*(one.ask("until_ready", instances=instances) for one in began))
    took_s = time.perf_counter() - begun
    await asyncio.sleep(1.0)
    after, known = await _usage(began), await _usage(children)
    messages = sum(one["heard"].get(kind, 0) for one in [*after, *known] for kind in MEMBERSHIP)
    fleet = Fleet(folder, began, children, instances)
    return fleet, Joined(
        instances,
        coordinators,
        took_s,
        after[0]["processor_s"] - before[0]["processor_after_s"],
        messages / instances / coordinators,
        (after[0]["memory_bytes"] - before[0]["memory_bytes"]) / instances,
        (after[0]["descriptors"] - before[0]["descriptors"]) / instances,
        sum(one["fenced"] for one in known),
    )


async def serve(fleet: Fleet, base: Fleet, requests: int) -> Served:
    """requests: measured, of the first coordinator of each; before them as many as open the links."""
    known = await _usage(fleet.instances)
    one, other = fleet.coordinators[0], base.coordinators[0]
    # The small fleet first: links of the large one that rest for a minute would be closed when they are counted.
    await _warm_up([other], base.size)
    await _warm_up([one], fleet.size)
    linked = await _usage(fleet.instances)
    opened = sum(each["links"] for each in linked) - sum(each["links"] for each in known)
    idle = {child: await _idle(child) for child in (one, other)}
    costs: dict[Child, list[dict[str, Any]]] = {one: [], other: []}
    for _ in range(SLICES):
        for child, loads in costs.items():
            loads += await _load([child], requests // SLICES)
    return Served(
        fleet.size,
        _cost_us(costs[one], idle[one]),
        _cost_us(costs[other], idle[other]),
        idle[one],
        1000 * statistics.median(each["p50_s"] for each in costs[one]),
        1000 * statistics.median(each["p99_s"] for each in costs[one]),
        1000 * statistics.median(each["p99_s"] for each in costs[other]),
        sum(each["links"] for each in linked),
        max(each["most_links"] for each in linked),
        _growth(known, linked, "memory_bytes") / max(1, opened),
        _growth(known, linked, "descriptors") / max(1, opened),
        sum(sum(each["failed"].values()) for each in costs[one]),
        await _beat_us(fleet, idle[one]),
    )


async def side_by_side(fleet: Fleet, numbers: list[int], requests: int, balance_s: float) -> list[SideBySide]:
    """Measures one, two … of the fleet's coordinators, each of which serves the same number of requests."""
    await _warm_up(fleet.coordinators, fleet.size)
    idle = [await _idle(child) for child in fleet.coordinators]
    costs: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(SLICES):
        for number in numbers:
            loads = await _load(fleet.coordinators[:number], requests // SLICES, PER_SECOND_EACH)
            spent = sum(each["processor_s"] - its * each["wall_s"] for each, its in zip(loads, idle, strict=False))
            costs[number].append(1e6 * spent / sum(each["requests"] for each in loads))
    return [
        SideBySide(
            fleet.size,
            number,
            statistics.median(costs[number]),
            await _balance(fleet, fleet.coordinators[:number], balance_s),
        )
        for number in numbers
    ]


async def _balance(fleet: Fleet, coordinators: list[Child], seconds: float) -> float:
    """Measures with a mean of 8 requests at each instance, each of which takes half a second there on average."""
    await asyncio.gather(*(one.ask("work", mean_s=WORK_S) for one in fleet.instances))
    at_once = 8 * fleet.size // len(coordinators)
    await asyncio.gather(*(one.ask("begin_load", at_once=at_once) for one in coordinators))
    await asyncio.sleep(2 * WORK_S * len(GROUPS))
    before = await _usage(fleet.instances)
    await asyncio.sleep(seconds)
    after = await _usage(fleet.instances)
    await asyncio.gather(*(one.ask("end_load") for one in coordinators))
    await asyncio.gather(*(one.ask("work", mean_s=0.0) for one in fleet.instances))
    return worst(before, after, 2)


async def restart_coordinator(fleet: Fleet) -> Restarted:
    """Restart the coordinator of a fleet that has one."""
    (old,) = fleet.coordinators
    await old.kill()
    begun = time.perf_counter()
    new = await _coordinator(fleet.folder.name, "c0", fleet.size)
    fleet.coordinators = [new]
    await new.ask("until_served")
    serves_s = time.perf_counter() - begun
    await new.ask("until_ready", instances=fleet.size)
    return Restarted(fleet.size, serves_s, time.perf_counter() - begun)


async def roll(fleet: Fleet, at_once: int) -> Changed:
    """Replace every instance under load."""

    async def all_roll() -> None:
        for child in fleet.instances:
            await child.ask("roll", unit_revision="two", at_once=at_once)
        await asyncio.gather(*(one.ask("until_ready", instances=fleet.size) for one in fleet.coordinators))

    return await _under_load(fleet, "roll", all_roll())


async def kill_a_tenth(fleet: Fleet) -> Changed:
    """SIGKILL a tenth of all instances at the same moment, under load."""
    dying = fleet.instances.pop()
    size = fleet.size
    fleet.size -= shares(size // len(GROUPS))[-1] * len(GROUPS)

    async def die() -> None:
        await dying.kill()
        await asyncio.gather(*(one.ask("until_ready", instances=fleet.size) for one in fleet.coordinators))

    return msgspec.structs.replace(await _under_load(fleet, "death of a tenth", die()), instances=size)


async def stop(fleet: Fleet) -> None:
    for child in [*fleet.coordinators, *fleet.instances]:
        await child.kill()
    fleet.folder.cleanup()


def worst(before: list[dict[str, Any]], after: list[dict[str, Any]], column: int = 1) -> float:
    """The largest growth of an instance's number, divided by the mean of its group. column: 1 served, 2 load."""
    earlier = {name: row[column] for usage in before for name, row in usage["served"].items()}
    groups: dict[str, list[float]] = {}
    for usage in after:
        for name, row in usage["served"].items():
            groups.setdefault(row[0], []).append(row[column] - earlier.get(name, 0))
    return max(max(grown) * len(grown) / max(sum(grown), 1e-9) for grown in groups.values())


def shares(of_each_group: int) -> list[int]:
    """How many of each group stand in each process: at most `MOST_IN_A_PROCESS`, and a tenth in the last."""
    last = max(1, of_each_group // 10)
    rest = of_each_group - last
    processes = max(1, -(-rest * len(GROUPS) // MOST_IN_A_PROCESS))
    parts = [rest // processes + (number < rest % processes) for number in range(processes)]
    return [*(part for part in parts if part), last]


async def _coordinator(folder: str, name: str, instances: int) -> Child:
    return await Child.start("benchmarks.scalelab.coordinating", folder, name, _dead_after_s(instances))


def _dead_after_s(instances: int) -> str:
    return str(3.0 if instances <= MOST_ALIVE else 60.0)


async def _under_load(fleet: Fleet, what: str, change: Any) -> Changed:
    retried = sum(one["retried"] for one in await _usage(fleet.coordinators))
    await asyncio.gather(*(one.ask("work", mean_s=0.01) for one in fleet.instances))
    await asyncio.gather(*(one.ask("begin_load", at_once=AT_ONCE) for one in fleet.coordinators))
    await asyncio.sleep(1.0)
    begun = time.perf_counter()
    await change
    took_s = time.perf_counter() - begun
    await asyncio.sleep(1.0)
    loads = await asyncio.gather(*(one.ask("end_load") for one in fleet.coordinators))
    await asyncio.gather(*(one.ask("work", mean_s=0.0) for one in fleet.instances))
    reasons: Counter[str] = Counter()
    for one in loads:
        reasons.update(one["failed"])
    return Changed(
        fleet.size,
        what,
        took_s,
        sum(one["requests"] for one in loads),
        sum(reasons.values()),
        sum(one["retried"] for one in await _usage(fleet.coordinators)) - retried,
        dict(reasons.most_common(5)),
    )


async def _warm_up(coordinators: list[Child], size: int) -> None:
    await asyncio.gather(*(one.ask("begin_load", at_once=AT_ONCE) for one in coordinators))
    await asyncio.sleep(5.0 + WARM_UP_S * size)
    await asyncio.gather(*(one.ask("end_load") for one in coordinators))


async def _load(coordinators: list[Child], requests: int, per_second: float = PER_SECOND) -> list[dict[str, Any]]:
    """So many requests at each."""
    return await asyncio.gather(*(one.ask("load", requests=requests, per_second=per_second) for one in coordinators))


async def _idle(child: Child) -> float:
    """Part of a core that a process spends without requests."""
    (before,) = await _usage([child])
    await asyncio.sleep(IDLE_S)
    (after,) = await _usage([child])
    return float(after["processor_s"] - before["processor_after_s"]) / IDLE_S


async def _beat_us(fleet: Fleet, idle: float) -> float:
    """More beats than any fleet sends, so that they come together: what one costs without its wake-up."""
    (before,) = await _usage(fleet.coordinators[:1])
    begun = time.perf_counter()
    sent = await asyncio.gather(
        *(one.ask("beats", count=BEATS // len(fleet.instances), seconds=BEATS_S) for one in fleet.instances)
    )
    await asyncio.sleep(0.2)
    wall_s = time.perf_counter() - begun
    (after,) = await _usage(fleet.coordinators[:1])
    heard = after["heard"]["Beat"] - before["heard"].get("Beat", 0)
    assert heard >= 0.9 * sum(one["sent"] for one in sent)
    return float(1e6 * (after["processor_s"] - before["processor_after_s"] - idle * wall_s) / heard)


def _cost_us(loads: list[dict[str, Any]], idle: float) -> float:
    """The median, so that one slice beside which the machine did something else does not count."""
    costs_s: list[float] = [(one["processor_s"] - idle * one["wall_s"]) / one["requests"] for one in loads]
    return 1e6 * statistics.median(costs_s)


async def _usage(children: list[Child]) -> list[dict[str, Any]]:
    return await asyncio.gather(*(one.ask("usage") for one in children))


def _growth(before: list[dict[str, Any]], after: list[dict[str, Any]], what: str) -> float:
    return float(sum(one[what] for one in after) - sum(one[what] for one in before))
