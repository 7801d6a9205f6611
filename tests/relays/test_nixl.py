"""The nixl relay alone promises that memory which may still be written to is not used again, whoever froze or died."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from stage_runtime.errors import ConfigurationError, TransferError
from stage_runtime.relays.base import Peer, TransferId
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.moving.pending_transfers import GetOperation, TransferCompletion
from stage_runtime.relays.nixl import agent, environment, nixl_messages
from stage_runtime.relays.nixl.agent import Agent
from stage_runtime.relays.nixl.receiving import NixlGet, NixlReceiver
from stage_runtime.relays.nixl.worker import NixlRoute
from tests.relays.near_end import (
    END_S,
    LARGE,
    Near,
    digest,
    frozen_while_it_reads_from_us,
    frozen_while_it_writes_to_us,
    processor_share,
    run_to_its_end,
    until,
)
from tests.relays.relay_pairs import MIB, PATIENCE_S, SMALL, FarEnd, Pair, pair
from tests.thoroughness import rows

RELAY = "nixl"  # of the fixture `near`
ASKED = RelaySettings(named=frozenset({RELAY}), arena_bytes=256 * MIB, prefault_bytes=0)


async def test_the_slot_that_a_frozen_receiver_was_being_sent_is_not_used_before_the_transfer_has_ended(
    near: Near, far: FarEnd
) -> None:
    """NIXL goes on sending from the slot: what others put meanwhile must not lie there."""
    await frozen_while_it_reads_from_us(near, far)
    near.relays.forget("far")
    stats = near.relays.stats()
    assert stats["nixl_quarantined_send_bytes"] == LARGE <= stats["arena_bytes_in_use"]
    others = near.relays.allocate((32 * MIB,), __import__("torch").uint8)
    others[:] = 2
    far.process.send_signal(signal.SIGCONT)
    await until(lambda: near.stat("quarantined_send_bytes") == 0)
    assert near.in_use() < LARGE
    assert int(others.min()) == int(others.max()) == 2


async def test_what_a_frozen_sender_writes_when_it_goes_on_lands_in_no_memory_that_is_used(
    near: Near, far: FarEnd
) -> None:
    late = await frozen_while_it_writes_to_us(near, far)
    near.relays.forget("far")
    with pytest.raises(TransferError, match="far is gone"):
        await late.wait_for_completion(PATIENCE_S)
    assert near.stat("quarantined_receive_bytes") == LARGE
    other = FarEnd(name="other", relay=RELAY)
    try:
        near.relays.open("other", other.facts)
        other.ask(do="open", facts=near.relays.facts())
        metadata = base64.b64decode(other.ask(do="put", nbytes=100 * MIB, mark=2, backend="nixl"))
        view = await near.relays.get(metadata, request_id="r", peer="other").wait_for_completion(PATIENCE_S)
        far.process.send_signal(signal.SIGCONT)
        await until(lambda: near.stat("quarantined_receive_bytes") == 0)
        assert hashlib.sha256(view).hexdigest() == digest(100 * MIB, 2)
    finally:
        other.close()


@pytest.mark.parametrize("filled_first", [True, False])
async def test_of_what_is_announced_early_nothing_moves_that_was_not_copied_yet(filled_first: bool) -> None:
    with pair("nixl") as both:
        array = np.random.default_rng(0).integers(0, 255, 9 * MIB, np.uint8)
        extracted, operation = both.put(array, early=True)
        if filled_first:
            operation.fill()
        arriving = both.b.get(operation.metadata, request_id="r", peer="a")
        if not filled_first:
            await both.until(lambda: both.a.stats()["nixl_outgoing_transfers"] == 1)
            operation.fill()
        buffer = await arriving.wait_for_completion(PATIENCE_S)
        assert np.array_equal(np.frombuffer(buffer, np.uint8)[: len(array)], array)
        assert extracted.nbytes == operation.copied_nbytes


async def test_a_slot_that_is_being_filled_is_not_used_again_when_its_receiver_is_gone() -> None:
    with pair("nixl") as both:
        _, operation = both.put(np.ones(5 * MIB, np.uint8), early=True)
        both.a.forget("b")
        others = both.a.allocate((5 * MIB,), torch.uint8)
        others[:] = 2
        operation.fill()
        assert int(others.min()) == 2
        del others
        assert both.held() == 0


async def test_a_second_receiver_of_a_slot_that_is_being_filled_gets_all_of_it() -> None:
    with pair("nixl") as both:
        array = np.random.default_rng(0).integers(0, 255, 9 * MIB, np.uint8)
        extracted, first = both.put(array, early=True)
        second = both.put_again(extracted, early=True)
        second.fill()
        arriving = [both.b.get(put.metadata, request_id="r", peer="a") for put in (first, second)]
        await both.until(lambda: both.a.stats()["nixl_outgoing_transfers"] == 2)
        first.fill()
        for one in arriving:
            buffer = await one.wait_for_completion(PATIENCE_S)
            assert np.array_equal(np.frombuffer(buffer, np.uint8)[: len(array)], array)
        assert (first.copied_nbytes, second.copied_nbytes) == (extracted.nbytes, 0)


async def test_an_aborted_get_keeps_its_memory_until_the_sender_says_that_nothing_moves_and_then_releases(
    near: Near, far: FarEnd
) -> None:
    late = await frozen_while_it_writes_to_us(near, far)
    near.relays.cleanup("r")
    with pytest.raises(TransferError, match="aborted"):
        await late.wait_for_completion(PATIENCE_S)
    assert (near.stat("quarantined_receive_bytes"), near.released) == (LARGE, [])
    far.process.send_signal(signal.SIGCONT)
    await until(lambda: near.released == [("far", late.transfer)])
    assert (near.stat("quarantined_receives"), near.stat("receive_bytes_in_use")) == (0, 0)
    assert near.relays.open("far", far.facts)
    again = near.fetch(far, MIB, 7)
    assert set(await again.wait_for_completion(PATIENCE_S)) == {7}


async def test_a_sender_that_is_killed_on_the_way_gives_the_memory_back(near: Near, far: FarEnd) -> None:
    await frozen_while_it_writes_to_us(near, far)
    far.process.kill()
    far.process.wait(PATIENCE_S)
    near.relays.forget("far")
    await until(lambda: near.stat("receive_bytes_in_use") == 0)
    assert near.stat("quarantined_receives") == 0


async def test_a_receiver_that_is_killed_on_the_way_gives_the_slot_back(near: Near, far: FarEnd) -> None:
    operation = await frozen_while_it_reads_from_us(near, far)
    far.process.kill()
    far.process.wait(PATIENCE_S)
    near.relays.forget("far")
    assert operation.done()
    await until(lambda: near.in_use() == 0)


async def test_a_frozen_sender_is_late_and_what_it_sends_when_it_goes_on_is_whole(near: Near, far: FarEnd) -> None:
    operation = await frozen_while_it_writes_to_us(near, far)
    with pytest.raises(TransferError, match=r"not complete after 0\.1 s without progress"):
        await operation.wait_for_completion(0.1)
    far.process.send_signal(signal.SIGCONT)
    view = await operation.wait_for_completion(PATIENCE_S)
    assert hashlib.sha256(view).hexdigest() == digest(LARGE, 1)


async def test_a_process_ends_cleanly_after_it_has_moved_something(near: Near, far: FarEnd) -> None:
    assert set(await near.fetch(far, MIB, 3).wait_for_completion(PATIENCE_S)) == {3}
    far.end_input()
    assert await asyncio.to_thread(far.process.wait, 20) == 0


@pytest.mark.timeout(END_S + 60)
@pytest.mark.parametrize("closes", rows([False, True], each_run=1))
def test_an_interpreter_ends_with_0_whether_or_not_the_relay_was_closed(closes: bool) -> None:
    done = run_to_its_end("nixl", closes=closes)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


async def test_a_process_with_nothing_to_move_uses_next_to_no_processor_time(near: Near, far: FarEnd) -> None:
    """NIXL's own Python class burns a core in each process."""
    held = await near.fetch(far, MIB, 3).wait_for_completion(PATIENCE_S)
    assert await processor_share(far.process.pid, 0.02) <= 0.02
    assert held is not None


