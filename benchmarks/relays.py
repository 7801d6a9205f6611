"""How long a payload takes from `put` to the receiver's buffer, per relay and size, beside memcpy and raw TCP.

    python -m benchmarks.relays [--relay NAME …] [--sizes 4096,1048576] [--rounds 9] [--json FILE]
    python -m benchmarks.relays --hops          # a hop between two stages by each relay, from end to end
    python -m benchmarks.relays --idle 10       # cores that each relay's two processes use while nothing is sent
    python -m benchmarks.relays --soak 600      # payloads of random sizes by all relays; exit code 1: something leaks

Two processes on one machine; all methods take turns within every round, so what disturbs one disturbs all. Times are
one way, medians; a relay's include the message that announces the transfer (a Unix socket). Processor time is that of
both processes until the release, with what their other threads use meanwhile. A relay is given an array, which it has
to copy, and "in place" an output that was allocated in the arena (`StageContext.allocate`). Compare ratios: absolute
times say more about the machine. Shared memory is mapped, not copied, so the receiver's first look is not in it.
"memcpy, announced" is its limit: a copy into an anonymous file, and the message that the other process answers. nixl
moves by TCP, as between pods, where a machine has no RDMA device; tcp without CURVE, unless --curve is given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import mmap
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
import uvloop

from benchmarks.hoplab import relay_hops
from stage_runtime.payloads import encoding
from stage_runtime.relays.base import Peer
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.registry import RELAYS
from stage_runtime.sockets.endpoints.addresses import CurveSecurity

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
MOST_OF_A_HOP = 64 << 20  # an echo pipeline's answer is kept whole, with a bound of 256 MiB
SMALL_NBYTES = 4 << 20  # up to here a round takes many samples
SAMPLES = 30
WARM_UP = 3
MOST_SOAKED = 16 << 20
SPARE_MIB = 64  # that the allocator and the page cache of an arena may vary by
SPARE_COUNT = 4  # descriptors, and threads, that are opened once when something first takes long


class Control:
    """Length-prefixed MessagePack over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: Any) -> None:
        body = msgspec.msgpack.encode(message)
        self.sock.sendall(len(body).to_bytes(4, "big") + body)

    def receive(self) -> Any:
        return msgspec.msgpack.decode(self._exactly(int.from_bytes(self._exactly(4), "big")))

    def _exactly(self, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            piece = self.sock.recv(nbytes - len(found))
            if not piece:
                raise EOFError("the other end is gone")
            found += piece
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the medians and ratios to this file")
    parser.add_argument("--relay", action="append", choices=list(RELAYS), help="only these")
    parser.add_argument("--hops", action="store_true", help="measure hops of pipelines instead")
    parser.add_argument(
        "--idle", type=float, metavar="SECONDS", help="measure idle processes instead, each relay alone"
    )
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="look for leaks instead")
    parser.add_argument("--far", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--curve", action="store_true", help="tcp encrypts")
    options = parser.parse_args()
    security = CurveSecurity(b"k" * 32) if options.curve else None
    names = options.relay or [name for name, entry in RELAYS.items() if entry.needs != "gpu"]
    if options.far is not None:
        uvloop.run(far(Control(socket.socket(fileno=options.far)), names, security))
        return
    if options.hops:
        hops = uvloop.run(
            relay_hops.hops(names, [size for size in options.sizes if 0 < size <= MOST_OF_A_HOP], options.rounds)
        )
        print(relay_hops.report(hops))
        if options.json:
            Path(options.json).write_text(json.dumps(hops, indent=1))
        return
    if options.idle is not None:
        for name in names:
            with far_process([name], curve=options.curve) as (control, _):
                used = idle(met(control, [name], security), control, name, options.idle)
                print(f"{name:>12}  {'  '.join(f'{100 * part:.2f} %' for part in used)}")
        return
    with far_process(names, curve=options.curve) as (control, child):
        if options.soak is not None:
            sys.exit(soak(met(control, names, security), control, names, options.soak, (os.getpid(), child)))
        found = measure(met(control, names, security), control, names, options.sizes, options.rounds)
    print(report(found))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures(found), file, indent=1)


