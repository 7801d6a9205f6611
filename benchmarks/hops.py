"""The cost of a hop: echo pipelines beside a bare prototype of the same design, measured in turns in one run.

    python -m benchmarks.hops [--quick] [--curve] [--json FILE]

A visit is a request's stay at one stage: its payload received, a function that returns it, the result sent on. Its
processor time is user and system time of the stages' processes over all their visits; beside wall time it hardly
depends on who else uses the machine. Waits are voluntary context switches: how often a thread went to sleep and had to
be woken. A hop's wall time is (time of 4 stages - time of 1) / 3. `hoplab.prototype` is the limit: the same path with
nothing around it. Ratios are medians over interleaved rounds.

Answers per second of 2 stages with 64 requests under way, at the request manager and over HTTP. Then,
unless --quick: hops beside memcpy, raw TCP and one ZeroMQ message, and what CURVE costs (alone with --curve), on
hops whose tensors go by the tcp relay as between two pods.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.hoplab import client, prototype
from benchmarks.hoplab.limits import memcpy_us, raw_tcp_us, zmq_one_way_us
from benchmarks.hoplab.measuring import Visits, rate, visits
from benchmarks.hoplab.pipelines import Running, pipeline, running, tensor
from stage_runtime.processes import collecting
from stage_runtime.rules.members import introductions
from stage_runtime.web.app import make_app
from stage_runtime.web.listening.server import Server
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool

SIZES = {"nothing": 0, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
RATE_SIZES = {"nothing": 0, "4 KiB": 4 << 10, "20 KiB": 20 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20}
CONCURRENCY = 64

Once = Callable[[], Awaitable[None]]


class Side(msgspec.Struct):
    """One of the two that are compared: how to ask it, by number of stages, and the processes of its stages."""

    once: dict[int, Callable[[Any], Awaitable[None]]]
    pids: dict[int, list[int]]

    def ask(self, stages: int, inputs: Any) -> Once:
        return lambda: self.once[stages](inputs)


async def ours(stack: contextlib.AsyncExitStack) -> tuple[Side, dict[int, Running]]:
    started = {
        stages: await stack.enter_async_context(running(pipeline(stages, processes=stages), tcp=True, curve=False))
        for stages in (1, 2, 4)
    }
    side = Side({stages: one.once for stages, one in started.items()}, {k: one.pids for k, one in started.items()})
    return side, started


async def bare(stack: contextlib.AsyncExitStack) -> Side:
    started = {stages: await stack.enter_async_context(prototype.Pipeline(stages).running()) for stages in (1, 2, 4)}
    return Side({stages: one.once for stages, one in started.items()}, {k: one.pids for k, one in started.items()})


async def introduced(both: tuple[Side, Side]) -> None:
    """Waits until requests no longer carry the addresses of their pipeline's stages, as they do at first."""
    for side in both:
        for once in side.once.values():
            await once(None)
    await asyncio.sleep(introductions.FRESH_S)


def bare_tensor(nbytes: int) -> prototype.Tensor | None:
    return prototype.Tensor((nbytes,), "uint8", bytes(nbytes)) if nbytes else None


