"""What one hop costs: echo pipelines of 1, 2 and 4 stages, in one process and in several, driven at the desk.

    python -m benchmarks.hops [--quick] [--curve] [--json FILE]

hop = (time of 4 stages - time of 1) / 3, so that what the coordinator costs drops out. Every figure stands beside
limits measured in the same run: memcpy, a raw TCP one-way trip of the same size between two processes, and the bare
one-way trip of a small ZeroMQ message with one hand-off to a worker thread: what no hop over ZeroMQ can beat.

At the end, or alone with --curve: what CURVE costs, on hops whose tensors go by the tcp relay as between two pods.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path

import httpx
import msgspec
import uvloop

from benchmarks.hoplab.limits import memcpy_us, raw_tcp_us, zmq_one_way_us
from benchmarks.hoplab.pipelines import Running, pipeline, running, tensor
from stage_runtime.web.app import make_app
from stage_runtime.web.server import Server
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool

SIZES = {"0 B": 0, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}


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


async def http(apart: dict[int, Running], rounds: int) -> dict[str, float]:
    """The same hop once more, asked for by HTTP: what it adds drops out of the difference, and is shown beside it."""
    settings = WebSettings(model="hops")
    body = msgspec.json.encode({"inputs": {"data": "x" * 4096}})
    headers = {"content-type": "application/json"}
    medians: dict[int, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient())
        urls = {}
        for stages in (1, 4):
            server = Server(make_app(apart[stages].desk, settings, codecs=CodecPool()), port=0, drain_s=0)
            urls[stages] = (await stack.enter_async_context(server)).url + "/v1/pipeline"
        times: dict[int, list[float]] = {1: [], 4: []}
        for _ in range(rounds):
            for stages, url in urls.items():
                start = time.perf_counter()
                (await client.post(url, content=body, headers=headers)).raise_for_status()
                times[stages].append(time.perf_counter() - start)
        medians = {stages: statistics.median(found) * 1e6 for stages, found in times.items()}
    hop = (medians[4] - medians[1]) / 3
    print(f"through HTTP, 4 KiB: 1 stage {medians[1]:.0f}us, 4 stages {medians[4]:.0f}us, hop {hop:.1f}us")
    return {"one_stage_us": medians[1], "four_stages_us": medians[4], "hop_us": hop}


async def main(arguments: argparse.Namespace) -> None:
    rounds = 40 if arguments.quick else 200
    figures: dict[str, object] = {}
    if not arguments.curve:
        await hops(figures, rounds, quick=arguments.quick)
    figures["curve"] = await curve(rounds)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))


async def hops(figures: dict[str, object], rounds: int, *, quick: bool) -> None:
    """Hops within a process and between processes, the limits, HTTP and the rate."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(stages: int, processes: int) -> Running:
            plan = pipeline(stages, processes=processes)
            return await stack.enter_async_context(running(plan, tcp=True, curve=False))

        apart = {stages: await start(stages, stages) for stages in (1, 2, 4)}
        together = {stages: await start(stages, 1) for stages in (1, 4)}
        zmq_us = await zmq_one_way_us()
        figures["zmq_one_way_us"] = zmq_us
        print(f"one ZeroMQ message, one way, one thread hand-off: {zmq_us:.0f}us")
        head = ("size", "memcpy", "raw tcp", "hop apart", "x memcpy", "x tcp", "hop inside")
        print("{:>8} {:>9} {:>9} | {:>10} {:>9} {:>7} | {:>10}".format(*head))
        for label, nbytes in SIZES.items():
            inputs = tensor(nbytes)
            count = max(10, rounds // (8 if nbytes > 1 << 20 else 1))
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
            hop = statistics.median((row[1] - row[0]) / 3 for row in samples)
            inside = statistics.median((row[3] - row[2]) / 3 for row in samples)
            copy = statistics.median(row[4] for row in samples)
            tcp = statistics.median(row[5] for row in samples)
            first = statistics.median(row[0] for row in samples)
            figures[label] = dict(hop_us=hop, inside_us=inside, memcpy_us=copy, tcp_us=tcp, one_stage_us=first)
            print(
                f"{label:>8} {copy:7.1f}us {tcp:7.1f}us | {hop:8.1f}us {hop / copy:8.1f}x {hop / tcp:6.1f}x |"
                f" {inside:8.1f}us   (1 stage: {first:.0f}us)"
            )
        print(f"one ZeroMQ message again: {await zmq_one_way_us():.0f}us")
        figures["http"] = await http(apart, rounds)
        total = 2000 if quick else 20000
        inputs = {"data": "x" * 4096}
        for stages in (2, 4):
            await apart[stages].rate(inputs, 64, total // 4)
            rates = [await apart[stages].rate(inputs, 64, total) for _ in range(3)]
            figures[f"rate_{stages}"] = max(rates)
            median = statistics.median(rates)
            print(f"{stages} stages, 4 KiB, concurrency 64, at the desk: {median:,.0f} req/s (best {max(rates):,.0f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--curve", action="store_true", help="only what CURVE costs")
    parser.add_argument("--json", help="write the figures there")
    uvloop.run(main(parser.parse_args()))