@contextlib.contextmanager
def far_process(names: Sequence[str], *, curve: bool) -> Iterator[tuple[Control, int]]:
    """The other process, and its id."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.relays", "--far", str(theirs.fileno())]
    command += [argument for name in names for argument in ("--relay", name)]
    command += ["--curve"] if curve else []
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ)
    theirs.close()
    try:
        yield Control(ours), child.pid
    finally:
        ours.close()
        child.wait(30)


def met(control: Control, names: Sequence[str], security: CurveSecurity | None) -> Relays:
    """The relays of this process, which the other one has opened."""
    loop = uvloop.new_event_loop()  # never runs: what is sent needs none
    settings = RelaySettings(named=frozenset(names))
    relays = Relays(
        loop=loop, incarnation="near", on_release=lambda peer, transfer: None, settings=settings, security=security
    )
    control.send({"facts": relays.facts()})
    relays.open("far", control.receive())
    return relays


class Sample(NamedTuple):
    """Seconds of one payload. apart: processor time that does not count."""

    wall: float
    apart: float = 0.0


Once: TypeAlias = Callable[[int, np.ndarray[Any, Any]], Sample]


class Took(NamedTuple):
    """Seconds for one payload."""

    wall: float
    processor: float  #: Processor time of both processes.


def measure(
    relays: Relays, control: Control, names: Sequence[str], sizes: list[int], rounds: int
) -> dict[str, dict[int, Took]]:
    """Medians: method -> size -> time."""
    raw = raw_tcp(control)
    methods: dict[str, Once] = {
        "memcpy": Memcpy().once,
        "memcpy, announced": SharedMemcpy(control).once,
        "raw tcp": lambda size, source: send_raw(control, raw, source),
    }
    for name in names:
        methods[name] = relay_once(control, relays, name)
        methods[f"{name}, in place"] = relay_once(control, relays, name, in_place=True)
    found: dict[str, dict[int, Took]] = {name: {} for name in methods}
    for size in sizes:
        source = np.random.default_rng(0).integers(0, 255, size, np.uint8)
        times: dict[str, list[float]] = {name: [] for name in methods}
        used: dict[str, list[float]] = {name: [] for name in methods}
        for turn in range(WARM_UP + rounds):
            for name, once in methods.items():
                before = sum(processor_s(control))
                samples = [once(size, source) for _ in range(SAMPLES if size <= SMALL_NBYTES else 1)]
                after = sum(processor_s(control))
                if turn >= WARM_UP:
                    times[name].extend(sample.wall for sample in samples)
                    used[name].append((after - before - sum(sample.apart for sample in samples)) / len(samples))
        for name in methods:
            found[name][size] = Took(statistics.median(times[name]), statistics.median(used[name]))
    raw.close()
    relays.close()
    return found


def processor_s(control: Control) -> tuple[float, float]:
    """Used so far by this process and the other one."""
    control.send({"processor": None})
    theirs: float = control.receive()
    return time.process_time(), theirs


def idle(relays: Relays, control: Control, name: str, seconds: float) -> tuple[float, float]:
    """Cores that a sender and a receiver use, after one payload, while nothing is sent."""
    relay_once(control, relays, name)(1 << 20, np.ones(1 << 20, np.uint8))
    before = processor_s(control)
    time.sleep(seconds)
    after = processor_s(control)
    relays.close()
    return (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds


class Held(NamedTuple):
    """The holdings of a process."""

    resident_mib: int
    descriptors: int
    threads: int


def held(pid: int) -> Held:
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
    return Held(resident, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))


def soak(relays: Relays, control: Control, names: Sequence[str], seconds: float, pids: Sequence[int]) -> int:
    """1 when the last third holds more than the one before."""
    each_once = [relay_once(control, relays, name, in_place=lies) for name in names for lies in (False, True)]
    source = np.random.default_rng(0).integers(0, 255, MOST_SOAKED, np.uint8)
    chance = random.Random(0)
    begun, count, thirds = time.monotonic(), 0, [[Held(0, 0, 0)] * len(pids) for _ in range(3)]
    while (past := time.monotonic() - begun) < seconds:
        for once in each_once:
            size = int(2 ** chance.uniform(0, math.log2(MOST_SOAKED)))
            once(size, source[:size])
            count += 1
        third = thirds[int(3 * past / seconds)]
        for index, pid in enumerate(pids):
            third[index] = Held(*map(max, third[index], held(pid)))
    until = time.monotonic() + 1.0  # what libzmq has sent it lets go of in a thread of its own
    while (in_use := relays.stats()["arena_bytes_in_use"]) and time.monotonic() < until:
        time.sleep(0.01)
    relays.close()
    print(f"{count} payloads; arena in use: {in_use} bytes")
    for index, third in enumerate(thirds):
        print(f"third {index + 1}:", "  ".join(str(one) for one in third))
    leaks = any(
        late.resident_mib > mid.resident_mib + SPARE_MIB
        or late.descriptors > mid.descriptors + SPARE_COUNT
        or late.threads > mid.threads + SPARE_COUNT
        for mid, late in zip(*thirds[1:], strict=True)
    )
    return int(leaks or in_use > 0)


class Memcpy:
    """A copy into memory that was written before."""

    def __init__(self) -> None:
        self._target = np.zeros(0, np.uint8)

    def once(self, size: int, source: np.ndarray[Any, Any]) -> Sample:
        if len(self._target) != size:
            self._target = np.ones(size, np.uint8)
        begun = time.perf_counter()
        self._target[:] = source
        return Sample(time.perf_counter() - begun)


class SharedMemcpy:
    """A copy into an anonymous file that was written before, half a page beside its source, and a message that the
    other process answers: what no relay by shared memory can do without.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._target = np.zeros(0, np.uint8)

    def once(self, size: int, source: np.ndarray[Any, Any]) -> Sample:
        if len(self._target) != size:
            self._target = _shared(size, beside=source)
        begun = time.monotonic_ns()
        self._target[:] = source
        self._control.send({"announced": None})
        arrived: int = self._control.receive()
        return Sample((arrived - begun) / 1e9)


