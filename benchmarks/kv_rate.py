"""Bytes a second of KV blocks from one process's cache into another's, over each relay, beside raw TCP and memcpy:
`python -m benchmarks.kv_rate [--relays shm tcp nixl mooncake] [--rounds N]`. Also called by `disaggregation`.

Two stages of one pipeline with the engine's own pages, records and checksums, and the process's own rooms; nothing is
computed. Raw TCP: a socket of this machine between two processes, 1 MiB a call. memcpy: one copy, by one thread. Each
way as many bytes, each once, lie in memory that was written before, and come into memory that was. They take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import numpy as np

from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline

NBYTES: Final = 256 << 20
CALL: Final = 1 << 20
STAGE: Final = """
import itertools, queue, threading, time
import msgspec, torch
import stage_runtime as omni
from stage_runtime.engines.autoregressive.model.paged_attention.block_pages import BlockPages, Page
from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import Piece
from stage_runtime.kv_transfer.records import PieceHeader

EACH = 14  # blocks of a piece: 4 MiB
BLOCKS = 1 + 64 * EACH
cache = BlockPages([Page(str(at), torch.ones(BLOCKS, 16, 3, 64)) for at in range(24)])

class Prefill:
    def __init__(self, kv):
        self.kv = kv
        kv.attach(self)

    def asked(self, room, peer, record, tensors):
        threading.Thread(target=self.ship, args=(room, *msgspec.msgpack.decode(record)), daemon=True).start()

    def ship(self, room, pieces, checked):
        places = threading.Semaphore(4)
        for number in range(pieces):
            places.acquire()
            blocks = range(1 + number % 64 * EACH, 1 + (number % 64 + 1) * EACH)
            flat = cache.export(blocks, self.kv.memory(EACH * cache.block_nbytes))
            header = PieceHeader(key=bytes(16), prompt=b"", layout=b"", first=number, count=EACH)
            if checked:
                header = msgspec.structs.replace(header, checksum=records.checksum(header, flat))
            self.kv.ship(room, Piece(records.encode(header), [flat], places.release, final=True))

    def closed(self, room, reason, *, lost=False): ...

class Decode:
    def __init__(self, kv):
        self.kv, self.came, self.generations = kv, queue.SimpleQueue(), itertools.count(1)
        kv.attach(self)

    def arrived(self, room, header, tensors):
        self.came.put((header, tensors))

    def closed(self, room, reason, *, lost=False):
        self.came.put(reason)

    def __call__(self, payload):
        peer = self.kv.peer(payload.request.id)
        if peer is None:
            return None
        room = self.kv.room(payload.request.id, next(self.generations))
        pieces = payload.data["nbytes"] // (EACH * cache.block_nbytes)
        begun = time.perf_counter()
        self.kv.ask(room, peer, msgspec.msgpack.encode([pieces, payload.data["checked"]]), [])
        for number in range(pieces):
            header, tensors = self.came.get()
            found = records.decode_header(header)
            if found.checksum is not None:
                assert found.checksum == records.checksum(found, tensors[0])
            cache.load(range(1 + number % 64 * EACH, 1 + (number % 64 + 1) * EACH), tensors[0])
        self.kv.close(room, None)
        return pieces * EACH * cache.block_nbytes / (time.perf_counter() - begun)

def stage(context):
    if context.kv_role == "prefill":
        held = Prefill(context.kv)
        return lambda payload, held=held: None
    return omni.Simple(Decode(context.kv))
"""
PIPELINE: Final = """
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {name: rate}
spec:
  stages:
  - name: words
    process: decoder
    factory: "blocks:stage"
    terminal: true
    disaggregation: {prefill: {process: prefiller}}
"""
SENDER: Final = """
import socket, sys
call, nbytes = int(sys.argv[2]), int(sys.argv[3])
data = memoryview(bytearray(b"1") * nbytes)
with socket.create_connection((sys.argv[4], int(sys.argv[1]))) as to:
    to.recv(1)
    for start in range(0, nbytes, call):
        to.sendall(data[start : start + call])
    to.recv(1)
"""


class Rate(NamedTuple):
    """GB/s of one round."""

    blocks: float
    tcp: float
    memcpy: float


def memcpy() -> float:
    """GB/s of one copy."""
    source, target = np.ones(NBYTES, dtype=np.uint8), np.ones(NBYTES, dtype=np.uint8)
    begun = time.perf_counter()
    np.copyto(target, source)
    return NBYTES / 1e9 / (time.perf_counter() - begun)


def raw_tcp() -> float:
    """GB/s between two processes."""
    buffer = memoryview(bytearray(b"1") * NBYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", SENDER, str(server.getsockname()[1]), str(CALL), str(NBYTES), "127.0.0.1"]
        with subprocess.Popen(command) as sender:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"1")
                begun, got = time.perf_counter(), 0
                while got < NBYTES:
                    got += connection.recv_into(buffer[got:])
                taken = time.perf_counter() - begun
            sender.wait()
    return NBYTES / 1e9 / taken


async def of_relay(relay: str, *, checked: bool, rounds: int = 5) -> list[Rate]:
    """The first round, in which connections are made, is left out."""
    found: list[Rate] = []
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        Path(folder, "blocks.py").write_text(STAGE)
        Path(folder, "pipeline.yaml").write_text(PIPELINE)
        overrides = [f"endpoints.basePath={folder}", f"relayBackend={relay}"]
        made = LocalPipeline(Path(folder, "pipeline.yaml"), overrides=overrides, options=LocalOptions(port=0, cpu=True))
        async with made as pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=300) as client:
            for _ in range(rounds + 1):
                inputs = {"nbytes": NBYTES, "checked": checked}
                answer = (await client.post("/v1/pipeline", json={"inputs": inputs})).json()
                rate = answer["results"]["words"]
                if rate is not None:  # None: the prefill instance is not known yet
                    found.append(Rate(rate / 1e9, raw_tcp(), memcpy()))
    return found[1:]


def medians(rates: Sequence[Rate]) -> dict[str, float]:
    """The medians of each, and of the ratios of each round's blocks to its raw TCP and memcpy."""
    return {
        "blocks_gb_per_s": statistics.median(one.blocks for one in rates),
        "tcp_gb_per_s": statistics.median(one.tcp for one in rates),
        "memcpy_gb_per_s": statistics.median(one.memcpy for one in rates),
        "ratio": statistics.median(one.blocks / one.tcp for one in rates),
        "of_memcpy": statistics.median(one.blocks / one.memcpy for one in rates),
    }


def shown(relay: str, checked: bool, rates: Sequence[Rate]) -> str:
    found = medians(rates)
    sums = "with checksums" if checked else "without"
    return (
        f"blocks by {relay} {sums} {found['blocks_gb_per_s']:.2f} GB/s, raw TCP {found['tcp_gb_per_s']:.2f} GB/s: "
        f"{found['ratio']:.2f}x, memcpy {found['memcpy_gb_per_s']:.2f} GB/s: {found['of_memcpy']:.2f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relays", nargs="*", default=["shm", "tcp", "nixl", "mooncake"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for relay, checked in itertools.product(arguments.relays, (False, True)):
        print(shown(relay, checked, asyncio.run(of_relay(relay, checked=checked, rounds=arguments.rounds))), flush=True)


if __name__ == "__main__":
    main()