async def test_a_process_that_takes_a_new_incarnation_is_reached_again() -> None:
    with pair("nixl") as first:
        assert (await first.carry(np.arange(9000)))[-1] == 8999
    with pair("nixl") as second:
        assert (await second.carry(np.arange(9000)))[-1] == 8999


async def test_peers_cost_no_connection_before_something_moves() -> None:
    with pair("nixl") as both:
        before = len(os.listdir("/proc/self/fd"))
        facts = both.b.facts()["nixl"]
        for number in range(3000):
            assert both.a.open(f"p{number}", {"nixl": {**facts, "agent": f"p{number}"}}) == ("nixl",)
        await both.carry(np.ones(9000))
        assert len(os.listdir("/proc/self/fd")) - before < 50


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": "somebody else"},
        {"metadata": "no hexadecimal"},
        {"metadata": "00" * 100_000},
        {"token": 3},
        {"sends": {"address": -1, "nbytes": 1}},
        {"receives": {"address": 2**63 - 1, "nbytes": 1}},
        {"receives": None},
        {"machine": None},
    ],
    ids=str,
)
async def test_facts_that_are_none_do_not_reach(changes: dict[str, Any]) -> None:
    with pair("nixl") as both:
        assert both.a.open("c", {"nixl": {**both.b.facts()["nixl"], "agent": "c", **changes}}) == ()