def _shared(size: int, *, beside: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
    os.ftruncate(fd, size + mmap.PAGESIZE)
    mapping = mmap.mmap(fd, size + mmap.PAGESIZE)
    os.close(fd)
    target: np.ndarray[Any, Any] = np.frombuffer(mapping, np.uint8)
    target[:] = 1
    shift = (beside.ctypes.data + mmap.PAGESIZE // 2) % mmap.PAGESIZE
    return target[shift : shift + size]


def relay_once(control: Control, relays: Relays, backend: str, *, in_place: bool = False) -> Once:
    def once(size: int, source: np.ndarray[Any, Any]) -> Sample:
        apart = 0.0
        value: Any = source
        if in_place:
            before = time.thread_time()
            value = relays.allocate((size,), torch.uint8)
            value.numpy()[:] = source
            apart = time.thread_time() - before
        extracted = encoding.extract({"a": value})
        begun = time.monotonic_ns()
        operation = relays.put(extracted, request_id="r", peer="far", backend=backend, early=True)
        assert operation is not None
        control.send({"get": operation.metadata})
        operation.fill()
        del value, extracted
        relays.settle()
        arrived: int = control.receive()
        released: int = control.receive()
        relays.released("far", released)
        return Sample((arrived - begun) / 1e9, apart)

    return once


def raw_tcp(control: Control) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    control.send({"raw": listener.getsockname()[1]})
    connection, _ = listener.accept()
    listener.close()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send_raw(control: Control, connection: socket.socket, source: np.ndarray[Any, Any]) -> Sample:
    control.send({"receive": len(source)})
    control.receive()  # it waits for the bytes now
    begun = time.monotonic_ns()
    connection.sendall(source.data)
    arrived: int = control.receive()
    return Sample((arrived - begun) / 1e9)


async def far(control: Control, names: Sequence[str], security: CurveSecurity | None) -> None:
    """The other process: obeys commands, and sends the time at which each was done (the machine's monotonic clock)."""
    loop = asyncio.get_running_loop()
    settings = RelaySettings(named=frozenset(names))
    relays = Relays(
        loop=loop,
        incarnation="far",
        on_release=lambda peer, transfer: control.send(transfer),
        settings=settings,
        security=security,
    )
    over, tasks = asyncio.Event(), set()
    connection: socket.socket | None = None
    target = np.zeros(0, np.uint8)

    async def fetch(metadata: bytes) -> None:
        operation = relays.get(metadata, request_id="r", peer=Peer("near"))
        buffer = await operation.wait_for_completion(60)
        control.send(time.monotonic_ns())
        del buffer
        relays.release_now()  # a small one's release would wait for others, 10 ms in which this process sleeps

    def handle_command() -> None:
        nonlocal connection, target
        try:
            match control.receive():
                case {"facts": facts}:
                    relays.open("near", facts)
                    control.send(relays.facts())
                case {"processor": _}:
                    control.send(time.process_time())
                case {"get": metadata}:
                    task = loop.create_task(fetch(metadata))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                case {"announced": _}:
                    control.send(time.monotonic_ns())
                case {"raw": port}:
                    connection = socket.create_connection(("127.0.0.1", port))
                case {"receive": nbytes}:
                    assert connection is not None
                    if len(target) != nbytes:
                        target = np.ones(nbytes, np.uint8)
                    control.send(None)
                    connection.recv_into(target.data, nbytes, socket.MSG_WAITALL)
                    control.send(time.monotonic_ns())
        except (EOFError, ConnectionError):
            over.set()

    loop.add_reader(control.sock, handle_command)
    await over.wait()
    loop.remove_reader(control.sock)
    relays.close()


def figures(found: dict[str, dict[int, Took]]) -> dict[str, dict[int, dict[str, float]]]:
    """Method -> bytes -> microseconds, how many times memcpy's and raw TCP's, microseconds of processor time."""
    copy, raw = found["memcpy"], found["raw tcp"]
    return {
        name: {
            size: {
                "us": round(took.wall * 1e6, 1),
                "x_memcpy": round(took.wall / copy[size].wall, 2),
                "x_tcp": round(took.wall / raw[size].wall, 2),
                "cpu_us": round(took.processor * 1e6, 1),
            }
            for size, took in times.items()
        }
        for name, times in found.items()
    }


def report(found: dict[str, dict[int, Took]]) -> str:
    """A table: milliseconds, against memcpy and raw TCP, and milliseconds of processor time."""
    lines = [f"{'bytes':>12}  {'':20} {'ms':>9} {'/memcpy':>8} {'/raw tcp':>9} {'cpu ms':>9}"]
    for size, copy in found["memcpy"].items():
        raw = found["raw tcp"][size]
        for name, times in found.items():
            took = times[size]
            line = f"{size:>12,}  {name:20} {took.wall * 1e3:>9.3f} {took.wall / copy.wall:>8.2f}"
            lines.append(f"{line} {took.wall / raw.wall:>9.2f} {took.processor * 1e3:>9.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
