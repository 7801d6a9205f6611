"""Decode's end of a room refuses what a prefill instance that knows its key claims to send, in no time and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stage_runtime.errors import ProtocolError
from stage_runtime.kv_transfer import rooms
from stage_runtime.kv_transfer.interface import Room
from stage_runtime.kv_transfer.layout import KVLayout, KVPage
from stage_runtime.kv_transfer.records import PieceHeader, PromptAsk, prompt_digest
from stage_runtime.kv_transfer.rooms import KVArgs, KVManager, KVReceiver

LAYOUT = KVLayout(model="m", revision="", weights="", dtype="uint8", block_size=2, pages=(KVPage("0.key", (2, 1, 1)),))
NBYTES = 8
TOKENS = torch.arange(8)


class Silent:
    """`interface.KVRooms` that sends nothing."""

    def ask(self, *asked: object) -> None: ...

    def close(self, *closed: object) -> None: ...


def asking() -> tuple[KVReceiver, PromptAsk]:
    """The end of a room that waits for the blocks 1 to 3 of a prompt of four."""
    args = KVArgs(engine_rank=0, kv_data_ptrs=[0], kv_data_lens=[64], kv_item_lens=[NBYTES])
    silent: Any = Silent()
    ask = PromptAsk(key=rooms.new_key(), layout=LAYOUT, first=1, end=4, checksum=False)
    receiver = KVReceiver(KVManager(args, silent, LAYOUT), "peer", Room("o", "r", 1, 1), ask, [TOKENS])
    receiver.init([1, 2, 3])
    return receiver, ask


def piece(ask: PromptAsk, first: int, count: int) -> PieceHeader:
    prompt = prompt_digest(ask, [TOKENS])
    return PieceHeader(key=ask.key, prompt=prompt, layout=LAYOUT.digest, first=first, count=count)


@pytest.mark.parametrize(("first", "count"), [(1, 1 << 62), (1, 4), (0, 2), (3, 2), (1, 0), (1, -1), (-(1 << 62), 2)])
def test_blocks_that_were_not_asked_for_are_refused_however_many(first: int, count: int) -> None:
    receiver, ask = asking()
    with pytest.raises(ProtocolError, match="were not asked for"):
        receiver.accept(piece(ask, first, count), [torch.zeros(NBYTES, dtype=torch.uint8)])
    flat = torch.ones(2 * NBYTES, dtype=torch.uint8)
    assert torch.equal(receiver.accept(piece(ask, 2, 2), [flat]), flat)
    with pytest.raises(ProtocolError, match="came twice"):
        receiver.accept(piece(ask, 3, 1), [flat[:NBYTES]])