async def test_metadata_that_nixl_does_not_know_fails_the_transfer_alone() -> None:
    with pair("nixl") as both:
        facts = both.b.facts()["nixl"]
        both.b.open("c", {"nixl": {**both.a.facts()["nixl"], "agent": "c", "metadata": "00" * 200}})
        _, operation = both.put(np.ones(9000))
        with pytest.raises(TransferError, match="not reached"):
            await both.b.get(operation.metadata, request_id="r", peer="c").wait_for_completion(PATIENCE_S)
        assert (await both.carry(np.arange(9000)))[-1] == 8999
        assert facts


def notices(token: bytes, transfer: int) -> list[bytes]:
    kinds = [
        nixl_messages.NixlGrant(token, transfer, 1, 0, 72_000),
        nixl_messages.Cancel(token, transfer, 1),
        nixl_messages.Written(token, transfer, 1, 72_000),
        nixl_messages.TransferStopped(token, transfer, 1, True, "because"),
    ]
    return [nixl_messages.encode(kind) for kind in kinds]


async def test_what_anybody_may_notify_is_counted_and_changes_nothing() -> None:
    """UCX asks nobody who he is: a notice is believed by its token, from a peer that was opened, about what it has."""
    with pair("nixl") as both:
        _, operation = both.put(np.ones(9000))
        token = bytes.fromhex(both.a.facts()["nixl"]["token"])
        intruder = Agent("intruder")
        intruder.load("a", bytes.fromhex(both.a.facts()["nixl"]["metadata"]))
        garbage = [b"", b"\xff" * 100, b"\x96\x01", *notices(b"", operation.transfer)]
        notices_sent = [*garbage, *notices(bytes(16), operation.transfer), *notices(token, operation.transfer)]
        for message in notices_sent:
            intruder.notify("a", message)
        await both.until(lambda: both.a.stats()["nixl_stray_notices"] == len(notices_sent))
        intruder.close()
        assert bytes(await both.get(operation)) == np.ones(9000).tobytes()


