"""A pair of stages with the library's own rooms and a toy for the cache, which stops at a state until it may go on.

The blocks of a prompt follow from its tokens; an answer is the sum of all bytes of all blocks, whoever computed them.
Given to pipelines as inline code: it imports nothing of the tests.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import stage_runtime as omni
from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import KVTransport, Room
from stage_runtime.kv_transfer.layout import KVLayout, KVPage
from stage_runtime.kv_transfer.records import PromptAsk
from stage_runtime.kv_transfer.rooms import KVArgs, KVManager, KVPoll, KVReceiver, KVSender, new_key

SIZE = 4  # tokens of a block
BLOCKS = 3
NBYTES = 1 << 17  # of a block: it goes by relay


class Prompt(msgspec.Struct):
    number: int
    state: str = ""  #: One of `KVPoll`: at that state of its first room, whoever keeps it there waits.
    folder: str = ""  #: ``reached`` appears there, with the state, and ``go`` lets it go on.


def tokens_of(number: int) -> list[int]:
    return [number * 100 + at for at in range(BLOCKS * SIZE)]


def block(tokens: Sequence[int], index: int) -> torch.Tensor:
    """The bytes of a block: of its tokens and of all before it."""
    made = sum(tokens[: (index + 1) * SIZE]) % 251
    return torch.full((NBYTES,), made, dtype=torch.uint8)


def total(number: int) -> int:
    return sum(int(block(tokens_of(number), index).sum(dtype=torch.int64)) for index in range(BLOCKS))


def stop(prompt: Prompt, state: KVPoll, over: threading.Event | None = None) -> None:
    """Wait here, once, if the prompt asks for it. over: nobody waits for this one any more."""
    if prompt.state != state.name:
        return
    try:
        with Path(prompt.folder, "reached.new").open("x") as file:
            file.write(state.name)
    except FileExistsError:  # another attempt
        return
    Path(prompt.folder, "reached.new").rename(Path(prompt.folder, "reached"))
    while not Path(prompt.folder, "go").exists() and not (over is not None and over.is_set()):
        time.sleep(0.01)


def manager(kv: KVTransport) -> KVManager:
    layout = KVLayout(
        model="toy", revision="", weights="", dtype="uint8", block_size=SIZE, pages=(KVPage("all", (NBYTES,)),)
    )
    args = KVArgs(engine_rank=0, kv_data_ptrs=[], kv_data_lens=[], kv_item_lens=[NBYTES])
    return KVManager(args, kv, layout)


class Decode:
    """`omni.Simple`'s function, and the sink of the rooms that it opens."""

    def __init__(self, kv: KVTransport) -> None:
        self._kv = kv
        self._manager = manager(kv)
        self._generations = itertools.count(1)
        self._open: dict[Room, queue.SimpleQueue[Any]] = {}
        kv.attach(self)

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("decode was asked for a prompt")

    def arrived(self, room: Room, header: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self._tell(room, (header, tensors))

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        self._tell(room, reason)

    def _tell(self, room: Room, what: Any) -> None:
        came = self._open.get(room)
        if came is not None:
            came.put(what)

    def __call__(self, payload: omni.StagePayload) -> dict[str, Any]:
        prompt = msgspec.convert(payload.data, Prompt)
        if prompt.folder:
            Path(prompt.folder, "decode").write_text(str(os.getpid()))
        request_id = payload.request.id
        peer = self._kv.peer(request_id)
        room = self._kv.room(request_id, next(self._generations)) if peer is not None else None
        if room is None or peer is None:
            return {"by": "decode", "sum": total(prompt.number)}
        tokens = torch.tensor(tokens_of(prompt.number), dtype=torch.int64)
        ask = PromptAsk(
            key=new_key(),
            layout=self._manager.layout,
            first=0,
            end=BLOCKS,
            cache_salt=msgspec.json.encode(prompt).decode(),
        )
        receiver = KVReceiver(self._manager, peer, room, ask, [tokens])
        stop(prompt, receiver.poll())
        came = self._open[room] = queue.SimpleQueue()
        try:
            receiver.init(range(BLOCKS))
            sums = self._received(receiver, came)
        finally:
            del self._open[room]
        stop(prompt, receiver.poll())
        if sums is None:
            return {"by": "decode", "sum": total(prompt.number)}
        return {"by": peer, "sum": sums}

    def _received(self, receiver: KVReceiver, came: queue.SimpleQueue[Any]) -> int | None:
        """None: the room has failed."""
        sums = 0
        for _ in range(BLOCKS):
            what = came.get()
            if not isinstance(what, tuple):
                receiver.fail(str(what), tell=False)
                return None
            header = records.decode_header(what[0])
            assert header.checksum == records.checksum(header, what[1][0])
            sums += int(receiver.accept(header, what[1]).sum(dtype=torch.int64))
        receiver.complete()
        return sums


class Prefill:
    """The sink of the rooms that are asked of it; each prompt has a thread."""

    def __init__(self, kv: KVTransport) -> None:
        self._manager = manager(kv)
        self._over: dict[Room, threading.Event] = {}
        kv.attach(self)

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self._over[room] = threading.Event()
        threading.Thread(target=self._compute, args=(room, peer, record, tensors), daemon=True).start()

    def arrived(self, room: Room, header: bytes, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("prefill got a piece")

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        over = self._over.pop(room, None)
        if over is not None:
            over.set()

    def _compute(self, room: Room, peer: str, record: bytes, tensors: Sequence[torch.Tensor]) -> None:
        over = self._over.get(room) or threading.Event()
        ask = records.decode_ask(record, tensors)
        prompt = msgspec.json.decode(ask.cache_salt, type=Prompt)
        sender = KVSender(self._manager, peer, room, ask, records.prompt_digest(ask, tensors))
        sender.init(BLOCKS)
        if prompt.state == KVPoll.Failed.name:
            sender.fail("it computes nothing of this one")
            return
        tokens = tensors[0].tolist()
        for index in range(BLOCKS):
            if index in (0, BLOCKS - 1):
                stop(prompt, sender.poll(), over)
            header = sender.send(range(index, index + 1))
            sender.ship(header, block(tokens, index), lambda: None)


def make(context: omni.StageContext) -> Any:
    if context.kv_role == "prefill":
        held = Prefill(context.kv)
        return lambda payload, held=held: None
    return omni.Simple(Decode(context.kv), concurrency=16)
