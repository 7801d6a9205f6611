"""The nccl relay alone promises worlds of two that end with their peers, and memory that is theirs until then."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch.distributed

from stage_runtime.errors import ConfigurationError, TransferError
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.nccl import nccl_messages
from stage_runtime.relays.nccl.sending import RETRY_S, NcclSender
from tests.relays.near_end import (
    END_S,
    LARGE,
    Near,
    ask_to_fetch,
    digest,
    frozen_while_it_reads_from_us,
    frozen_while_it_writes_to_us,
    killed_while_it_writes_to_us,
    processor_share,
    run_to_its_end,
    until,
)
from tests.relays.relay_pairs import MIB, PATIENCE_S, SMALL, FarEnd, pair
from tests.thoroughness import rows

RELAY = "nccl"  # of the fixture `near`
STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start


async def test_the_slot_that_a_frozen_receiver_was_being_sent_is_free_when_its_world_has_ended(
    near: Near, far: FarEnd
) -> None:
    await frozen_while_it_reads_from_us(near, far)
    near.relays.forget("far")
    await until(lambda: near.in_use() == 0)
    assert (near.stat("quarantined_sends"), near.stat("outgoing_transfers")) == (0, 0)
    near.relays.allocate((32 * MIB,), torch.uint8)[:] = 2
    far.process.send_signal(signal.SIGCONT)
    assert "is not reached" in far.answer()["error"]


@pytest.mark.long
async def test_what_a_frozen_sender_writes_when_it_goes_on_lands_in_no_memory_that_is_used(
    near: Near, far: FarEnd
) -> None:
    late = await frozen_while_it_writes_to_us(near, far)
    near.relays.forget("far")
    with pytest.raises(TransferError, match="far is gone"):
        await late.wait_for_completion(PATIENCE_S)
    await until(lambda: near.stat("receive_bytes_in_use") == 0)
    other = FarEnd(name="other", relay=RELAY)
    try:
        near.meet(other, "other")
        view = await near.fetch(other, 100 * MIB, 2, "other").wait_for_completion(PATIENCE_S)
        far.process.send_signal(signal.SIGCONT)
        far.ask(do="stats")
        assert set(await near.fetch(other, MIB, 3, "other").wait_for_completion(PATIENCE_S)) == {3}
        assert hashlib.sha256(view).hexdigest() == digest(100 * MIB, 2)
    finally:
        other.close()


@pytest.mark.nightly
async def test_an_aborted_get_keeps_its_memory_until_all_has_come_and_then_releases(near: Near, far: FarEnd) -> None:
    late = await frozen_while_it_writes_to_us(near, far)
    near.relays.cleanup("r")
    with pytest.raises(TransferError, match="aborted"):
        await late.wait_for_completion(PATIENCE_S)
    assert (near.stat("quarantined_receive_bytes"), near.released) == (LARGE, [])
    far.process.send_signal(signal.SIGCONT)
    await until(lambda: near.released == [("far", late.transfer)])
    assert (near.stat("quarantined_receives"), near.stat("receive_bytes_in_use")) == (0, 0)
    assert set(await near.fetch(far, MIB, 7).wait_for_completion(PATIENCE_S)) == {7}


async def test_a_sender_that_is_killed_on_the_way_fails_the_get_and_gives_the_memory_back(near: Near) -> None:
    operation, error = await killed_while_it_writes_to_us(near)
    assert f"{operation.peer} is not reached" in str(error)
    await until(lambda: near.stat("receive_bytes_in_use") == 0)


async def test_a_receiver_that_is_killed_on_the_way_gives_the_slot_back(near: Near, far: FarEnd) -> None:
    operation = await frozen_while_it_reads_from_us(near, far)
    far.process.kill()
    far.process.wait(PATIENCE_S)
    near.relays.forget("far")
    assert operation.done()
    await until(lambda: near.in_use() == 0)


@pytest.mark.nightly  # with nixl and mooncake it runs each time
async def test_a_frozen_sender_is_late_and_what_it_sends_when_it_goes_on_is_whole(near: Near, far: FarEnd) -> None:
    operation = await frozen_while_it_writes_to_us(near, far)
    with pytest.raises(TransferError, match=r"not complete after 0\.1 s without progress"):
        await operation.wait_for_completion(0.1)
    far.process.send_signal(signal.SIGCONT)
    view = await operation.wait_for_completion(PATIENCE_S)
    assert hashlib.sha256(view).hexdigest() == digest(LARGE, 1)


async def test_a_process_that_restarts_under_the_same_name_is_a_new_world(near: Near, far: FarEnd) -> None:
    late = await frozen_while_it_writes_to_us(near, far)
    far.process.kill()
    near.relays.forget("far")
    again = FarEnd(relay=RELAY)
    try:
        await until(lambda: near.stat("quarantined_receives") == 0)
        near.meet(again, "far")
        assert set(await near.fetch(again, MIB, 5).wait_for_completion(PATIENCE_S)) == {5}
        with pytest.raises(TransferError, match="far is gone"):
            await late.wait_for_completion(PATIENCE_S)
    finally:
        again.close()


@pytest.mark.long
async def test_the_death_of_one_peer_ends_its_world_alone(near: Near) -> None:
    other = FarEnd(name="other", relay=RELAY)
    try:
        near.meet(other, "other")
        coming = near.fetch(other, LARGE, 4, "other")
        await killed_while_it_writes_to_us(near)
        assert hashlib.sha256(await coming.wait_for_completion(PATIENCE_S)).hexdigest() == digest(LARGE, 4)
    finally:
        other.close()


async def test_both_directions_of_a_pair_move_at_once(near: Near, far: FarEnd) -> None:
    sent = near.put(LARGE, 8)
    ask_to_fetch(far, sent)
    # `far` answers the get first: its own put is asked for by a command behind it.
    assert far.answer()["sha"] == digest(LARGE, 8)
    operations = [near.fetch(far, 3 * MIB, mark) for mark in range(5)]
    for mark, operation in enumerate(operations):
        assert set(await operation.wait_for_completion(PATIENCE_S)) == {mark}


async def test_a_put_that_was_taken_back_is_refused_and_the_next_ones_come() -> None:
    with pair("nccl") as both:
        _, operation = both.put(np.ones(9000))
        metadata = operation.metadata
        both.a.forget("b")
        assert "nccl" in both.a.open("b", both.b.facts())
        _, other = both.put(np.zeros(9000))
        with pytest.raises(TransferError, match="its sender has already released it"):
            await both.b.get(metadata, request_id="r", peer="a").wait_for_completion(PATIENCE_S)
        assert set(await both.get(other)) == {0}


async def test_a_receiver_that_its_sender_has_forgotten_is_told_before_its_library_waits() -> None:
    """It was frozen until it was declared dead, goes on, and fetches what had been announced to it."""
    with pair("nccl") as both:
        _, operation = both.put(np.ones(9000))
        metadata = operation.metadata
        both.a.forget("b")
        with pytest.raises(TransferError, match="a is not reached: the connection was closed"):
            await both.b.get(metadata, request_id="r", peer="a").wait_for_completion(PATIENCE_S)
        assert both.a.stats()["nccl_stray_notices"] == 1


async def test_what_finds_no_memory_waits_for_it_and_large_holdings_are_copied_out() -> None:
    with pair("nccl") as both:  # of 64 MiB
        puts = [both.put(np.full(20 * MIB, mark, np.uint8))[1] for mark in range(3)]
        fetching = [both.b.get(put.metadata, request_id="r", peer="a") for put in puts]
        views = [await fetch.wait_for_completion(PATIENCE_S) for fetch in fetching]
        assert [set(view) for view in views] == [{0}, {1}, {2}]
        assert 0 < both.b.stats()["nccl_copied_out_bytes"]


async def test_the_default_group_stays_the_author_s() -> None:
    with pair("nccl") as both:
        await both.carry(np.ones(9000))
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "changes",
    [
        {"host": ""},
        {"host": "a..b"},
        {"orders": 0},
        {"store": 65536},
        {"token": "short"},
        {"token": None},
        {"gpu": 3},
    ],
    ids=str,
)
async def test_facts_that_are_none_do_not_reach(changes: dict[str, Any]) -> None:
    with pair("nccl") as both:
        assert both.a.open("c", {"nccl": {**both.b.facts()["nccl"], **changes}}) == ()


@pytest.mark.parametrize(
    "first_message",
    [
        b"",
        b"\xff\xff\xff\xff" + b"x" * 100,
        b"\0\0\0\3abc",
        nccl_messages.NcclGrant(1, 72_000, 1 << 20),
        nccl_messages.Join("0" * 32, "b", "0" * 32, "gloo"),
    ],
    ids=str,
)
async def test_who_is_nobody_s_receiver_is_sent_nothing(first_message: Any) -> None:
    with pair("nccl") as both:
        facts = both.a.facts()["nccl"]
        with socket.create_connection((facts["host"], facts["orders"])) as stranger:
            if isinstance(first_message, bytes):
                with contextlib.suppress(OSError):  # it has closed it already
                    stranger.sendall(first_message)
                    stranger.shutdown(socket.SHUT_WR)
            else:
                nccl_messages.send(stranger, first_message)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(stranger.recv, 1) == b""
        assert (await both.carry(np.arange(9000)))[-1] == 8999


class Exhausted(socket.socket):
    """A listening socket for whose connections its process has no descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0
        self.tried = threading.Event()

    def accept(self) -> Any:
        self.tries += 1
        self.tried.set()
        raise OSError(errno.EMFILE, "Too many open files")