@pytest.mark.parametrize(
    ("offset", "nbytes", "reason"),
    [(0, 71_999, "were granted for 72000"), (1 << 40, 72_000, "were granted for"), (64 * MIB, 72_000, "were granted")],
)
async def test_memory_that_no_receiver_has_is_not_written_to(offset: int, nbytes: int, reason: str) -> None:
    """A receiver that grants what it has not: its own agent says so, with its own token."""
    with pair("nixl") as both:
        relay: Any = both.b._relays["nixl"]
        _, operation = both.put(np.ones(9000))
        fetching = both.b.get(operation.metadata, request_id="r", peer="a")
        assert (await fetching.wait_for_completion(PATIENCE_S)).nbytes == 72_000
        _, second = both.put(np.ones(9000))
        route = relay._connections["a"]
        stopped: list[nixl_messages.TransferStopped] = []
        receiving = relay._receiving.stopped

        def heard(peer: str, notice: nixl_messages.TransferStopped) -> bool:
            stopped.append(notice)
            return bool(receiving(peer, notice))

        relay._receiving.stopped = heard
        relay._worker.post(
            relay._worker.notify, route, nixl_messages.NixlGrant(route.token, second.transfer, 99, offset, nbytes)
        )
        await both.until(lambda: bool(stopped))
        assert reason in stopped[0].reason
        assert (await both.get(second)).nbytes == 72_000


async def test_what_finds_no_memory_waits_for_it_and_large_holdings_are_copied_out() -> None:
    with pair("nixl") as both:  # of 64 MiB
        puts = [both.put(np.full(20 * MIB, mark, np.uint8))[1] for mark in range(3)]
        views = [await both.get(put) for put in puts]
        assert [set(view) for view in views] == [{0}, {1}, {2}]
        assert 0 < both.b.stats()["nixl_copied_out_bytes"]
        assert both.b.stats()["nixl_receive_bytes_in_use"] < 64 * MIB


