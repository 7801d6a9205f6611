"""Fleets of 10 to 3,000 instances: what it costs to join, to serve, to roll, and to lose a tenth at once.

    python -m benchmarks.scale [--instances N …] [--side-by-side N] [--requests N] [--streams N] [--json FILE]

Real coordinators and real `Channels` over Unix sockets; light instances in few processes (`scalelab.fakes`). Ten
groups, one after the other. Processor time is that of the coordinator. Exit code 1: a figure is beyond its target.
Pictures: `docs/pictures/scaling.py` draws them from the JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import platform
import sys
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from benchmarks.scalelab import children, fleet, linkmemory, roundtrips, simulation, streams
from benchmarks.scalelab.fleet import Changed, Fleet, Joined, Restarted, Served, SideBySide
from benchmarks.scalelab.linkmemory import LinkMemory
from benchmarks.scalelab.roundtrips import FirstMessage
from benchmarks.scalelab.streams import Streams
from stage_runtime.errors import describe
from stage_runtime.rules.members import beats

BASE = 10  # instances: what a request's cost is compared with
JOIN_S, LINK_BYTES, LINK_DESCRIPTORS, COST, WORST, STREAM_BYTES = 60.0, 64 << 10, 3.0, 1.2, 1.3, 100 << 10
BALANCE_S = 15.0
BEAT_US, IDLE, IDLE_INSTANCES, ROUND_TRIPS = 20.0, 0.05, 1000, 2.0
#: Times the first byte without idle streams. Caches may cost a part of that. A look at each of 10,000 streams for a
#: request would take a millisecond or more: longer than the first byte itself.
FIRST_BYTE = 1.5


class Simulated(msgspec.Struct, frozen=True):
    """The load of the worst instance over time, divided by the mean."""

    instances: int  #: Instances of one group.
    coordinators: int
    worst: float


class Figures(msgspec.Struct):
    """The figures of one run."""

    machine: str
    joined: list[Joined] = []
    served: list[Served] = []
    link_memory: list[LinkMemory] = []
    side_by_side: list[SideBySide] = []
    restarted: list[Restarted] = []
    changed: list[Changed] = []
    simulated: list[Simulated] = []
    streams: list[Streams] = []
    first_messages: list[FirstMessage] = []
    broken: list[str] = []  #: Parts that did not come to their end, and why.

    def beyond(self) -> Iterator[str]:
        """The figures beyond their targets."""
        yield from self.broken
        for one in self.joined:
            if one.join_s > JOIN_S:
                yield f"{one.instances} instances joined in {one.join_s:.1f} s, not in {JOIN_S:g} s"
        for served in self.served:
            if served.processor_us > COST * served.base_processor_us:
                cost = f"{served.processor_us:.0f} us, {served.base_processor_us:.0f} us with {BASE}"
                yield f"{served.instances} instances: a request costs {cost}"
            if served.beat_us > BEAT_US:
                yield f"{served.instances} instances: a beat costs {served.beat_us:.0f} us"
            if served.instances <= IDLE_INSTANCES and served.idle_processor > IDLE:
                yield f"{served.instances} instances: a coordinator at rest takes {served.idle_processor:.3f} of a core"
            if served.failed:
                yield f"{served.instances} instances: {served.failed} requests failed"
        for side in self.side_by_side:
            if side.processor_us > COST * self.side_by_side[0].processor_us:
                yield f"{side.coordinators} coordinators: a request costs {side.processor_us:.0f} us"
            if side.worst > WORST:
                yield f"{side.coordinators} coordinators: the worst instance has {side.worst:.2f} of the mean"
        for simulated in self.simulated:
            if simulated.worst > WORST:
                yield f"simulated {simulated.instances}: the worst instance has {simulated.worst:.2f} of the mean"
        for changed in self.changed:
            if changed.failed:
                yield f"{changed.what} of {changed.instances}: {changed.failed} requests failed: {changed.reasons}"
        for link in self.link_memory:
            if link.nbytes > LINK_BYTES or link.descriptors > LINK_DESCRIPTORS:
                yield f"a link takes {link.nbytes / 1024:.0f} KiB and {link.descriptors:.1f} descriptors at {link.end}"
        for first in self.first_messages:
            if first.detour and first.round_trips > ROUND_TRIPS:
                how = "CURVE" if first.curve else "plain"
                yield f"the first message on a new link takes {first.round_trips:g} round trips more ({how})"
        for held in self.streams:
            if held.bytes_per_stream > STREAM_BYTES:
                yield f"an idle stream takes {held.bytes_per_stream / 1024:.0f} KiB"
            if held.first_byte_idle_ms > FIRST_BYTE * held.first_byte_ms:
                took = f"{held.first_byte_idle_ms:.1f} ms, without them {held.first_byte_ms:.1f} ms"
                yield f"with {held.streams} idle streams the first byte takes {took}"
            if held.bytes_per_slow_reader > held.slow_reader_bound:
                nbytes, most = (one / (1 << 20) for one in (held.bytes_per_slow_reader, held.slow_reader_bound))
                yield f"a client that does not read takes {nbytes:.1f} MiB, not at most {most:.1f} MiB"


async def measure(figures: Figures, arguments: argparse.Namespace) -> None:
    if arguments.instances:
        base, joined = await fleet.start(BASE, 1)
        figures.joined.append(joined)
        show(joined)
        try:
            for instances in arguments.instances:
                async with part(figures, f"{instances} instances"):
                    await measure_fleet(figures, instances, base, arguments)
        finally:
            await fleet.stop(base)
    if arguments.side_by_side:
        async with part(figures, "coordinators side by side"):
            await measure_side_by_side(figures, arguments)
    async with part(figures, "memory of links"):
        for sends, receives in ((True, False), (False, True), (True, True)):
            figures.link_memory.append(await linkmemory.measure(sends=sends, receives=receives))
            show(figures.link_memory[-1])
    async with part(figures, "first messages"):
        for curve, detour in itertools.product((False, True), (False, True)):
            figures.first_messages.append(await roundtrips.measure(curve, detour=detour))
            show(figures.first_messages[-1])
    if arguments.streams:
        async with part(figures, "streams"):
            figures.streams.append(await streams.measure(arguments.streams))
            show(figures.streams[-1])


@contextlib.asynccontextmanager
async def part(figures: Figures, name: str) -> AsyncIterator[None]:
    """A failure in it is noted, and the next part is measured all the same."""
    try:
        yield
    except Exception as error:
        figures.broken.append(f"{name}: {describe(error)}")
        traceback.print_exc()


async def measure_fleet(figures: Figures, instances: int, base: Fleet, arguments: argparse.Namespace) -> None:
    made, joined = await fleet.start(instances, 1)
    try:
        figures.joined.append(joined)
        show(joined)
        figures.served.append(await fleet.serve(made, base, arguments.requests))
        show(figures.served[-1])
        figures.restarted.append(await fleet.restart_coordinator(made))
        show(figures.restarted[-1])
        figures.changed.append(await fleet.roll(made, arguments.at_once))
        show(figures.changed[-1])
        figures.changed.append(await fleet.kill_a_tenth(made))
        show(figures.changed[-1])
    finally:
        await fleet.stop(made)


async def measure_side_by_side(figures: Figures, arguments: argparse.Namespace) -> None:
    most = max(arguments.coordinators)
    made, joined = await fleet.start(arguments.side_by_side, most)
    try:
        figures.joined.append(joined)
        show(joined)
        for side in await fleet.side_by_side(made, arguments.coordinators, arguments.requests, BALANCE_S):
            figures.side_by_side.append(side)
            show(side)
    finally:
        await fleet.stop(made)
    for instances in arguments.simulated:
        beat_s = max(1.0, beats.interval_s(2 * instances))  # there are two groups
        outcome = simulation.run(simulation.Fleet(instances=instances, coordinators=most, beat_s=beat_s))
        figures.simulated.append(Simulated(instances, most, outcome.worst_average))
        show(figures.simulated[-1])


def show(figure: msgspec.Struct) -> None:
    fields = {name: getattr(figure, name) for name in figure.__struct_fields__}
    shown = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in fields.items())
    print(f"{type(figure).__name__:9}", "  ".join(shown), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--instances", type=int, nargs="*", default=[100, 300, 1000, 3000])
    parser.add_argument("--coordinators", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--side-by-side", type=int, default=100, help="instances, with several coordinators; 0: none")
    parser.add_argument("--simulated", type=int, nargs="*", default=[3, 10, 30, 100, 300, 1000])
    parser.add_argument("--requests", type=int, default=2000, help="measured at each coordinator")
    parser.add_argument("--at-once", type=int, default=50, help="instances that a roll replaces at a time")
    parser.add_argument("--streams", type=int, default=10_000, help="idle HTTP streams; 0: none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    children.raise_limits()
    figures = Figures(f"{platform.machine()}, Python {platform.python_version()}")
    try:
        asyncio.run(measure(figures, arguments))
    finally:
        if arguments.json is not None:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
    problems = list(figures.beyond())
    for problem in problems:
        print(f"beyond its target: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
