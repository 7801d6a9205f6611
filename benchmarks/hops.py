"""What one hop costs: echo pipelines of 1, 2 and 4 stages, in one process and in several, driven at the desk.

    python benchmarks/hops.py [--quick] [--curve] [--json FILE]

hop = (time of 4 stages - time of 1) / 3, so that what the coordinator costs drops out. Every figure stands beside
limits measured in the same run: memcpy, a raw TCP one-way trip of the same size between two processes, and the bare
one-way trip of a small ZeroMQ message with one hand-off to a worker thread: what no hop over ZeroMQ can beat.

At the end, or alone with --curve: what CURVE costs, on hops whose tensors go by the tcp relay as between two pods.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import httpx
import msgspec
import numpy as np
import uvloop
import zmq

from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.plan import PipelinePlan
from stage_runtime.coordinator.coordinator import Coordinator
from stage_runtime.relays.choosing import Relays
from stage_runtime.relays.context import RelaySettings
from stage_runtime.sockets.addresses import Security
from stage_runtime.sockets.channels import Channels
from stage_runtime.web.app import make_app
from stage_runtime.web.server import Server
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.wire.values import OmniRequest, RawTensor

SIZES = {"0 B": 0, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
ECHO = "def make():\n    def run(payload):\n        return payload.data\n    return run\n"


def pipeline(stages: int, *, processes: int, relay: Literal["auto", "tcp"] = "auto") -> PipelinePlan:
    """An echo pipeline of ``stages``, spread over ``processes``."""
    names = [f"s{index}" for index in range(stages)]
    config = PipelineConfig(
        relay_backend=relay,
        stages=[
            StageConfig(
                name=name,
                process=f"p{index % processes}",
                factory="hop_echo:make",
                next=names[index + 1] if index + 1 < stages else None,
                terminal=index + 1 == stages,
            )
            for index, name in enumerate(names)
        ],
    )
    return planning.plan(config, name=f"hops-{stages}-{processes}")


class Running:
    """A pipeline under way: its desk in this process, its stages in their own."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.desk = coordinator.desk

    async def once(self, inputs: object) -> None:
        ticket = self.desk.admit(OmniRequest(id=secrets.token_hex(8), inputs=inputs))
        async for _ in ticket.events():
            pass

    async def latency_us(self, inputs: object, rounds: int) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            await self.once(inputs)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    async def rate(self, inputs: object, concurrency: int, total: int) -> float:
        left = total

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self.once(inputs)

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return total / (time.perf_counter() - start)


@contextlib.asynccontextmanager
async def running(plan: PipelinePlan, *, tcp: bool, curve: bool) -> AsyncIterator[Running]:
    """Start ``plan``'s stage processes and a coordinator in this one; all are ready."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="hops") as folder:
        root = Path(folder)
        (root / "hop_echo.py").write_text(ECHO)
        key = secrets.token_bytes(32)
        (root / "key").write_bytes(key)
        security = Security(key) if curve else None
        incarnation = secrets.token_hex(8)
        coordinator = Coordinator(
            msgspec.structs.replace(plan.coordinator, max_in_flight=4096), incarnation=incarnation, loop=loop
        )
        channels = Channels(coordinator, incarnation=incarnation, loop=loop, security=security)
        relays = Relays(
            loop=loop,
            incarnation=incarnation,
            on_release=coordinator.release,
            security=security,
            settings=RelaySettings(bind="tcp://127.0.0.1:*" if tcp else f"ipc://{root}/c.data"),
        )
        publisher = channels.bind_publisher("tcp://127.0.0.1:*" if tcp else f"ipc://{root}/p.sock")
        endpoint = channels.bind("tcp://127.0.0.1:*" if tcp else f"ipc://{root}/c.sock")
        coordinator.wire(channels, relays, endpoint=endpoint, publisher=publisher, revisions=[plan.current])
        children = []
        for unit in plan.units:
            (root / f"{unit.name}.json").write_bytes(msgspec.json.encode(unit))
            for group in unit.groups:
                env = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
                    "OMNI_PLAN": str(root / f"{unit.name}.json"),
                    "OMNI_GROUP": group.name,
                    "OMNI_COORDINATOR": endpoint,
                    "OMNI_LISTEN": "tcp://127.0.0.1:*" if tcp else f"ipc://{root}/{group.name}.sock",
                    **({"OMNI_CONTROL_KEY_FILE": str(root / "key")} if curve else {}),
                }
                argv = [sys.executable, "-m", "stage_runtime", "stage", group.name]
                children.append(subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL))
        try:
            while not coordinator.roster.membership.complete():
                await asyncio.sleep(0.05)
                dead = [child.args for child in children if child.poll() is not None]
                if dead:
                    raise SystemExit(f"a stage process died: {dead}")
            yield Running(coordinator)
        finally:
            for child in children:
                child.terminate()
            await asyncio.gather(*(asyncio.to_thread(child.wait) for child in children))
            coordinator.desk.close()
            relays.close()
            channels.close()


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


def memcpy_us(nbytes: int, rounds: int = 30) -> float:
    source = np.ones(max(nbytes, 1), np.uint8)
    target = np.ones_like(source)
    return _median_us(lambda: np.copyto(target, source), rounds)


TCP_PEER = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
n = int(sys.argv[2]); buffer = memoryview(bytearray(n))
while True:
    got = 0
    while got < n:
        k = s.recv_into(buffer[got:])
        if not k: sys.exit()
        got += k
    s.sendall(b"k")
"""