def test_without_descriptors_the_next_receiver_is_accepted_later_and_no_core_burns_meanwhile() -> None:
    listening, begun = Exhausted(), time.monotonic()
    facts = nccl_messages.NcclFacts(host="127.0.0.1", orders=1, store=1, token="0" * 32)
    sending = NcclSender(b"", facts, listening, lambda put: None)
    sending.start(lambda peer: True)
    assert listening.tried.wait(PATIENCE_S)
    sending.close()
    assert listening.tries <= 1 + (time.monotonic() - begun) / RETRY_S


async def test_a_receiver_for_which_no_thread_can_start_is_refused_and_the_next_one_is_served() -> None:
    with pair("nccl") as both:
        facts = both.a.facts()["nccl"]
        before = threading.stack_size(STACK_TOO_LARGE)
        try:
            with socket.create_connection((facts["host"], facts["orders"])) as refused:
                reading, _, _ = select.select([refused], [], [], PATIENCE_S)
                assert reading == [refused] and refused.recv(1) == b""
        finally:
            threading.stack_size(before)
        assert (await both.carry(np.arange(9000)))[-1] == 8999


async def test_a_get_for_which_no_thread_can_start_waits_for_one() -> None:
    with pair("nccl") as both:
        _, operation = both.put(np.ones(9000))
        before = threading.stack_size(STACK_TOO_LARGE)
        try:
            fetching = both.b.get(operation.metadata, request_id="r", peer="a")
        finally:
            threading.stack_size(before)
        assert (await fetching.wait_for_completion(PATIENCE_S)).nbytes == 72_000


