"""A pack that is larger than a slot goes as several transfers, by every relay alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import TransferError, ValueRefused
from stage_runtime.payloads import encoding
from stage_runtime.payloads.pack import Pack, flatten
from stage_runtime.relays.moving import pieces
from stage_runtime.relays.registry import RELAYS
from tests.relays.relay_pairs import MIB, PATIENCE_S, SMALL, Pair, pair


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
        assert sorted(transfer for _, _, transfer in both.released) == sorted(put.transfers)
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


@pytest.mark.parametrize("name", list(RELAYS))
async def test_of_pieces_that_find_no_room_together_none_is_copied_or_sent(name: str) -> None:
    settings = msgspec.structs.replace(SMALL, arena_bytes=10 * MIB, unreleased_bytes=8 * MIB)
    with pair(name, settings=settings) as both:
        _, first = both.put(np.ones(3 * MIB, np.uint8))
        buffer = await both.get(first)
        await both.until(
            lambda: not both.a.stats().get(f"{name}_outgoing_transfers")
        )  # the sender may learn of it later
        before = both.a.stats()
        extracted = encoding.extract(np.ones(7 * MIB, np.uint8))
        for _ in range(5):
            assert both.a.put(extracted, request_id="r", peer="b", backend=name, slot_nbytes=2 * MIB) is None
        assert both.a.stats() == before
        assert (both.kept(), len(buffer)) == (0, 3 * MIB)
        del buffer
        await both.until(lambda: both.held() == 0)
        assert len(both.put_again(extracted, slot_nbytes=2 * MIB).transfers) == 4


@pytest.mark.proves("payload-too-large")
@pytest.mark.parametrize("name", list(RELAYS))
@pytest.mark.parametrize("slot_nbytes", [None, 2 * MIB, 100_001])
async def test_what_an_empty_relay_has_no_room_for_is_refused_at_once_and_nothing_smaller_is(
    name: str, slot_nbytes: int | None
) -> None:
    settings = msgspec.structs.replace(SMALL, arena_bytes=18 * MIB, unreleased_bytes=18 * MIB)
    with pair(name, settings=settings) as both:
        _, small = both.put(np.ones(2 * MIB, np.uint8), "small")
        to_b: dict[str, Any] = {"request_id": "r", "peer": "b", "backend": name, "slot_nbytes": slot_nbytes}
        largest = encoding.extract({"a": np.ones(18 * MIB + 1, np.uint8)})
        sizes = (
            rf"data\['a'\]: part of a payload of {18 * MIB + 1} bytes, and the relay {name} carries at most 1\d{{7}} b"
        )
        with pytest.raises(ValueRefused, match=sizes):
            both.a.put(largest, **to_b)
        with pytest.raises(ValueRefused, match=sizes):
            both.a.check(largest, peer="b", backend=name, slot_nbytes=slot_nbytes)
        with pytest.raises(ValueRefused, match=r"at once: (raise OMNI_ARENA_MB|send it in parts)"):
            await both.a.put_async(largest, **to_b)
        largest = encoding.extract(np.ones(_most(both, slot_nbytes), np.uint8))
        assert both.a.put(largest, **to_b) is None, "it waits for the small one"
        buffer = await both.get(small)
        del buffer
        await small.wait_for_completion(PATIENCE_S)
        await both.until(lambda: both.held() == 0)
        assert both.a.put(largest, **to_b) is not None


def _most(both: Pair, slot_nbytes: int | None) -> int:
    """The most bytes of a payload that ``both.a`` does not refuse."""
    relay = both.a._relays[both.backend]
    return next(
        nbytes
        for nbytes in range(18 * MIB, 0, -1000)
        if relay.refusal(nbytes, 1 if slot_nbytes is None else -(-nbytes // slot_nbytes)) is None
    )


async def test_an_author_s_tensor_goes_in_pieces_from_where_it_lies_when_nothing_else_has_room() -> None:
    with pair("shm", settings=msgspec.structs.replace(SMALL, arena_bytes=8 * MIB)) as both:
        tensor = both.a.allocate((6 * MIB,), torch.uint8)
        tensor[:] = torch.arange(6 * MIB).to(torch.uint8)
        extracted, put = both.put(tensor, slot_nbytes=MIB)
        assert (len(put.transfers), put.copied_nbytes) == (6, 0)
        assert torch.equal(encoding.restore(extracted.value_bytes, extracted.refs, await both.get(put)), tensor)


async def test_a_piece_that_begins_in_a_gap_is_not_read_from_an_author_s_tensor_beside_it() -> None:
    with pair("shm") as both:
        value = [both.a.allocate((MIB - 33,), torch.uint8).fill_(1), both.a.allocate((MIB - 33,), torch.uint8).fill_(2)]
        extracted, put = both.put(value, slot_nbytes=MIB - 16)
        restored = encoding.restore(extracted.value_bytes, extracted.refs, await both.get(put))
        assert all(map(torch.equal, restored, value))


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
