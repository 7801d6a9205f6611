"""A process that was stopped for a while does not blame its peers for that time.

The stop is a call that blocks the loop, or the thread that observes. The bytes that came meanwhile are there a turn
later, as they are when the threads of a library go on beside the loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from stage_runtime.errors import RelayFailed, TransferError
from stage_runtime.relays.base import Peer, TransferId
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.mooncake import reading
from stage_runtime.relays.mooncake.engine import ReadId, ReadState
from stage_runtime.relays.mooncake.mooncake_messages import MooncakeFacts, MooncakeMemory, MooncakeMetadata
from stage_runtime.relays.moving.pending_transfers import GetOperation, TransferCompletion
from stage_runtime.relays.nccl.worlds import World
from tests.patience import patience
from tests.relays.relay_pairs import MIB, SMALL, pair

PATIENCE_S = patience(60.0)
LIMIT_S = 0.5
STOP_S = 3 * LIMIT_S


async def turns(number: int) -> None:
    """So many turns of the loop: timers that are due fire."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_a_waiter_that_was_stopped_takes_what_came_meanwhile() -> None:
    loop, stopped = asyncio.get_running_loop(), False

    def moved() -> float:
        if stopped:  # the bytes are here a turn after the first look
            loop.call_soon(operation.arrived, memoryview(b"bytes"))
        return 0.0

    operation = GetOperation(TransferCompletion(loop), TransferId(1), Peer("p"), b"", moved)
    waiting = asyncio.create_task(operation.wait_for_completion(LIMIT_S))
    await turns(2)
    time.sleep(STOP_S)
    stopped = True
    assert bytes(await asyncio.wait_for(waiting, PATIENCE_S)) == b"bytes"


async def test_a_waiter_that_is_always_late_fails_in_the_end() -> None:
    loop = asyncio.get_running_loop()
    completion = TransferCompletion(loop)

    def stop() -> None:
        time.sleep(LIMIT_S)
        stopping.append(loop.call_soon(stop))

    stopping = [loop.call_soon(stop)]
    try:
        with pytest.raises(RelayFailed, match="without progress"):
            await asyncio.wait_for(completion.wait(LIMIT_S, "it"), PATIENCE_S)
    finally:
        stopping[-1].cancel()


async def test_bytes_that_came_before_a_stop_are_still_there_for_their_announcement() -> None:
    with pair("tcp", settings=msgspec.structs.replace(SMALL, unclaimed_s=1000.0)) as both:
        relay: Any = both.b._relays["tcp"]
        puts = [both.put(np.full(MIB, fill, np.uint8))[1] for fill in (7, 8)]
        await both.until(lambda: both.kept() == 2 * MIB)
        relay.drop_unclaimed(time.monotonic() + 5000)
        assert bytes(await both.get(puts[0])) == bytes([7]) * MIB
        relay.drop_unclaimed(time.monotonic() + 5500)
        with pytest.raises(TransferError, match="not claimed in time"):
            await both.get(puts[1])


class Stopped:
    """`engine.TransferEngine` and a work of NCCL: at its first look, the process is stopped; at the next one the bytes
    are here.
    """

    def __init__(self) -> None:
        self.looks = 0

    def begin(self, session: str, ours: int, theirs: int, nbytes: int) -> ReadId:
        return ReadId(1)

    def state(self, read: ReadId) -> ReadState:
        return ReadState.HERE if self.is_completed() else ReadState.MOVES

    def is_completed(self) -> bool:
        self.looks += 1
        if self.looks == 1:
            time.sleep(STOP_S)
        return self.looks > 1

    def wait(self) -> None: ...


async def test_a_mooncake_read_during_which_this_process_was_stopped_is_not_given_up() -> None:
    loop = asyncio.get_running_loop()
    pins = Pins(loop, lambda peer, transfer: None, threading.local())
    memory, engine = Arena(MIB), Stopped()
    reader = reading.MooncakeReader(
        loop,
        engine,  # type: ignore[arg-type]
        memory,
        pins,
        lambda *_: None,
        late_s=LIMIT_S,
    )
    route = reading.MooncakeRoute(Peer("p"), MooncakeFacts("host:1", MooncakeMemory(0, 0), "tcp"))
    operation = GetOperation(TransferCompletion(loop), TransferId(1), route.peer, b"")
    try:
        reader.claim(route, reading.MooncakeGet(operation, MooncakeMetadata(1, 0, 0, 1000, 0), "r", ""))
        assert (await operation.wait_for_completion(PATIENCE_S)).nbytes == 1000
    finally:
        reader.close()
        memory.close()


def test_a_piece_of_nccl_during_which_this_process_was_stopped_is_not_given_up() -> None:
    group: Any = object()
    world = World(group, "nccl", 1, stall_s=LIMIT_S)
    try:
        world._poll(Stopped())  # raises where it gives the piece up
    finally:
        world._give_up()