async def test_a_route_that_ends_between_two_transfers_keeps_no_memory() -> None:
    with pair("nccl") as both:
        relay: Any = both.b._relays["nccl"]
        route = relay._connections["a"]
        _, operation = both.put(np.ones(9000))
        route.thread = threading.Thread()  # it looks when the get and the end of the route are both due
        fetching = both.b.get(operation.metadata, request_id="r", peer="a")
        route.due.put(None)
        await asyncio.to_thread(relay._receiving._run, route)
        with pytest.raises(TransferError, match="its sender a is gone"):
            await fetching.wait_for_completion(PATIENCE_S)
        assert both.b.stats()["nccl_receive_bytes_in_use"] == 0


@pytest.mark.timeout(END_S + 60)
@pytest.mark.parametrize("closes", rows([True, False], each_run=1))
def test_an_interpreter_ends_with_0_whether_or_not_the_relay_was_closed(closes: bool) -> None:
    done = run_to_its_end("nccl", closes=closes)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


async def test_a_process_with_nothing_to_move_uses_next_to_no_processor_time(near: Near, far: FarEnd) -> None:
    held = await near.fetch(far, MIB, 3).wait_for_completion(PATIENCE_S)
    assert await processor_share(far.process.pid, 0.02) <= 0.02
    assert held is not None


async def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    settings = msgspec.structs.replace(SMALL, named=frozenset({"nccl"}))
    with pytest.raises(
        ConfigurationError, match=r"^relay 'nccl' cannot be loaded .*pip install 'omnipipeline\[runtime\]'$"
    ):
        Relays(loop=asyncio.get_running_loop(), incarnation="x", on_release=lambda *_: None, settings=settings)


async def test_an_address_that_is_not_here_is_named() -> None:
    settings = RelaySettings(named=frozenset({"nccl"}), arena_bytes=MIB, bind="tcp://192.0.2.1:*")
    with pytest.raises(ConfigurationError, match=r"relay 'nccl': 192\.0\.2\.1"):
        Relays(loop=asyncio.get_running_loop(), incarnation="x", on_release=lambda *_: None, settings=settings)