class Posted:
    """`worker.Worker` whose thread never runs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        self.calls.append((call, *arguments))

    def unload(self, route: NixlRoute) -> None: ...

    def notify(self, route: NixlRoute, notice: nixl_messages.Notice) -> None: ...


async def test_the_route_to_a_peer_that_is_gone_is_closed_when_the_last_of_what_it_was_writing_has_come() -> None:
    loop = asyncio.get_running_loop()
    released = list[tuple[str, int]]()
    memory, worker = Arena(MIB), Posted()
    pins = Pins(loop, lambda *key: released.append(key), threading.local())
    receiver = NixlReceiver(loop, worker, memory, pins, lambda *key: released.append(key))  # type: ignore[arg-type]
    there = nixl_messages.NixlMemory(0, MIB)
    facts = nixl_messages.NixlFacts(
        agent="a", metadata="", token="", sends=there, receives=there, machine="", shares=False, rdma=False
    )
    route = NixlRoute(Peer("a"), facts, b"", b"", reads=False)
    operation = GetOperation(TransferCompletion(loop), TransferId(7), route.peer, b"")
    receiver.claim(route, NixlGet(operation, nixl_messages.NixlMetadata(7, 0, 9000), "r", ""))
    route.gone = True
    receiver.forget(route.peer)
    assert receiver.keeps(route.peer)
    assert receiver.written(route.peer, nixl_messages.Written(b"", 7, 1, 9000))
    assert worker.calls[-1] == (worker.unload, route)
    assert (memory.in_use, released, receiver.keeps(route.peer)) == (0, [], False)
    receiver.close()
    memory.close()


async def test_a_transfer_larger_than_all_memory_is_refused() -> None:
    with pair("nixl", settings=msgspec.structs.replace(SMALL, arena_bytes=2 * MIB)) as both:
        metadata = b"nixl:" + msgspec.msgpack.encode((99, 0, 64 * MIB))
        with pytest.raises(TransferError, match="not inside its arena"):
            both.b.get(metadata, request_id="r", peer="a")


@pytest.fixture
async def sharing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setenv("UCX_TLS", "sm,self,tcp")
    with pair("nixl") as both:
        assert both.a.facts()["nixl"]["shares"]
        yield both


@pytest.mark.parametrize("nbytes", [0, 9000, 40 * MIB + 5])
async def test_who_shares_memory_with_its_sender_reads(sharing: Pair, nbytes: int) -> None:
    array = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
    assert np.array_equal(await sharing.carry(array), array)
    assert sharing.a.stats()["nixl_stray_notices"] == sharing.b.stats()["nixl_stray_notices"] == 0


async def test_what_was_read_from_a_slot_that_has_another_use_is_no_payload(sharing: Pair) -> None:
    """A sender that takes its receiver for gone uses the slot again; the receiver may only have been frozen."""
    _, operation = sharing.put(np.ones(MIB, np.uint8))
    metadata = operation.metadata
    sharing.a.forget("b")
    assert sharing.a.open("b", sharing.b.facts())
    _, other = sharing.put(np.zeros(MIB, np.uint8))
    with pytest.raises(TransferError, match="its slot was reused"):
        await sharing.b.get(metadata, request_id="r", peer="a").wait_for_completion(PATIENCE_S)
    assert set(await sharing.get(other)) == {0}
    await sharing.until(lambda: sharing.b.stats()["nixl_receive_bytes_in_use"] == 0)


async def test_an_author_who_writes_after_a_put_in_place_does_not_change_what_arrives() -> None:
    """The arena gives his tensor other pages; what is registered shows those that were sent."""
    with pair("nixl") as both:
        tensor = both.a.allocate((4 * MIB,), __import__("torch").uint8)
        tensor[:] = 1
        _, operation = both.put({"t": tensor})
        both.a.settle()
        tensor[:] = 2
        copied = both.a.stats()["nixl_copied_bytes"]
        assert set(await both.get(operation)) == {1}
        assert copied < MIB


def test_the_environment_is_tuned_and_what_is_set_stays() -> None:
    found = {"UCX_TCP_SNDBUF": "1m"}
    environment.prepare("tcp://127.0.0.1:*", None, found)
    assert found["UCX_TCP_SNDBUF"] == "1m"
    assert found["UCX_TCP_TX_SEG_SIZE"] == "256k"
    assert (found["UCX_TLS"], found["UCX_MODULES"], found["UCX_NET_DEVICES"]) == ("tcp", "^ib", "lo")


@pytest.mark.parametrize(("allow_tcp", "transports"), [(True, None), (False, "^tcp")])
def test_with_rdma_ucx_has_no_tcp_where_the_pipeline_allows_none(allow_tcp: bool, transports: str | None) -> None:
    """UCX would use TCP where a device does not work, and say nothing."""
    found: dict[str, str] = {}
    environment.prepare("tcp://127.0.0.1:*", None, found, rdma=True, allow_tcp=allow_tcp)
    assert found.get("UCX_TLS") == transports
    assert "UCX_MODULES" not in found and "UCX_NET_DEVICES" not in found


@pytest.mark.parametrize(
    ("set_by_author", "uses"),
    [
        ({}, "rdma memory tcp"),
        ({"UCX_TLS": "all"}, "rdma memory tcp"),
        ({"UCX_TLS": "tcp"}, "tcp"),
        ({"UCX_TLS": "tcp", "UCX_MODULES": "^ib"}, "tcp"),
        ({"UCX_MODULES": "^ib"}, "memory tcp"),
        ({"UCX_MODULES": "^cuda,rocm"}, "rdma memory tcp"),
        ({"UCX_TLS": "rc_x,ud:aux,self"}, "rdma"),
        ({"UCX_TLS": "^tcp"}, "rdma memory"),
        ({"UCX_TLS": "^ib"}, "memory tcp"),
        ({"UCX_TLS": "^rc,ud,dc,sm"}, "tcp"),
        ({"UCX_TLS": "sm,dc"}, "rdma memory"),
        ({"UCX_NET_DEVICES": "eth0"}, "memory tcp"),
        ({"UCX_NET_DEVICES": "eth0,mlx5_1:1"}, "rdma memory tcp"),
        ({"UCX_NET_DEVICES": "all"}, "rdma memory tcp"),
    ],
    ids=str,
)
def test_what_ucx_may_use_follows_from_its_environment(set_by_author: dict[str, str], uses: str) -> None:
    assert environment.used(("mlx5_0", "mlx5_1"), set_by_author) == set(uses.split())
    assert environment.used((), set_by_author) == set(uses.split()) - {"rdma"}


@pytest.mark.parametrize(
    ("bind", "host", "device"),
    [
        ("ipc:///run/x.data", None, "lo"),
        ("tcp://0.0.0.0:*", "127.0.0.1", "lo"),
        ("tcp://0.0.0.0:*", None, None),
        ("tcp://[::1]:*", None, "lo"),
        ("tcp://[::]:*", "[::1]", "lo"),
        ("tcp://[::]:*", "fd00::dead", None),
        ("tcp://0.0.0.0:*", "no.such.host.invalid", None),
    ],
)
def test_ucx_uses_the_interface_whose_address_peers_receive(bind: str, host: str | None, device: str | None) -> None:
    found: dict[str, str] = {}
    environment.prepare(bind, host, found)
    assert found.get("UCX_NET_DEVICES") == device


def test_what_is_missing_is_said_in_one_line() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^relay 'nixl' cannot be loaded .*pip install 'omnipipeline\[nixl\]'$"
    ):
        agent.Agent("x", packages=("no_such_nixl",))


async def test_nixl_s_own_count_has_all_bytes_that_were_moved() -> None:
    with pair("nixl") as both:
        await both.carry(np.ones(3 * MIB + 5, np.uint8))

        def counted() -> int:
            return sum(end.stats()["nixl_library_bytes"] for end in (both.a, both.b))

        await both.until(lambda: counted() >= 3 * MIB + 5)
        assert counted() < 4 * MIB


async def test_the_medium_is_not_rdma_where_ucx_is_set_to_use_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """An author's ``UCX_TLS`` is left as it is, whatever devices there are."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_MODULES", "^ib")
    settings = msgspec.structs.replace(SMALL, rdma=("mlx5_0",), allow_tcp=False)
    with pair("nixl", settings=settings) as both:
        assert both.a.facts()["nixl"]["rdma"] is False
        assert both.a.transport("b", "nixl") == ("refused", "none")


async def test_a_nixl_that_has_no_tcp_does_not_reach_one_that_has_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_MODULES", "^ib")
    with pair("nixl") as both:
        facts = both.b.facts()["nixl"]
        assert facts["tcp"] is True
        assert "nixl" not in both.a.open("c", {"nixl": {**facts, "agent": "c", "tcp": False}})


async def test_the_arena_and_what_nixl_receives_into_keep_their_pages_where_a_device_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # this machine has no device
    monkeypatch.setenv("UCX_MODULES", "^ib")
    for devices, kept in (((), False), (("mlx5_0",), True)):
        with pair("nixl", settings=msgspec.structs.replace(SMALL, rdma=devices)) as both:
            relay: Any = both.a._relays["nixl"]
            for arena in (both.a.arena, relay._received):
                slot = arena.allocate(40 * MIB)
                assert slot is not None
                arena.write(slot, 0, memoryview(bytes(40 * MIB)))
                assert arena.drop(slot)
                before = os.fstat(arena.fd).st_blocks
                arena.trim(), arena.trim()
                assert (os.fstat(arena.fd).st_blocks == before) == kept