async def visited(both: tuple[Side, Side], *, rounds: int, requests: int) -> dict[str, Any]:
    """Both sides' visits for every size. requests: in all, of each side."""
    found: dict[str, Any] = {}
    print(f"{'a visit of':>10} | {'processor time':>28} | {'waits':>17} | {'hop, wall time':>28}")
    three, two = f"{'ours':>9} {'bare':>9} {'ratio':>8}", f"{'ours':>8} {'bare':>8}"
    print(f"{'a stage':>10} | {three} | {two} | {three}")
    for label, nbytes in SIZES.items():
        inputs = (tensor(nbytes), bare_tensor(nbytes))
        samples: list[tuple[list[Visits], list[float]]] = []
        for number in range(rounds + 1):
            fours, hops = [], []
            for side, given in zip(both, inputs, strict=True):
                four = await visits(side.ask(4, given), side.pids[4], requests // rounds)
                one = await visits(side.ask(1, given), side.pids[1], max(10, requests // rounds // 2))
                fours.append(four)
                hops.append((four.wall_us - one.wall_us) / 3)
            if number:  # the first one warms up
                samples.append((fours, hops))
        row: dict[str, Any] = {
            "cpu_us": [_median(fours[side].cpu_us for fours, _ in samples) for side in (0, 1)],
            "cpu_ratio": _median(fours[0].cpu_us / fours[1].cpu_us for fours, _ in samples),
            "waits": [_median(fours[side].waits for fours, _ in samples) for side in (0, 1)],
            "hop_us": [_median(hops[side] for _, hops in samples) for side in (0, 1)],
        }
        hop_ratio = row["hop_us"][0] / row["hop_us"][1]
        found[label] = {**row, "hop_ratio": hop_ratio}
        print(
            f"{label:>10} | {row['cpu_us'][0]:7.0f}us {row['cpu_us'][1]:7.0f}us {row['cpu_ratio']:7.2f}x |"
            f" {row['waits'][0]:8.1f} {row['waits'][1]:8.1f} |"
            f" {row['hop_us'][0]:7.0f}us {row['hop_us'][1]:7.0f}us {hop_ratio:7.2f}x",
            flush=True,
        )
    return found


async def rates(both: tuple[Side, Side], two: Running, *, rounds: int, total: int) -> dict[str, Any]:
    """Answers per second of 2 stages, as parts of the rate with nothing; and over HTTP, of the rate at the manager."""
    samples: dict[str, list[list[float]]] = {label: [] for label in RATE_SIZES}
    for number in range(rounds + 1):
        for label, nbytes in RATE_SIZES.items():
            count = total // (4 if nbytes > 1 << 18 else 1)
            given = (tensor(nbytes), bare_tensor(nbytes))
            row = [await rate(side.ask(2, one), CONCURRENCY, count) for side, one in zip(both, given, strict=True)]
            if number:
                samples[label].append(row)
    print(f"\n2 stages, {CONCURRENCY} requests under way, at the request manager")
    print(f"{'':>10} | {'ours':>9} {'of nothing':>10} | {'bare':>9} {'of nothing':>10} | {'ours / bare':>11}")
    found: dict[str, Any] = {}
    for label, rows in samples.items():
        mine, theirs = (_median(row[side] for row in rows) for side in (0, 1))
        parts = [
            _median(row[side] / nothing[side] for row, nothing in zip(rows, samples["nothing"], strict=True))
            for side in (0, 1)
        ]
        found[label] = {"per_s": [mine, theirs], "of_nothing": parts, "ratio": mine / theirs}
        print(
            f"{label:>10} | {mine:7.0f}/s {parts[0]:9.2f}x | {theirs:7.0f}/s {parts[1]:9.2f}x | {mine / theirs:10.2f}x"
        )
    found["http"] = await http(two, rounds=rounds, total=total)
    return found


async def http(two: Running, *, rounds: int, total: int) -> dict[str, Any]:
    """The same request over HTTP, by a client in a process of its own, and at the request manager."""
    settings = WebSettings(model="hops")
    inputs = {"text": "x" * 64}
    samples = []
    async with Server(make_app(two.manager, settings, codecs=CodecPool()), port=0, drain_s=0) as server:
        for number in range(rounds + 1):
            began = time.process_time()
            manager = await rate(lambda: two.once(inputs), CONCURRENCY, total)
            at_manager = (time.process_time() - began) / total
            began = time.process_time()
            over = await _asked(f"{server.url}/v1/pipeline", msgspec.json.encode({"inputs": inputs}), total)
            over_http = (time.process_time() - began) / total
            if number:
                samples.append((over, manager, over_http * 1e6, at_manager * 1e6))
    over, manager, http_us, manager_us = (_median(row[k] for row in samples) for k in range(4))
    ratio = _median(row[0] / row[1] for row in samples)
    print(f"over HTTP: {over:.0f}/s, {ratio:.2f}x of {manager:.0f}/s at the manager; processor time of the coordinator")
    print(f"for an answer: {http_us:.0f}us over HTTP, {manager_us:.0f}us at the manager with who asks")
    return {"per_s": over, "of_manager": ratio, "cpu_us": http_us, "manager_cpu_us": manager_us}


async def _asked(url: str, body: bytes, total: int) -> float:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        client.__file__,
        url,
        str(CONCURRENCY),
        str(total),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    printed, _ = await child.communicate(body)
    return float(printed)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


async def curve(rounds: int) -> dict[str, dict[str, float]]:
    """The same hop with CURVE on every socket and without, in turns."""
    found = {}
    async with contextlib.AsyncExitStack() as stack:
        both: dict[bool, dict[int, Running]] = {False: {}, True: {}}
        for secured, stages in ((secured, stages) for secured in both for stages in (1, 4)):
            plan = pipeline(stages, processes=stages, relay="tcp")
            both[secured][stages] = await stack.enter_async_context(running(plan, tcp=True, curve=secured))
        print("{:>8} | {:>10} {:>10} {:>7}".format("tcp hop", "plain", "CURVE", "x plain"))
        for label, nbytes in SIZES.items():
            inputs, count = tensor(nbytes), max(10, rounds // (8 if nbytes > 1 << 20 else 1))
            hops: dict[bool, list[float]] = {False: [], True: []}
            for warming in (True, *[False] * 5):
                for secured, one in both.items():
                    times = [await one[stages].latency_us(inputs, 5 if warming else count) for stages in (1, 4)]
                    if not warming:
                        hops[secured].append((times[1] - times[0]) / 3)
            plain, dear = (statistics.median(hops[secured]) for secured in both)
            found[label] = {"plain_us": plain, "curve_us": dear}
            print(f"{label:>8} | {plain:8.1f}us {dear:8.1f}us {dear / plain:6.2f}x")
    return found


async def main(arguments: argparse.Namespace) -> None:
    figures: dict[str, object] = {}
    if not arguments.curve:
        rounds, requests, total = (5, 500, 1000) if arguments.quick else (9, 1800, 6000)
        async with contextlib.AsyncExitStack() as stack:
            side, apart = await ours(stack)
            both = (side, await bare(stack))
            collecting.settle()  # as a coordinator's process does
            await introduced(both)
            figures["visits"] = await visited(both, rounds=rounds, requests=requests)
            figures["rates"] = await rates(both, apart[2], rounds=3 if arguments.quick else 5, total=total)
            if not arguments.quick:
                figures["limits"] = await limits(stack, apart)
    if arguments.curve or not arguments.quick:
        figures["curve"] = await curve(200)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))


async def limits(stack: contextlib.AsyncExitStack, apart: dict[int, Running]) -> dict[str, Any]:
    """Hops within a process and between processes beside memcpy, raw TCP and one ZeroMQ message."""
    found: dict[str, Any] = {}
    together = {
        stages: await stack.enter_async_context(running(pipeline(stages, processes=1), tcp=True, curve=False))
        for stages in (1, 4)
    }
    found["zmq_one_way_us"] = await zmq_one_way_us()
    print(f"\none ZeroMQ message, one way, one thread hand-off: {found['zmq_one_way_us']:.0f}us")
    head = ("size", "memcpy", "raw tcp", "hop apart", "x memcpy", "x tcp", "hop inside")
    print("{:>8} {:>9} {:>9} | {:>10} {:>9} {:>7} | {:>10}".format(*head))
    for label, nbytes in SIZES.items():
        inputs = tensor(nbytes)
        count = 25 if nbytes > 1 << 20 else 200
        for one in (*apart.values(), *together.values()):
            await one.latency_us(inputs, 5)
        samples: list[tuple[float, ...]] = []
        for _ in range(5):  # interleaved: the machine's speed drifts
            samples.append(
                (
                    await apart[1].latency_us(inputs, count),
                    await apart[4].latency_us(inputs, count),
                    await together[1].latency_us(inputs, count),
                    await together[4].latency_us(inputs, count),
                    memcpy_us(nbytes),
                    raw_tcp_us(nbytes),
                )
            )
        hop = _median((row[1] - row[0]) / 3 for row in samples)
        inside = _median((row[3] - row[2]) / 3 for row in samples)
        copy = _median(row[4] for row in samples)
        tcp = _median(row[5] for row in samples)
        first = _median(row[0] for row in samples)
        found[label] = dict(hop_us=hop, inside_us=inside, memcpy_us=copy, tcp_us=tcp, one_stage_us=first)
        print(
            f"{label:>8} {copy:7.1f}us {tcp:7.1f}us | {hop:8.1f}us {hop / copy:8.1f}x {hop / tcp:6.1f}x |"
            f" {inside:8.1f}us   (1 stage: {first:.0f}us)"
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="visits and rates only, about a minute")
    parser.add_argument("--curve", action="store_true", help="only what CURVE costs")
    parser.add_argument("--json", help="write the figures there")
    uvloop.run(main(parser.parse_args()))
