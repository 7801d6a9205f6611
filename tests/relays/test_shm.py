"""Shared memory alone promises no copies where none are needed, and no look at a slot that has another use."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from stage_runtime.errors import TransferError
from stage_runtime.payloads import encoding
from stage_runtime.payloads.pack import Extracted
from stage_runtime.relays.base import RelayOperation
from stage_runtime.relays.shm.relay import ShmMetadata
from tests.relays.relay_pairs import MIB, PATIENCE_S, Pair, pair


@pytest.fixture
async def both() -> AsyncIterator[Pair]:
    with pair("shm") as ends:
        yield ends


def copied(both: Pair) -> int:
    found: int = both.a.stats()["shm_copied_bytes"]
    return found


async def test_a_tensor_that_lies_in_the_arena_is_sent_without_a_copy(both: Pair) -> None:
    tensor = both.a.allocate((1000, 100), torch.float32)
    tensor.copy_(torch.randn(1000, 100))
    arrived = await both.carry({"h": tensor})
    assert torch.equal(arrived["h"], tensor) and copied(both) == 0


@pytest.mark.proves("buffer-written-again")
@pytest.mark.parametrize("count", [20, 100_000])
async def test_an_arena_tensor_that_is_written_again_arrives_as_it_was_given(both: Pair, count: int) -> None:
    """It lies where the receiver reads. Bytes that its author writes later must stay with the author."""
    tensor = both.a.allocate((count,), torch.float32)
    arrived = []
    for number in range(4):
        tensor.fill_(number)
        extracted, operation = both.put({"t": tensor, "n": torch.full((9,), number)})
        both.a.settle()
        tensor.fill_(-1)
        arrived.append(encoding.restore(extracted.value_bytes, extracted.refs, await both.get(operation)))
        tensor[0] = 5
        assert tensor[:2].tolist() == [5, -1]
    assert [one["t"].unique().tolist() for one in arrived] == [[0], [1], [2], [3]]
    assert [one["n"].unique().tolist() for one in arrived] == [[0], [1], [2], [3]]
    tensor.fill_(-2)
    assert arrived[0]["t"].unique().tolist() == [0]


def mappings(both: Pair) -> int:
    """The mappings of a's arena in this process; those of tests before may end at any time."""
    inode = os.fstat(both.a.arena.fd).st_ino
    with open("/proc/self/maps") as maps:
        return sum(int(line.split()[4]) == inode for line in maps)


def in_a_thread(act: Callable[[], Any]) -> Any:
    """The result of ``act`` on a thread of its own: one author's thread must not change what the next does."""
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


async def test_a_slot_that_was_written_after_it_was_given_is_whole_when_it_is_used_again(both: Pair) -> None:
    before = mappings(both)
    for number in range(50):
        tensor = both.a.allocate((3000,), torch.float32).fill_(number)

        def give(tensor: torch.Tensor = tensor) -> tuple[Extracted, RelayOperation]:
            extracted, operation = both.put(tensor)
            both.a.settle()
            return extracted, operation

        extracted, operation = in_a_thread(give)
        tensor.fill_(-1)
        assert mappings(both) == before + 2
        arrived = encoding.restore(extracted.value_bytes, extracted.refs, await both.get(operation))
        assert arrived.unique().tolist() == [number]
        del tensor, extracted, arrived, give
        await operation.wait_for_completion(PATIENCE_S)
    assert copied(both) == 0 and both.held() == 0
    assert mappings(both) == before


async def test_what_nobody_writes_into_any_more_is_neither_copied_nor_mapped_anew(both: Pair) -> None:
    """Its author holds it, as prefill holds a piece of KV until it is sent; the next ones are not copied for that."""
    before = mappings(both)
    for number in range(5):
        tensor = both.a.allocate((3000,), torch.float32).fill_(number)
        extracted = encoding.extract(tensor)
        assert extracted.pack is not None
        extracted.pack = msgspec.structs.replace(extracted.pack, private=frozenset({0}))
        operation = both.put_again(extracted)
        both.a.settle()
        assert mappings(both) == before
        arrived = encoding.restore(extracted.value_bytes, extracted.refs, await both.get(operation))
        assert arrived.unique().tolist() == [number]
        del arrived
        await operation.wait_for_completion(PATIENCE_S)
    assert copied(both) == 0


async def test_what_its_author_let_go_of_is_neither_copied_nor_mapped_anew(both: Pair) -> None:
    before = mappings(both)
    for number in range(20):
        extracted, operation = both.put(both.a.allocate((3000,), torch.float32).fill_(number))
        extracted.pack = None
        both.a.settle()
        assert mappings(both) == before
        arrived = encoding.restore(extracted.value_bytes, extracted.refs, await both.get(operation))
        assert arrived.unique().tolist() == [number]
        del arrived
        await operation.wait_for_completion(PATIENCE_S)
    assert copied(both) == 0


async def test_the_rest_of_its_payload_is_copied_behind_it(both: Pair) -> None:
    tensor = both.a.allocate((1000, 100), torch.float32).fill_(2)
    arrived = await both.carry({"ids": torch.arange(50), "h": tensor, "mask": torch.ones(9, dtype=torch.bool)})
    assert torch.equal(arrived["ids"], torch.arange(50)) and torch.equal(arrived["h"], tensor)
    assert copied(both) == 400 + 9


