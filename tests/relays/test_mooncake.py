"""The mooncake relay alone promises that memory which may still be written to is not used again, whoever froze."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from stage_runtime.errors import ConfigurationError, TransferError
from stage_runtime.relays.base import Peer, TransferId
from stage_runtime.relays.context import RelayContext, RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.mooncake import reading
from stage_runtime.relays.mooncake.engine import ReadId, ReadState, TransferEngine
from stage_runtime.relays.mooncake.mooncake_messages import MooncakeFacts, MooncakeMemory, MooncakeMetadata
from stage_runtime.relays.mooncake.relay import MooncakeRelay
from stage_runtime.relays.moving.pending_transfers import GetOperation, TransferCompletion
from stage_runtime.relays.registry import RelayEntry
from tests import debian
from tests.relays.near_end import (
    END_S,
    LARGE,
    Near,
    digest,
    dropped,
    frozen_while_it_writes_to_us,
    killed_while_it_writes_to_us,
    processor_share,
    run_to_its_end,
    until,
    writing_to_us,
)
from tests.relays.relay_pairs import MIB, PATIENCE_S, SMALL, FarEnd, pair

RELAY = "mooncake"  # of the fixture `near`
pytestmark = pytest.mark.debian(*debian.MOONCAKE)
STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start
ASKED = RelaySettings(named=frozenset({RELAY}), arena_bytes=256 * MIB, prefault_bytes=0)


async def test_what_a_frozen_sender_sends_when_it_goes_on_lands_in_no_memory_that_is_used(
    near: Near, far: FarEnd
) -> None:
    late = await frozen_while_it_writes_to_us(near, far)
    with pytest.raises(TransferError, match="far is not reached"):
        await late.wait_for_completion(PATIENCE_S)
    assert near.stat("quarantined_receive_bytes") == LARGE
    near.relays.forget("far")
    other = FarEnd(name="other", relay=RELAY)
    try:
        near.meet(other, "other")
        view = await near.fetch(other, 100 * MIB, 2, "other").wait_for_completion(PATIENCE_S)
        far.process.send_signal(signal.SIGCONT)
        far.ask(do="stats")
        assert set(await near.fetch(other, MIB, 3, "other").wait_for_completion(PATIENCE_S)) == {3}
        assert hashlib.sha256(view).hexdigest() == digest(100 * MIB, 2)
        await until(lambda: near.stat("quarantined_receive_bytes") == 0)  # all that was late is here
        assert hashlib.sha256(view).hexdigest() == digest(100 * MIB, 2)
    finally:
        other.close()


async def test_the_memory_of_a_frozen_sender_comes_back_when_it_is_killed(near: Near, far: FarEnd) -> None:
    late = await frozen_while_it_writes_to_us(near, far)
    with pytest.raises(TransferError, match="far is not reached"):
        await late.wait_for_completion(PATIENCE_S)
    near.relays.forget("far")
    far.process.kill()
    far.process.wait(PATIENCE_S)
    await until(lambda: near.stat("receive_bytes_in_use") == 0)


async def test_of_peers_that_answer_nothing_each_is_looked_for_once_at_a_time() -> None:
    """A look takes a second then, and one is asked for each second and peer: they would pile up."""
    loop = asyncio.get_running_loop()
    sessions, answer = list[str](), threading.Semaphore(0)

    def listens(session: str) -> bool:
        sessions.append(session)
        answer.acquire()
        return True

    pins = Pins(loop, lambda peer, transfer: None, threading.local())
    memory = Arena(MIB)
    engine: Any = Moving()
    reader = reading.MooncakeReader(loop, engine, memory, pins, lambda peer, transfer: None, listens=listens)
    for number in range(3):
        facts = MooncakeFacts(f"host:{1 + number}", MooncakeMemory(0, 0), "tcp")
        route = reading.MooncakeRoute(Peer(f"p{number}"), facts)
        operation = GetOperation(TransferCompletion(loop), TransferId(number), route.peer, b"")
        get = reading.MooncakeGet(operation, MooncakeMetadata(number, 0, 0, 1, 1), "r", "")
        get.late = ReadId(number)
        reader._gets.quarantined[get.key] = (route, get)
    try:
        for turn in (3, 6):
            for _ in range(20):
                reader._ask()
            answer.release(3)
            await until(lambda turn=turn: len(sessions) == turn and not reader._looked_for)  # type: ignore[misc]
            assert sorted(sessions) == sorted(["host:1", "host:2", "host:3"] * (turn // 3))
        assert len(reader._gets.quarantined) == 3
    finally:
        answer.release(99)
        reader.close()
        memory.close()


async def test_a_peer_for_which_no_thread_can_look_is_looked_for_later() -> None:
    loop = asyncio.get_running_loop()
    sessions = list[str]()
    pins = Pins(loop, lambda peer, transfer: None, threading.local())
    memory = Arena(MIB)
    engine: Any = Moving()

    def listens(session: str) -> bool:
        sessions.append(session)
        return True

    reader = reading.MooncakeReader(loop, engine, memory, pins, lambda *_: None, listens=listens)
    route = reading.MooncakeRoute(Peer("p"), MooncakeFacts("host:1", MooncakeMemory(0, 0), "tcp"))
    operation = GetOperation(TransferCompletion(loop), TransferId(1), route.peer, b"")
    get = reading.MooncakeGet(operation, MooncakeMetadata(1, 0, 0, 1, 1), "r", "")
    reader._gets.quarantined[get.key] = (route, get)
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        reader._ask()
    finally:
        threading.stack_size(before)
    try:
        assert not reader._looked_for
        reader._ask()
        await until(lambda: "host:1" in sessions)
    finally:
        reader.close()
        memory.close()


class Instant:
    """`engine.TransferEngine` whose reads are over at once."""

    def begin(self, session: str, ours: int, theirs: int, nbytes: int) -> ReadId:
        return ReadId(1)

    def state(self, read: ReadId) -> ReadState:
        return ReadState.HERE


async def test_a_get_for_which_no_thread_can_start_waits_for_one() -> None:
    loop = asyncio.get_running_loop()
    pins = Pins(loop, lambda peer, transfer: None, threading.local())
    memory, engine = Arena(MIB), Instant()
    reader = reading.MooncakeReader(loop, engine, memory, pins, lambda *_: None)  # type: ignore[arg-type]
    route = reading.MooncakeRoute(Peer("p"), MooncakeFacts("host:1", MooncakeMemory(0, 0), "tcp"))
    operations = [GetOperation(TransferCompletion(loop), TransferId(number), route.peer, b"") for number in range(4)]
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        for number, operation in enumerate(operations):
            reader.claim(route, reading.MooncakeGet(operation, MooncakeMetadata(number, 0, 0, 1000, 0), "r", ""))
    finally:
        threading.stack_size(before)
    try:
        await until(lambda: all(operation.done() for operation in operations))
        assert [operation.take().nbytes for operation in operations] == [1000] * 4
    finally:
        reader.close()
        memory.close()


class Moving:
    """`engine.TransferEngine` whose reads are never over."""

    def state(self, read: ReadId) -> ReadState:
        return ReadState.MOVES


async def test_a_sender_that_is_killed_on_the_way_fails_the_get_and_gives_the_memory_back(near: Near) -> None:
    operation, error = await killed_while_it_writes_to_us(near)
    assert f"{operation.peer} is not reached" in str(error)
    await until(lambda: near.stat("receive_bytes_in_use") == 0)
    near.relays.forget(operation.peer)


async def test_an_aborted_get_stops_within_a_piece_and_is_released(near: Near, far: FarEnd) -> None:
    while True:
        operation = await writing_to_us(near, far)
        near.relays.cleanup("r")
        try:
            view = await operation.wait_for_completion(PATIENCE_S)
        except TransferError as error:
            assert "aborted" in str(error)
            break
        await dropped(near, operation, view, far)  # all of it was here by then
    await until(lambda: near.released == [("far", operation.transfer)])
    await until(lambda: near.stat("receive_bytes_in_use") == 0)
    assert set(await near.fetch(far, MIB, 7).wait_for_completion(PATIENCE_S)) == {7}


async def test_what_was_read_from_a_slot_that_has_another_use_is_no_payload() -> None:
    """A sender that takes its receiver for gone uses the slot again; the receiver may only have been frozen."""
    with pair("mooncake") as both:
        _, operation = both.put(np.ones(MIB, np.uint8))
        metadata = operation.metadata
        both.a.forget("b")
        assert both.a.open("b", both.b.facts())
        _, other = both.put(np.zeros(MIB, np.uint8))
        with pytest.raises(TransferError, match="its slot was reused"):
            await both.b.get(metadata, request_id="r", peer="a").wait_for_completion(PATIENCE_S)
        assert set(await both.get(other)) == {0}


async def test_what_finds_no_memory_waits_for_it_and_large_holdings_are_copied_out() -> None:
    with pair("mooncake") as both:  # of 64 MiB
        puts = [both.put(np.full(20 * MIB, mark, np.uint8))[1] for mark in range(3)]
        fetching = [both.b.get(put.metadata, request_id="r", peer="a") for put in puts]
        views = [await fetch.wait_for_completion(PATIENCE_S) for fetch in fetching]
        assert [set(view) for view in views] == [{0}, {1}, {2}]
        assert 0 < both.b.stats()["mooncake_copied_out_bytes"]


@pytest.mark.parametrize(
    "changes",
    [
        {"session": "no port"},
        {"session": "host:1 2"},
        {"session": "127.0.0.1:65536"},
        {"session": f"{'h' * 64}.invalid:80"},
        {"session": "a..b:80"},
        {"session": None},
        {"sends": {"address": -1, "nbytes": 1}},
        {"sends": {"address": 2**63 - 1, "nbytes": 1}},
        {"sends": 3},
    ],
    ids=str,
)
async def test_facts_that_are_none_do_not_reach(changes: dict[str, Any]) -> None:
    with pair("mooncake") as both:
        assert both.a.open("c", {"mooncake": {**both.b.facts()["mooncake"], **changes}}) == ()


@pytest.mark.timeout(END_S + 60)
@pytest.mark.parametrize("closes", [True, False])
def test_an_interpreter_ends_with_0_whether_or_not_the_relay_was_closed(closes: bool) -> None:
    done = run_to_its_end("mooncake", closes=closes)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


async def test_a_process_with_nothing_to_move_uses_next_to_no_processor_time(near: Near, far: FarEnd) -> None:
    held = await near.fetch(far, MIB, 3).wait_for_completion(PATIENCE_S)
    assert await processor_share(far.process.pid, 0.05) <= 0.05
    assert held is not None


async def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    settings = RelaySettings(named=ASKED.named, arena_bytes=SMALL.arena_bytes, bind="tcp://127.0.0.9:*")
    with pytest.raises(
        ConfigurationError, match=r"^relay 'mooncake' cannot be loaded .*omnipipeline\[mooncake\].*libnuma1"
    ):
        Relays(loop=asyncio.get_running_loop(), incarnation="x", on_release=lambda *_: None, settings=settings)


@pytest.mark.parametrize(
    ("devices", "environment", "missing"),
    [
        ((), {}, "no RDMA device is found here"),
        (("mlx5_0",), {"MC_FORCE_TCP": "1"}, "MC_FORCE_TCP is set"),
        (("mlx5_9",), {}, "Mooncake finds no RDMA device here, also not mlx5_9"),  # this machine has none
    ],
)
def test_rdma_is_not_claimed_where_mooncake_would_use_tcp(
    devices: tuple[str, ...], environment: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=rf"mooncakeProtocol is rdma, and {missing}$"):
        TransferEngine("127.0.0.1", "rdma", devices)
    assert TransferEngine("127.0.0.1", None, devices).protocol == "tcp"


class RdmaEngine:
    """`engine.TransferEngine` that has a device."""

    protocol: Literal["rdma"] = "rdma"
    session = "127.0.0.1:1"

    def register(self, address: int, nbytes: int) -> None: ...
    def close(self, *, again: bool) -> None: ...


class RdmaMooncake(MooncakeRelay):
    def __init__(self, context: RelayContext) -> None:
        super().__init__(context, RdmaEngine())  # type: ignore[arg-type]


async def test_memory_that_a_device_has_keeps_its_pages() -> None:
    table = {"mooncake": RelayEntry(factory=f"{__name__}:RdmaMooncake", extra="mooncake")}
    loop = asyncio.get_running_loop()
    relays = Relays(loop=loop, incarnation="x", on_release=lambda *_: None, settings=ASKED, table=table)
    received: Arena = relays._relays["mooncake"]._received  # type: ignore[attr-defined]
    for memory in (relays.arena, received):
        slot = memory.allocate(40 * MIB)
        assert slot is not None and memory.drop(slot)
        assert (memory.trim(), memory.trim()) == (0, 0)
    relays.close()


class FullEngine(RdmaEngine):
    """One that may lock no memory."""

    def register(self, address: int, nbytes: int) -> None:
        raise ConfigurationError("cannot be registered")


class FullMooncake(MooncakeRelay):
    def __init__(self, context: RelayContext) -> None:
        super().__init__(context, FullEngine())  # type: ignore[arg-type]


def arenas() -> int:
    """Open arenas of this process, and their further mappings."""
    descriptors = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum("omni-arena" in os.readlink(one) for one in descriptors if one.is_symlink())


async def test_a_relay_that_auto_cannot_use_leaves_no_memory_behind() -> None:
    table = {"mooncake": RelayEntry(factory=f"{__name__}:FullMooncake", extra="mooncake")}
    gc.collect()
    before, loop = arenas(), asyncio.get_running_loop()
    settings = RelaySettings(arena_bytes=MIB, prefault_bytes=0)
    relays = Relays(loop=loop, incarnation="x", on_release=lambda *_: None, settings=settings, table=table)
    gc.collect()
    assert relays.process.refused == {"mooncake": "cannot be registered"}
    assert arenas() == before + 2  # of the process's own arena: its descriptor, and that of its mapping
    relays.close()
