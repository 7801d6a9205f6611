"""A pack that is larger than a slot goes as several transfers, by every relay alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import TransferError
from stage_runtime.payloads import encoding
from stage_runtime.payloads.pack import Pack, flatten
from stage_runtime.relays import pieces
from stage_runtime.relays.registry import RELAYS
from tests.relays.relay_pairs import MIB, PATIENCE_S, SMALL, pair


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6), st.integers(1, 50), st.booleans())
def test_pieces_together_are_the_pack(parts: Sequence[tuple[int, int]], most: int, private: bool) -> None:
    data, offsets, end = [], [], 0
    for nbytes, gap in parts:
        offsets.append(end + gap)
        data.append(memoryview(bytes(range(1, nbytes + 1))))
        end += gap + nbytes
    pack = Pack(data, offsets, end, frozenset(range(len(data))) if private else frozenset())
    cut = list(pieces.cut(pack, most))
    assert [piece.nbytes for piece in cut] == [min(most, end - start) for start in range(0, end, most)]
    together = bytearray()
    for piece in cut:
        padded = bytearray(piece.nbytes)
        for part, offset in zip(piece.parts, piece.offsets, strict=True):
            padded[offset : offset + len(part)] = part
        together += padded
    whole = bytearray(end)
    for part, offset in zip(data, offsets, strict=True):
        whole[offset : offset + len(part)] = part
    assert together == whole
    assert all(len(piece.private) == (len(piece.parts) if private else 0) for piece in cut)


@pytest.mark.parametrize("name", list(RELAYS))
async def test_what_is_larger_than_a_slot_arrives_and_every_piece_is_released(name: str) -> None:
    with pair(name) as both:
        value = [np.arange(3 * MIB + 17, dtype=np.uint8), b"x" * 70_000, np.ones(5)]
        extracted, put = both.put(value, slot_nbytes=MIB)
        assert len(put.transfers) == 4
        view = await both.get(put)
        assert bytes(view) == flatten(extracted.pack)  # type: ignore[arg-type]
        restored = encoding.restore(extracted.value_bytes, extracted.refs, view)
        assert np.array_equal(restored[0], np.arange(3 * MIB + 17, dtype=np.uint8))
        await both.until(lambda: both.held() == 0)
        assert sorted(transfer for _, _, transfer in both.told) == sorted(put.transfers)
        assert put.done()
        await put.wait_for_completion(PATIENCE_S)


@pytest.mark.parametrize("name", list(RELAYS))
async def test_a_piece_that_ends_in_the_gap_between_two_parts_arrives(name: str) -> None:
    with pair(name) as both:
        value = [np.full(MIB - 1, 1, np.uint8), np.full(MIB - 1, 2, np.uint8)]
        for most in (MIB, MIB + 32):  # the second piece of the latter begins behind the gap
            extracted, put = both.put(value, slot_nbytes=most)
            restored = encoding.restore(extracted.value_bytes, extracted.refs, await both.get(put))
            assert all(map(np.array_equal, restored, value))


@pytest.mark.parametrize("name", ["shm", "nixl", "mooncake"])  # tcp has no slots
async def test_a_piece_without_room_leaves_no_other_one_in_use(name: str) -> None:
    with pair(name) as both:
        extracted = encoding.extract(np.ones(100 * MIB, np.uint8))  # of an arena of 64
        assert both.a.put(extracted, request_id="r", peer="b", backend=name, slot_nbytes=8 * MIB) is None
        assert both.held() == 0


@pytest.mark.parametrize("name", ["shm", "nixl", "mooncake", "tcp"])
async def test_a_put_that_waits_for_room_is_cut_as_one_that_does_not(name: str) -> None:
    settings = msgspec.structs.replace(SMALL, arena_bytes=8 * MIB, unreleased_bytes=8 * MIB)
    with pair(name, settings=settings) as both:
        _, first = both.put(np.ones(6 * MIB, np.uint8))
        extracted = encoding.extract(np.full(5 * MIB, 2, np.uint8))
        to_b: dict[str, Any] = {"request_id": "r", "peer": "b", "backend": name, "slot_nbytes": 2 * MIB}
        waiting = asyncio.ensure_future(both.a.put_async(extracted, **to_b))
        await asyncio.sleep(0)
        assert not waiting.done()
        buffer = await both.get(first)
        del buffer
        put = await asyncio.wait_for(waiting, PATIENCE_S)
        assert len(put.transfers) == 3
        assert set(bytes(await both.get(put))) == {2}


async def test_pieces_that_are_declined_or_false_are_released() -> None:
    with pair("shm") as both:
        _, put = both.put(np.ones(3 * MIB, np.uint8), slot_nbytes=MIB)
        both.b.decline(put.metadata, peer="a")
        assert both.held() == 0
        for garbage in (b"shm:+", b"shm:+\x92\x01\x90", b"shm:+\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x91\xc4\x00"):
            with pytest.raises(TransferError):
                both.b.get(garbage, request_id="r", peer="a")
        _, put = both.put(np.ones(3 * MIB, np.uint8), slot_nbytes=MIB)
        lied = pieces.announced(put.metadata.partition(b":")[2], 1 << 30)
        with pytest.raises(TransferError, match="bytes came"):
            both.b.get(b"shm:+" + pieces_of(lied.nbytes + 1, lied.pieces), request_id="r", peer="a").take()


def pieces_of(nbytes: int, parts: tuple[bytes, ...]) -> bytes:
    return msgspec.msgpack.encode(pieces.PiecesAnnouncement(nbytes, parts))
