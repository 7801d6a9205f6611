"""Bytes a second of KV blocks from one process's cache into another's, over each relay, beside raw TCP. Used by
`disaggregation`.

Two stages of one pipeline with the engine's own pages, records and checksums, and the process's own rooms; nothing is
computed. Raw TCP: a socket of this machine between two processes, 1 MiB a call, into memory that is there already.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import httpx

from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline

NBYTES: Final = 256 << 20
CALL: Final = 1 << 20
STAGE: Final = """
import itertools, queue, threading, time
import msgspec, torch
import stage_runtime as omni
from stage_runtime.engines.autoregressive.model.block_pages import BlockPages, Page
from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import Piece
from stage_runtime.kv_transfer.records import PieceHeader

EACH = 14  # blocks of a piece: 4 MiB
cache = BlockPages([Page(str(at), torch.ones(256, 16, 3, 64)) for at in range(24)])

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
            flat = cache.export([1 + (number + at) % 200 for at in range(EACH)])
            header = PieceHeader(key=b"", prompt=b"", layout=b"", first=number, count=EACH)
            if checked:
                header = msgspec.structs.replace(header, checksum=records.checksum(header, flat))
            self.kv.ship(room, Piece(records.encode(header), [flat], places.release))

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
            cache.load([1 + (number + at) % 200 for at in range(EACH)], tensors[0])
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
data = memoryview(bytearray(int(sys.argv[2])))
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as to:
    for _ in range(int(sys.argv[3])):
        to.sendall(data)
    to.recv(1)
"""


def raw_tcp() -> float:
    """GB/s between two processes."""
    buffer = memoryview(bytearray(NBYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", SENDER, str(server.getsockname()[1]), str(CALL), str(NBYTES // CALL)]
        with subprocess.Popen(command) as sender:
            connection, _ = server.accept()
            with connection:
                begun, got = time.perf_counter(), 0
                while got < NBYTES:
                    got += connection.recv_into(buffer[got:])
                taken = time.perf_counter() - begun
            sender.wait()
    return NBYTES / 1e9 / taken


async def of_relay(relay: str, *, checked: bool, rounds: int = 5) -> list[tuple[float, float]]:
    """(GB/s of blocks, GB/s of raw TCP) in turns; the first round, in which connections are made, is left out."""
    found = []
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
                    found.append((rate / 1e9, raw_tcp()))
    return found[1:]
