"""Gets of relays that receive into an arena of their own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from stage_runtime.relays.base import Peer, TransferId
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.moving.gets import Get, GetRoute, Gets
from stage_runtime.relays.moving.pending_transfers import GetOperation, TransferCompletion

MIB = 1 << 20


async def test_what_has_come_stays_where_it_is_when_the_system_has_no_memory_for_a_copy() -> None:
    loop = asyncio.get_running_loop()
    memory = Arena(MIB)
    pins = Pins(loop, lambda peer, transfer: None, threading.local())
    gets: Gets[GetRoute, Get] = Gets(
        loop, memory, pins, lambda peer, transfer: None, room_nbytes=0, begin=lambda *_: False
    )
    more_than_half = memory.allocate_region(3 * MIB // 4)
    no_memory_holds_it: Any = np.lib.stride_tricks.as_strided(np.ones(1, np.uint8), (1 << 47,), (0,))
    operation = GetOperation(TransferCompletion(loop), TransferId(1), Peer("p"), b"")
    gets.landed(Get(operation, 1 << 47, "r", ""), no_memory_holds_it)
    assert operation.done() and operation.take().nbytes == 1 << 47
    assert gets.stats()["copied_out_bytes"] == 0
    del more_than_half
    memory.close()
