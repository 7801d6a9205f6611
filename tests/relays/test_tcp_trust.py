"""The tcp relay lets in nothing that was not asked for, and nothing without bound."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from stage_runtime.errors import ConfigurationError, RelayFailed, TransferError
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.tcp.arrivals import FrameHeader
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from tests.relays.relay_pairs import MIB, PATIENCE_S, SMALL, Pair, pair

STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start


@pytest.fixture
async def both() -> AsyncIterator[Pair]:
    with pair("tcp") as ends:
        yield ends


class Forger:
    """Somebody with a socket of his own, who talks to b."""

    def __init__(self, both: Pair) -> None:
        facts = both.b.facts()["tcp"]
        self.token = bytes.fromhex(facts["token"])
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.linger = 0
        self.socket.connect(facts["endpoint"])

    def header(self, **changes: Any) -> bytes:
        fields = {"token": self.token, "sender": "a", "transfer": 77, "request_id": "r", "nbytes": 100, "offset": 0}
        return msgspec.msgpack.encode(FrameHeader(**{**fields, **changes}))

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def close(self) -> None:
        self.context.destroy(linger=0)  # also sockets that a test which failed has left


@pytest.fixture
def forger(both: Pair) -> Iterator[Forger]:
    one = Forger(both)
    yield one
    one.close()


def garbage(both: Pair) -> int:
    found: int = both.b.stats()["tcp_malformed_messages"]
    return found


METADATA = b"tcp:" + msgspec.msgpack.encode([77, 100])


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"garbage", b"x" * 100],
        [b"x", b"y", b"z"],
        [msgspec.msgpack.encode({"token": 1}), b"x" * 100],
        [b"\xdd\xff\xff\xff\xff", b""],
        [b"\x96\xc4\x01t\xa1\xff\x01\xa1r\x01\x00", b"a sender that is not text"],
        {"token": b"\0" * 16},
        {"sender": "gone"},
        {"offset": -1},
        {"offset": 1},
        {"nbytes": 99},
        {"nbytes": -5},
        {"nbytes": 1 << 60},
    ],
    ids=str,
)
async def test_garbage_is_counted_and_dropped_and_what_follows_is_served(
    both: Pair, forger: Forger, frames: Any
) -> None:
    both.b.open("gone", both.a.facts())
    both.b.forget("gone")
    forger.send(*(frames if isinstance(frames, list) else [forger.header(**frames), b"x" * 100]))
    await both.until(lambda: garbage(both) == 1)
    assert (await both.carry({"a": np.ones(9000)}))["a"].sum() == 9000
    assert both.b.stats()["tcp_unclaimed_bytes"] == 0


async def test_the_forger_s_true_messages_do_arrive(both: Pair, forger: Forger) -> None:
    """The positive control of the tests above: but for what they change, such a message is taken."""
    forger.send(forger.header(), b"x" * 100)
    buffer = await both.b.get(METADATA, request_id="r", peer="a").wait_for_completion(PATIENCE_S)
    assert bytes(buffer) == b"x" * 100 and garbage(both) == 0


async def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(both: Pair, forger: Forger) -> None:
    size = 40 * MIB
    with forger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        forger.send(forger.header(nbytes=size), bytes(size))
        assert await asyncio.to_thread(monitor.poll, int(PATIENCE_S * 1000)), "it is still connected"
        forger.socket.disable_monitor()
    assert (await both.carry({"a": np.ones(9000)}))["a"].sum() == 9000
    assert both.b.stats()["tcp_unclaimed_bytes"] == 0


async def test_a_lost_piece_fails_the_transfer_at_once_and_releases_it(both: Pair, forger: Forger) -> None:
    fetching = both.b.get(b"tcp:" + msgspec.msgpack.encode([77, 300]), request_id="r", peer="a")
    forger.send(forger.header(nbytes=300), b"x" * 100)
    forger.send(forger.header(nbytes=300, offset=200), b"x" * 100)
    with pytest.raises(TransferError, match="a piece of it was lost"):
        await fetching.wait_for_completion(PATIENCE_S)
    await both.until(lambda: ("b", "a", 77) in both.released)
    assert both.b.stats()["tcp_dropped_transfers"] == 1


async def test_a_transfer_that_finds_no_memory_fails_at_once_and_is_not_delivered_with_a_hole() -> None:
    most = 1 << 50  # bytes: more than a process can map
    settings = msgspec.structs.replace(SMALL, transfer_bytes=most, unclaimed_bytes=most)
    with pair("tcp", settings=settings) as both:
        forger = Forger(both)
        try:
            fetching = both.b.get(b"tcp:" + msgspec.msgpack.encode([77, most]), request_id="r", peer="a")
            forger.send(forger.header(nbytes=most), b"x" * 100)
            with pytest.raises(TransferError, match="this process has no memory for its"):
                await fetching.wait_for_completion(PATIENCE_S)
            await both.until(lambda: ("b", "a", 77) in both.released)
            assert (await both.carry({"a": np.ones(9000)}))["a"].sum() == 9000
        finally:
            forger.close()


async def test_a_transfer_that_broke_before_it_was_announced_is_refused_when_it_is(both: Pair, forger: Forger) -> None:
    forger.send(forger.header(nbytes=300), b"x" * 100)
    forger.send(forger.header(nbytes=300, offset=250), b"x" * 50)
    await both.until(lambda: both.b.stats()["tcp_dropped_transfers"] == 1)
    with pytest.raises(TransferError, match="a piece of it was lost"):
        both.b.get(b"tcp:" + msgspec.msgpack.encode([77, 300]), request_id="r", peer="a")
    assert ("b", "a", 77) in both.released
    assert both.b.stats()["tcp_unclaimed_bytes"] == 0


async def test_a_transfer_of_another_size_than_announced_is_refused(both: Pair, forger: Forger) -> None:
    fetching = both.b.get(b"tcp:" + msgspec.msgpack.encode([77, 300]), request_id="r", peer="a")
    forger.send(forger.header(), b"x" * 100)
    with pytest.raises(TransferError, match="100 bytes came, 300 were announced"):
        await fetching.wait_for_completion(PATIENCE_S)


async def test_what_nobody_fetches_is_bounded() -> None:
    few = msgspec.structs.replace(SMALL, unclaimed_bytes=3 * MIB)
    with pair("tcp", settings=few) as both:
        puts = [both.put(np.full(MIB, mark, np.uint8))[1] for mark in range(5)]
        await both.until(lambda: both.b.stats()["tcp_dropped_transfers"] == 2)
        assert both.b.stats()["tcp_unclaimed_bytes"] == 3 * MIB
        for mark, operation in enumerate(puts[:3]):
            assert bytes(await both.get(operation)) == bytes([mark]) * MIB
        for operation in puts[3:]:
            with pytest.raises(TransferError, match="found no room"):
                await both.get(operation)
            await operation.wait_for_completion(PATIENCE_S)
        assert both.b.stats()["tcp_unclaimed_bytes"] == 0
        assert (await both.carry({"a": np.ones(9000)}))["a"].sum() == 9000


async def test_an_aborted_request_s_transfers_are_dropped_and_its_waiters_fail(both: Pair, forger: Forger) -> None:
    waiting = both.b.get(METADATA, request_id="r", peer="a")
    forger.send(forger.header(transfer=78), b"y" * 100)
    await both.until(lambda: both.b.stats()["tcp_unclaimed_bytes"] == 100)
    both.b.cleanup("r")
    with pytest.raises(TransferError, match="aborted"):
        await waiting.wait_for_completion(PATIENCE_S)
    assert ("b", "a", 77) in both.released
    forger.send(forger.header(), b"late" * 25)
    forger.send(forger.header(transfer=79), b"y" * 100)
    await both.until(lambda: both.b.stats()["tcp_received_transfers"] == 2)
    assert both.b.stats()["tcp_unclaimed_bytes"] == 100


async def test_senders_that_are_never_introduced_are_forgotten_and_the_others_are_not() -> None:
    """Processes that have ended before their introduction came: in months, many."""
    with pair("tcp", settings=msgspec.structs.replace(SMALL, unclaimed_s=0.1)) as both:
        relay = both.b._relays["tcp"]
        forger = Forger(both)
        try:
            await both.carry(np.ones(9000))
            for number in range(50):
                forger.send(forger.header(sender=f"s{number}"), b"x" * 100)
            await both.until(lambda: both.b.stats()["tcp_received_transfers"] == 51)
            await both.until(lambda: len(relay._movement) == 1)  # type: ignore[attr-defined]
            assert both.b.stats()["tcp_unclaimed_bytes"] == 0
            assert (await both.carry(np.arange(1000))).sum() == 499500
        finally:
            forger.close()


async def test_pieces_of_the_forgotten_are_garbage(both: Pair, forger: Forger) -> None:
    forger.send(forger.header(nbytes=300), b"x" * 100)
    await both.until(lambda: both.b.stats()["tcp_unclaimed_bytes"] == 300)
    both.b.forget("a")
    assert both.b.stats()["tcp_unclaimed_bytes"] == 0
    forger.send(forger.header(nbytes=300, offset=100), b"x" * 200)
    await both.until(lambda: garbage(both) == 1)


@pytest.mark.parametrize("theirs", [b"k" * 32, b"x" * 32, None], ids=["same key", "another key", "no key"])
async def test_with_curve_only_members_are_heard(theirs: Any) -> None:
    with pair("tcp", security=CurveSecurity(b"k" * 32)) as both:
        assert (await both.carry({"a": np.ones(200_000)}))["a"].sum() == 200_000
        one = Forger.__new__(Forger)
        facts = both.b.facts()["tcp"]
        one.token, one.context = bytes.fromhex(facts["token"]), zmq.Context()
        one.socket = one.context.socket(zmq.PUSH)
        one.socket.linger = 0
        if theirs is not None:
            CurveSecurity(theirs).client(one.socket)
        one.socket.connect(facts["endpoint"])
        try:
            with contextlib.suppress(zmq.Again):  # without a key it may be refused, and for good, before it sends
                one.socket.send_multipart([one.header(), b"x" * 100], zmq.NOBLOCK)
            fetching = both.b.get(METADATA, request_id="r", peer="a")
            if theirs == b"k" * 32:
                assert bytes(await fetching.wait_for_completion(PATIENCE_S)) == b"x" * 100
            else:
                with pytest.raises(TransferError):
                    await fetching.wait_for_completion(0.3)
        finally:
            one.close()


#: The first bytes of an end with CURVE: signature, version 3.0, mechanism, filler.
OF_ANOTHER_PIPELINE = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


async def test_a_put_to_an_address_that_another_pipeline_has_taken_blocks_no_thread() -> None:
    """A peer's address may be another pod's before its death is known. libzmq never connects again to an end that
    speaks another protocol, and would wait for ever to send.
    """
    given_up = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OF_ANOTHER_PIPELINE)
        await reader.read()  # until the other end closes the connection
        given_up.set()
        writer.close()

    taken = await asyncio.start_server(greet, "127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{taken.sockets[0].getsockname()[1]}"
    with pair("tcp") as both:
        both.a.forget("b")
        both.a.open("b", {"tcp": {**both.b.facts()["tcp"], "endpoint": endpoint}})
        try:
            with contextlib.suppress(RelayFailed):  # each new socket may be refused before it sends
                both.put(np.ones(9000))
            await asyncio.wait_for(given_up.wait(), PATIENCE_S)
            for _ in range(20):  # libzmq's thread lets go of it at one of them
                with contextlib.suppress(RelayFailed):
                    await asyncio.wait_for(asyncio.to_thread(both.put, np.ones(9000)), PATIENCE_S)
                await asyncio.sleep(0.005)
            both.a.forget("b")
            both.a.open("b", both.b.facts())
            assert (await both.carry(np.arange(9000))).sum() == 40495500
        finally:
            taken.close()


async def test_an_address_that_is_taken_is_a_fault_of_the_configuration(both: Pair) -> None:
    taken = msgspec.structs.replace(SMALL, bind=both.a.facts()["tcp"]["endpoint"])
    with pytest.raises(ConfigurationError, match="cannot bind"):
        Relays(
            loop=asyncio.get_running_loop(),
            incarnation="c",
            on_release=lambda peer, transfer: None,
            settings=taken,
        )


@pytest.mark.parametrize("security", [None, CurveSecurity(bytes(32))], ids=["plain", "curve"])
async def test_a_process_without_a_thread_for_it_is_refused_and_does_not_hang(security: CurveSecurity | None) -> None:
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        with pytest.raises(ConfigurationError, match="tcp relay: can't start new thread"):
            Relays(
                loop=asyncio.get_running_loop(),
                incarnation="c",
                on_release=lambda peer, transfer: None,
                security=security,
                settings=SMALL,
            )
    finally:
        threading.stack_size(before)
    gc.collect()  # which ends libzmq's contexts


@pytest.mark.parametrize(
    ("bind", "host", "wanted"),
    [
        ("tcp://127.0.0.1:*", "10.1.2.3", "tcp://10.1.2.3:"),
        ("tcp://127.0.0.1:*", "fd00::1", "tcp://[fd00::1]:"),
        ("tcp://127.0.0.1:*", "[fd00::1]", "tcp://[fd00::1]:"),
        ("tcp://127.0.0.1:*", None, "tcp://127.0.0.1:"),
    ],
)
async def test_peers_receive_the_advertised_host(bind: str, host: str, wanted: str) -> None:
    with pair("shm", settings=msgspec.structs.replace(SMALL, bind=bind, advertise_host=host)) as both:
        endpoint = both.a.facts()["tcp"]["endpoint"]
        assert endpoint.startswith(wanted) and int(endpoint.removeprefix(wanted)) > 0


async def test_what_nobody_asks_for_in_time_is_dropped_and_its_sender_released() -> None:
    """A connection that broke may deliver what its request has long given up."""
    with pair("tcp", settings=msgspec.structs.replace(SMALL, unclaimed_s=0.2)) as both:
        _, late = both.put(np.zeros(MIB, np.uint8))
        await both.until(lambda: both.b.stats()["tcp_unclaimed_bytes"] == MIB)
        await both.until(lambda: both.b.stats()["tcp_unclaimed_bytes"] == 0)
        with pytest.raises(TransferError, match="in time"):
            await both.get(late)
        await both.until(lambda: both.held() == 0)
        assert (await both.carry(np.arange(1000))).sum() == 499500
