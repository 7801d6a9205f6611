"""How a pack is cut into the frames of the tcp relay, and where its copies lie until they are sent."""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from stage_runtime.payloads import buffers, encoding
from stage_runtime.payloads.pack import Pack
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.tcp import relay
from stage_runtime.relays.tcp.routes import TcpRoute
from tests.relays.relay_pairs import SMALL, pair

MIB = 1 << 20
MMAP_THRESHOLD_NBYTES = 32 * MIB  # glibc's largest: from here on each allocation has fresh pages


@pytest.mark.parametrize(("nbytes", "frames"), [(1, 1), (31 * MIB, 1), (31 * MIB + 1, 8), (32 * MIB, 8)])
def test_no_frame_is_so_large_that_each_one_has_fresh_pages(nbytes: int, frames: int) -> None:
    pack = Pack([buffers.view(np.zeros(nbytes, np.uint8))], [0], nbytes, frozenset([0]))
    cut = list(relay._frames(pack, RelaySettings(), buffers.copied))
    assert len(cut) == frames and all(len(body) < MMAP_THRESHOLD_NBYTES - relay.HEADER_NBYTES for _, body in cut)
    assert [offset for offset, _ in cut] == [sum(len(body) for _, body in cut[:index]) for index in range(frames)]


async def test_what_is_to_be_sent_is_copied_into_the_arena_until_it_is_sent() -> None:
    with pair("tcp") as both:
        array = np.ones(MIB, np.uint8)
        _, operation = both.put(array)
        array[:] = 2
        assert set(await both.get(operation)) == {1}
        await both.until(lambda: both.held() == 0)


async def test_what_nobody_takes_lies_in_the_arena_until_its_receiver_is_forgotten() -> None:
    with pair("tcp") as both:
        facts = both.b.facts()
        facts["tcp"]["endpoint"] = "tcp://127.0.0.1:1"  # nobody listens there
        assert "tcp" in both.a.open("c", facts)
        extracted = encoding.extract(np.ones(MIB, np.uint8))
        assert both.a.put(extracted, request_id="r", peer="c", backend="tcp") is not None
        assert both.a.stats()["arena_bytes_in_use"] >= MIB
        both.a.forget("c")
        await both.until(lambda: both.held() == 0)


async def test_what_finds_no_room_in_the_arena_is_sent_all_the_same() -> None:
    with pair("tcp", settings=msgspec.structs.replace(SMALL, arena_bytes=MIB)) as both:
        assert set(await both.carry(np.full(2 * MIB, 3, np.uint8))) == {3}


class Unsendable:
    """`zmq.Socket` that takes the first frame of each message and no other."""

    def send(self, frame: bytes, flags: int = 0, copy: bool = True) -> None:
        if not flags & zmq.SNDMORE:
            raise zmq.ZMQError(errno.ENOMEM)

    def close(self, linger: int | None = None) -> None: ...


async def test_what_could_not_be_sent_counts_as_unreleased_no_more() -> None:
    with pair("tcp") as both:
        tcp: Any = both.a._relays["tcp"]
        tcp._connections["b"] = TcpRoute("tcp://127.0.0.1:1", b"token", lambda endpoint: Unsendable())  # type: ignore[arg-type, return-value]
        for slot_nbytes in (None, MIB):  # in one piece, in four
            with pytest.raises(zmq.ZMQError):
                both.put(np.ones(4 * MIB, np.uint8), slot_nbytes=slot_nbytes)
            stats = both.a.stats()
            assert (stats["tcp_unreleased_bytes"], stats["tcp_unreleased_transfers"]) == (0, 0)
        await both.until(lambda: both.held() == 0)