async def test_a_second_payload_around_the_same_tensor_does_not_overwrite_the_first_one_s_rest(both: Pair) -> None:
    tensor = both.a.allocate((1000, 100), torch.float32).fill_(2)
    first = await both.carry({"h": tensor, "n": torch.full((9,), 1.0)})
    second = await both.carry({"h": tensor, "n": torch.full((9,), 2.0)})
    assert first["n"].tolist() == [1.0] * 9 and second["n"].tolist() == [2.0] * 9


async def test_a_slice_of_an_arena_tensor_with_a_rest_is_copied_and_the_tensor_stays_whole(both: Pair) -> None:
    tensor = both.a.allocate((64, 100), torch.float32).fill_(2)
    arrived = await both.carry({"h": tensor[:32], "n": torch.full((9,), 5.0)})
    assert torch.equal(arrived["h"], tensor[:32])
    assert torch.equal(tensor, torch.full((64, 100), 2.0))


async def test_an_arena_tensor_s_slot_outlives_it_until_the_receiver_is_through(both: Pair) -> None:
    tensor = both.a.allocate((5000,), torch.float32).fill_(4)
    extracted, operation = both.put(tensor)
    buffer = await both.get(operation)
    del tensor
    extracted.pack = None
    other = both.a.allocate((5000,), torch.float32).fill_(5)
    assert np.frombuffer(buffer, np.float32).tolist() == [4.0] * 5000
    del buffer
    await operation.wait_for_completion(PATIENCE_S)
    del other, extracted
    assert both.held() == 0


async def test_a_full_arena_gives_authors_ordinary_memory(both: Pair) -> None:
    kept = [both.a.allocate((60 * MIB,), torch.uint8) for _ in range(2)]
    arrived = await both.carry({"t": torch.ones(3)})
    assert [len(one) for one in kept] == [60 * MIB] * 2 and arrived["t"].sum() == 3


async def test_a_message_about_a_slot_that_has_another_use_is_refused(both: Pair) -> None:
    _, operation = both.put(np.ones(9000))
    metadata = operation.metadata
    buffer = await both.get(operation)
    del buffer
    await operation.wait_for_completion(PATIENCE_S)
    with pytest.raises(TransferError, match="its slot was reused"):
        both.b.get(metadata, request_id="r", peer="a")
    _, again = both.put(np.zeros(9000))
    with pytest.raises(TransferError, match="its slot was reused"):
        both.b.get(metadata, request_id="r", peer="a")
    assert bytes(await both.get(again)) == bytes(72_000)


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": -64},
        {"offset": 0},
        {"offset": 1 << 50},
        {"nbytes": -1},
        {"nbytes": 1 << 50},
        {"nbytes": 80_000},
        {"start": 0},
        {"start": -4096},
        {"start": 1 << 50},
        {"generation": 0},
    ],
    ids=str,
)
async def test_metadata_that_points_elsewhere_is_refused(both: Pair, lie: Any) -> None:
    _, operation = both.put(np.ones(9000))
    metadata = msgspec.msgpack.decode(operation.metadata.removeprefix(b"shm:"), type=ShmMetadata)
    forged = b"shm:" + msgspec.msgpack.encode(msgspec.structs.replace(metadata, **lie))
    with pytest.raises(TransferError):
        both.b.get(forged, request_id="r", peer="a")
    assert len(await both.get(operation)) == 72_000


@pytest.mark.proves("client-disconnects")
async def test_aborting_a_request_quarantines_what_its_receiver_may_still_read(both: Pair) -> None:
    _, operation = both.put(np.ones(9000))
    buffer = await both.get(operation)
    both.a.cleanup("r")
    assert both.a.stats()["slots_quarantined"] == 1
    del buffer
    await operation.wait_for_completion(PATIENCE_S)
    assert both.a.stats()["slots_quarantined"] == 0


async def test_one_payload_for_two_receivers_is_copied_once(both: Pair) -> None:
    extracted, first = both.put(np.arange(9000))
    second = both.put_again(extracted)
    assert copied(both) == 72_000
    for operation in (first, second):
        both.a.discard(operation)


async def test_a_large_copy_lies_half_a_page_beside_its_source(both: Pair) -> None:
    for skip in (0, 64, 1000, 4000):
        source = np.ones(16 * MIB + 4096, np.uint8)[skip : skip + 16 * MIB]
        _, operation = both.put(source)
        metadata = msgspec.msgpack.decode(operation.metadata.removeprefix(b"shm:"), type=ShmMetadata)
        apart = (both.a.arena._address + metadata.offset - source.ctypes.data) % 4096
        assert 2048 - 64 < apart <= 2048
        both.a.discard(operation)
        await asyncio.sleep(0)


async def test_an_output_tensor_is_the_host_s_whatever_default_device_a_factory_has_set(both: Pair) -> None:
    with torch.device("meta"):
        found = [both.a.allocate(shape, torch.float32) for shape in ((0,), (8,), (1 << 28,))]
    assert [str(tensor.device) for tensor in found] == ["cpu"] * 3
