"""A pair of stages with a toy for KV blocks: prefill fills a block with the prompt's number, decode reports its sum.

A prompt's number times `NUMBERS` is the only right answer, whoever computed it.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import stage_runtime as omni
from stage_runtime.kv_transfer.interface import KVTransport, Piece, Room

NUMBERS = 1 << 20  # int32: 4 MiB a piece, which takes a credit
PIECES = 3


class Prompt(msgspec.Struct):
    number: int
    until: str = ""  #: Prefill waits for this file before the last piece.


class Decode:
    """`omni.Simple`'s function, and the sink of the rooms that it opens."""

    def __init__(self, kv: KVTransport) -> None:
        self._kv = kv
        self._generations = itertools.count(1)
        self._open: dict[Room, queue.SimpleQueue[tuple[str, Any]]] = {}
        kv.attach(self)

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("decode was asked for a prompt")

    def arrived(self, room: Room, header: bytes, tensors: Sequence[torch.Tensor]) -> None:
        came = self._open.get(room)
        if came is not None:
            came.put((header.decode(), int(tensors[0].sum(dtype=torch.int64))))

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        came = self._open.get(room)
        if came is not None:
            came.put(("closed", reason))

    def __call__(self, payload: omni.StagePayload) -> dict[str, Any]:
        prompt = msgspec.convert(payload.data, Prompt)
        peer = self._kv.peer(payload.request.id)
        room = self._kv.room(payload.request.id, next(self._generations)) if peer is not None else None
        if room is None or peer is None:
            return {"by": "decode", "sum": prompt.number * NUMBERS, "why": "no peer"}
        came = self._open[room] = queue.SimpleQueue()
        try:
            self._kv.ask(room, peer, msgspec.msgpack.encode(prompt), [torch.tensor([prompt.number])])
            got: dict[str, int] = {}
            while len(got) < PIECES:
                what, value = came.get()
                if what == "closed":
                    return {"by": "decode", "sum": prompt.number * NUMBERS, "why": value}
                got[what] = value
            self._kv.close(room, None)
            assert set(got.values()) == {got["0"]}
            return {"by": peer, "sum": got["0"]}
        finally:
            del self._open[room]


class Prefill:
    """The sink of the rooms that are asked of it; each prompt has a thread."""

    def __init__(self, kv: KVTransport) -> None:
        self._kv = kv
        self._over: set[Room] = set()
        kv.attach(self)

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[torch.Tensor]) -> None:
        prompt = msgspec.msgpack.decode(record, type=Prompt)
        assert int(tensors[0][0]) == prompt.number
        threading.Thread(target=self._compute, args=(room, prompt), daemon=True).start()

    def arrived(self, room: Room, header: bytes, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("prefill got a piece")

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        self._over.add(room)

    def _compute(self, room: Room, prompt: Prompt) -> None:
        for number in range(PIECES):
            while number == PIECES - 1 and prompt.until and not Path(prompt.until).exists():
                if room in self._over:
                    return
                time.sleep(0.01)
            block = torch.full((NUMBERS,), prompt.number, dtype=torch.int32)
            self._kv.ship(room, Piece(str(number).encode(), [block], lambda: None))


def make(context: omni.StageContext) -> Any:
    kv = context.kv
    if context.kv_role == "prefill":
        held = Prefill(kv)
        return lambda payload, held=held: None
    return omni.Simple(Decode(kv), concurrency=16)