def raw_tcp_us(nbytes: int, rounds: int = 30) -> float:
    """One way: the message there and one byte back, less half of a one-byte round trip."""
    there_and_one_back = _tcp_round_us(max(nbytes, 1), rounds)
    return there_and_one_back - _tcp_round_us(1, rounds) / 2


def _tcp_round_us(nbytes: int, rounds: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        child = subprocess.Popen([sys.executable, "-c", TCP_PEER, str(port), str(nbytes)])
        connection, _ = server.accept()
    data = bytes(nbytes)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def trip() -> None:
            connection.sendall(data)
            connection.recv(1)

        figure = _median_us(trip, rounds)
    child.wait()
    return figure


ZMQ_PEER = """
import asyncio, queue, sys, threading, uvloop, zmq
async def main():
    context, work = zmq.Context(), queue.SimpleQueue()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.connect(sys.argv[1]); push.connect(sys.argv[2])
    threading.Thread(target=lambda: [push.send(data) for data in iter(work.get, b"")], daemon=True).start()
    def drain():
        try:
            while True: work.put(pull.recv(zmq.NOBLOCK))
        except zmq.Again: pass
    asyncio.get_running_loop().add_reader(pull.getsockopt(zmq.FD), drain); drain()
    await asyncio.sleep(3600)
uvloop.run(main())
"""


async def zmq_one_way_us(rounds: int = 2000) -> float:
    """Half a round trip of 300 bytes: descriptors drained on uvloop, one hand-off to a thread at the far end."""
    loop = asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (push, pull)]
    peer = [sys.executable, "-c", ZMQ_PEER, *(f"tcp://127.0.0.1:{port}" for port in ports)]
    child = subprocess.Popen(peer)
    back = asyncio.Event()

    def drain() -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                pull.recv(zmq.NOBLOCK)
                back.set()

    descriptor = int(pull.getsockopt(zmq.FD))
    loop.add_reader(descriptor, drain)
    times = []
    for _ in range(rounds):
        back.clear()
        start = time.perf_counter()
        push.send(b"x" * 300)
        drain()
        await back.wait()
        times.append(time.perf_counter() - start)
    loop.remove_reader(descriptor)
    child.kill()
    child.wait()
    context.destroy(linger=0)
    return statistics.median(times) * 1e6 / 2


def _median_us(call: object, rounds: int) -> float:
    assert callable(call)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def tensor(nbytes: int) -> object:
    return None if nbytes == 0 else RawTensor("uint8", (nbytes,), bytes(nbytes))


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
