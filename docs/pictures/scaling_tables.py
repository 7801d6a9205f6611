"""The tables of docs/scaling.md, written from the figures of `benchmarks/scale.py`: ``make pictures``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from benchmarks.scale import FIRST_BYTE, Figures
from docs.pictures.scaling import FILE
from stage_runtime.rules.members import beats

PAGE: Final = Path(__file__).parents[1] / "scaling.md"
BEGIN: Final = "<!-- from docs/pictures/scaling.json: `make pictures` -->\n"
END: Final = "<!-- end -->\n"
#: Bytes that a coordinator's link with an instance takes more once it is used: what fleets of 100 and 300 grew by.
LINK_USED: Final = 50 << 10

One = TypeVar("One")


def page() -> str:
    """docs/scaling.md with its tables written anew."""
    figures = msgspec.json.decode(FILE.read_bytes(), type=Figures)
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + "\n" + tables(figures) + "\n" + END + after


def tables(figures: Figures) -> str:
    joined = {one.instances: one for one in figures.joined if one.coordinators == 1}
    served = {one.instances: one for one in figures.served}
    restarts = {one.instances: one for one in figures.restarted}
    rolls = {one.instances: one for one in figures.changed if one.what == "roll"}
    deaths = {one.instances: one for one in figures.changed if one.what != "roll"}
    sizes = sorted(joined)

    def row(name: str, of: dict[int, One], cell: Callable[[One], str], target: str = "") -> list[str]:
        return [name, *(cell(of[size]) if size in of else "" for size in sizes), target]

    fleets = [
        ["", *(f"{size:,}" for size in sizes), "target"],
        row("until all have joined and are ready", joined, lambda one: f"{one.join_s:.1f} s", "60 s for 3,000"),
        row("membership messages for each join", joined, lambda one: f"{one.messages_per_join:.1f}"),
        row(
            "coordinator's memory for each instance, both directions",
            joined,
            lambda one: _kib(one.coordinator_bytes_per_peer),
        ),
        row(
            "coordinator's descriptors for each instance",
            joined,
            lambda one: f"{one.coordinator_descriptors_per_peer:.1f}",
            "3",
        ),
        row("processor time of a request", served, lambda one: f"{one.processor_us:.0f} us"),
        row("beside that with ten, measured in turns", served, lambda one: f"{one.cost:.2f}", "1.2"),
        row(
            "its latency over ten stages, 99 % (with ten instances)",
            served,
            lambda one: f"{one.p99_ms:.0f} ms ({one.base_p99_ms:.0f} ms)",
        ),
        row(
            "coordinator without requests, part of a core",
            served,
            lambda one: f"{one.idle_processor:.3f}",
            "0.05 for 1,000",
        ),
        row(
            "a beat, where many come together",
            served,
            lambda one: f"{one.beat_us:.0f} us" if one.beat_us else "",
            "20 us",
        ),
        row("the only coordinator killed: until the next one serves", restarts, lambda one: f"{one.serves_s:.1f} s"),
        row("until it has all instances", restarts, lambda one: f"{one.joined_s:.1f} s"),
        row("all instances replaced under load, 50 at a time", rolls, lambda one: f"{one.seconds:.1f} s"),
        row("requests lost meanwhile", rolls, lambda one: f"{one.failed} of {one.requests}", "0"),
        row("a tenth killed at once: until it is noticed", deaths, lambda one: f"{one.seconds:.1f} s"),
        row("requests lost by it", deaths, lambda one: f"{one.failed} of {one.requests}", "0"),
    ]
    links = [["a link, at", "memory", "target", "descriptors", "target"]]
    links += [[one.end, _kib(one.nbytes), "64 KiB", f"{one.descriptors:.0f}", "3"] for one in figures.link_memory]
    beside = [["coordinators side by side", "processor time of a request", "load of the worst instance"]]
    beside += [
        [str(one.coordinators), f"{one.processor_us / 1000:.2f} ms", f"{one.worst:.2f}"] for one in figures.side_by_side
    ]
    first = [["the first message on a new link", "round trips more", "target"]]
    for one in figures.first_messages:
        way = "by a coordinator" if one.detour else "by its own connection alone"
        kind = "CURVE" if one.curve else "plain TCP"
        first.append([f"{kind}, {way}", f"{one.round_trips:g}", "2" if one.detour else ""])
    idle = [
        line
        for one in figures.streams
        for line in (
            [f"{one.streams:,} idle streams", "", "target"],
            ["memory of a stream", _kib(one.bytes_per_stream), "100 KiB"],
            [
                "first byte of the next request",
                f"{one.first_byte_idle_ms:.1f} ms; without idle streams {one.first_byte_ms:.1f} ms",
                f"{FIRST_BYTE:g} times that",
            ],
            *(
                [
                    [
                        "the same, 99 %",
                        f"{one.first_byte_idle_p99_ms:.1f} ms; without idle streams {one.first_byte_p99_ms:.1f} ms",
                        "",
                    ]
                ]
                if one.first_byte_p99_ms
                else []
            ),
            ["processor", f"{one.idle_processor:.2f} of a core", ""],
            [
                "memory of a client that does not read",
                f"{_mib(one.bytes_per_slow_reader)}, of at most {_mib(one.slow_reader_bound)}",
                "its own buffer only",
            ],
        )
    ]
    return "\n".join(_table(rows) for rows in (fleets, links, beside, first, idle) if len(rows) > 1)


def statements(figures: Figures) -> list[str]:
    """Parts of sentences of the page with figures of the benchmark. A test finds each of them there."""
    joined = {one.instances: one for one in figures.joined if one.coordinators == 1}
    served = {one.instances: one for one in figures.served}
    rolls = {one.instances: one for one in figures.changed if one.what == "roll"}
    deaths = {one.instances: one for one in figures.changed if one.what != "roll"}
    peers = [one.coordinator_bytes_per_peer for size, one in joined.items() if size >= 100]
    beats_us = [one.beat_us for one in figures.served]
    costs = [one.cost for one in figures.served]
    simulated = [one.worst for one in figures.simulated]
    one, two, four = figures.side_by_side
    more = [100 * (some.processor_us / one.processor_us - 1) for some in (two, four)]
    per_s = 10_000 / beats.interval_s(10_000)
    (held,) = figures.streams
    used = joined[3000].coordinator_bytes_per_peer + LINK_USED
    return [
        f"{min(beats_us):.0f} to {max(beats_us):.0f} us in the table",
        f"{1000 / beats.interval_s(1000):.0f} a second with 1,000 instances",
        f"A request costs {min(costs):.2f} to {max(costs):.2f} of what it costs with ten instances",
        f"{100 * served[1000].idle_processor:.1f} % in the table",
        f"instance: {_kib(min(peers)).split()[0]} to {_kib(max(peers))}, in both directions; 50 KiB more once 500 "
        f"messages have gone by either | 3,000 instances: {used * 3000 / (1 << 20):.0f} MiB",
        f"idle stream: {_kib(held.bytes_per_stream)} | 10,000 streams: "
        f"{held.bytes_per_stream * 10_000 / (1 << 20):.0f} MiB",
        f"{_mib(held.bytes_per_slow_reader)} measured, of at most {_mib(held.slow_reader_bound)}",
        f"{one.processor_us / 1000:.2f}, {two.processor_us / 1000:.2f} and {four.processor_us / 1000:.2f} ms with 40 "
        f"requests a second at each: {more[0]:+.0f} % and {more[1]:+.0f} % with two and four",
        f"differ by a factor of ten: {min(simulated):.2f} to {max(simulated):.2f}",
        f"over real sockets: {four.worst:.2f}; with one and two coordinators {one.worst:.2f} and {two.worst:.2f}",
        f"{used * 10_000 / (1 << 20):,.0f} MiB and 30,000 descriptors for links; "
        f"beats, one in {beats.interval_s(10_000):.0f} s from each, {per_s * max(beats_us) / 1e6:.2f} of a core",
        f"50 at a time, took {rolls[1000].seconds:.0f} s of the control plane",
        f"noticed within {deaths[1000].seconds:.1f} s, in a fleet of 3,000 within {deaths[3000].seconds:.1f} s",
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    return "".join(_line(row) for row in (head, ["---"] * len(head), *others))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") + "\n"


def _kib(nbytes: float) -> str:
    return f"{nbytes / 1024:.0f} KiB"


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


def write() -> None:
    PAGE.write_text(page())
