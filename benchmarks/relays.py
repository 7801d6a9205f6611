"""How long a payload takes from `put` to the receiver's buffer, per relay and size, beside memcpy and raw TCP.

    python benchmarks/relays.py [--sizes 4096,1048576] [--rounds 9] [--json FILE]

Two processes on one machine; all methods take turns within every round, so what disturbs one disturbs all. Times are
one way, medians; a relay's include the message that announces the transfer (a Unix socket). Compare ratios: absolute
times say more about the machine. Shared memory is mapped, not copied, so the receiver's first look is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import uvloop

from stage_runtime.payloads import encoding
from stage_runtime.relays.base import Peer
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.registry import RELAYS

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
ALL = RelaySettings(asked=frozenset(RELAYS))
SMALL_NBYTES = 4 << 20  # up to here a round takes many samples
SAMPLES = 30
WARM_UP = 3


class Control:
    """Length-prefixed MessagePack over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def say(self, message: Any) -> None:
        body = msgspec.msgpack.encode(message)
        self.sock.sendall(len(body).to_bytes(4, "big") + body)

    def hear(self) -> Any:
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
    parser.add_argument("--far", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.far is not None:
        uvloop.run(far(Control(socket.socket(fileno=options.far))))
        return
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, __file__, "--far", str(theirs.fileno())], pass_fds=[theirs.fileno()], env=os.environ
    )
    theirs.close()
    try:
        found = measure(Control(ours), options.sizes, options.rounds)
    finally:
        ours.close()
        child.wait(30)
    print(report(found))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures(found), file, indent=1)


def measure(control: Control, sizes: list[int], rounds: int) -> dict[str, dict[int, float]]:
    """Medians in seconds: method -> size -> time."""
    loop = uvloop.new_event_loop()  # never runs: what is sent needs none
    relays = Relays(loop=loop, incarnation="near", on_release=lambda peer, transfer: None, settings=ALL)
    raw = raw_tcp(control)
    control.say({"facts": relays.facts()})
    relays.open("far", control.hear())
    methods: dict[str, Callable[[int, np.ndarray[Any, Any]], float]] = {
        "memcpy": Memcpy().once,
        "raw tcp": lambda size, source: send_raw(control, raw, source),
        **{name: relay_once(control, relays, name) for name in RELAYS},
    }
    found: dict[str, dict[int, float]] = {name: {} for name in methods}
    for size in sizes:
        source = np.random.default_rng(0).integers(0, 255, size, np.uint8)
        times: dict[str, list[float]] = {name: [] for name in methods}
        for turn in range(WARM_UP + rounds):
            for name, once in methods.items():
                samples = [once(size, source) for _ in range(SAMPLES if size <= SMALL_NBYTES else 1)]
                if turn >= WARM_UP:
                    times[name].extend(samples)
        for name in methods:
            found[name][size] = statistics.median(times[name])
    raw.close()
    relays.close()
    return found


class Memcpy:
    """A copy into memory that was written before."""

    def __init__(self) -> None:
        self._target = np.zeros(0, np.uint8)

    def once(self, size: int, source: np.ndarray[Any, Any]) -> float:
        if len(self._target) != size:
            self._target = np.ones(size, np.uint8)
        begun = time.perf_counter()
        self._target[:] = source
        return time.perf_counter() - begun


def relay_once(control: Control, relays: Relays, backend: str) -> Callable[[int, np.ndarray[Any, Any]], float]:
    def once(size: int, source: np.ndarray[Any, Any]) -> float:
        extracted = encoding.extract({"a": source})
        begun = time.monotonic_ns()
        operation = relays.put(extracted, request_id="r", peer="far", backend=backend)
        assert operation is not None
        control.say({"get": operation.metadata})
        arrived: int = control.hear()
        released: int = control.hear()
        relays.released("far", released)
        return (arrived - begun) / 1e9

    return once


def raw_tcp(control: Control) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    control.say({"raw": listener.getsockname()[1]})
    connection, _ = listener.accept()
    listener.close()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send_raw(control: Control, connection: socket.socket, source: np.ndarray[Any, Any]) -> float:
    control.say({"receive": len(source)})
    control.hear()  # it waits for the bytes now
    begun = time.monotonic_ns()
    connection.sendall(source.data)
    arrived: int = control.hear()
    return (arrived - begun) / 1e9


async def far(control: Control) -> None:
    """The other process: does what it is told, says when it was done (the monotonic clock is the machine's)."""
    loop = asyncio.get_running_loop()
    relays = Relays(loop=loop, incarnation="far", on_release=lambda peer, transfer: control.say(transfer), settings=ALL)
    over, tasks = asyncio.Event(), set()
    connection: socket.socket | None = None
    target = np.zeros(0, np.uint8)

    async def fetch(metadata: bytes) -> None:
        operation = relays.get(metadata, request_id="r", peer=Peer("near"))
        buffer = await operation.wait_for_completion(60)
        control.say(time.monotonic_ns())
        del buffer

    def told() -> None:
        nonlocal connection, target
        try:
            match control.hear():
                case {"facts": facts}:
                    relays.open("near", facts)
                    control.say(relays.facts())
                case {"get": metadata}:
                    task = loop.create_task(fetch(metadata))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                case {"raw": port}:
                    connection = socket.create_connection(("127.0.0.1", port))
                case {"receive": nbytes}:
                    assert connection is not None
                    if len(target) != nbytes:
                        target = np.ones(nbytes, np.uint8)
                    control.say(None)
                    connection.recv_into(target.data, nbytes, socket.MSG_WAITALL)
                    control.say(time.monotonic_ns())
        except (EOFError, ConnectionError):
            over.set()

    loop.add_reader(control.sock, told)
    await over.wait()
    loop.remove_reader(control.sock)
    relays.close()


def figures(found: dict[str, dict[int, float]]) -> dict[str, dict[int, dict[str, float]]]:
    """Method -> bytes -> microseconds, and how many times memcpy's and raw TCP's."""
    copy, raw = found["memcpy"], found["raw tcp"]
    return {
        name: {
            size: {"us": took * 1e6, "x_memcpy": took / copy[size], "x_tcp": took / raw[size]}
            for size, took in times.items()
        }
        for name, times in found.items()
    }


def report(found: dict[str, dict[int, float]]) -> str:
    """A table: milliseconds, and each relay against memcpy and raw TCP."""
    relays = "".join(f"{name + ' ms':>12} {'/memcpy':>8} {'/raw tcp':>9}" for name in RELAYS)
    lines = [f"{'bytes':>12} {'memcpy ms':>10} {'raw tcp ms':>11}{relays}"]
    for size, copy in found["memcpy"].items():
        raw = found["raw tcp"][size]
        line = f"{size:>12,} {copy * 1e3:>10.3f} {raw * 1e3:>11.3f}"
        for name in RELAYS:
            took = found[name][size]
            line += f"{took * 1e3:>12.3f} {took / copy:>8.2f} {took / raw:>9.2f}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
