"""The arena: what is in use, whose it is, and what is given back."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.errors import ConfigurationError
from stage_runtime.payloads.pack import ALIGNMENT, Pack
from stage_runtime.relays.memory.arena import PAGE, Arena
from stage_runtime.relays.memory.placing import Placing
from stage_runtime.relays.memory.slots import IllegalTransition, Slot, SlotState
from tests.thoroughness import examples

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(8 * MIB, prefault_nbytes=MIB)
    yield one
    one.close()


def resident(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def in_use(arena: Arena) -> int:
    return arena.stats()["arena_bytes_in_use"]


def state_of(slot: Slot) -> SlotState:
    """Asked anew each time: a type checker takes an attribute to stay what it was compared with."""
    return slot.state


def allocated(arena: Arena, nbytes: int) -> Slot:
    slot = arena.allocate(nbytes)
    assert slot is not None
    return slot


def test_data_begins_at_a_multiple_of_64(arena: Arena) -> None:
    slots = [allocated(arena, nbytes) for nbytes in (1, 64, 4096, 100_000)]
    assert [slot.offset % 64 for slot in slots] == [0] * 4


def test_an_exhausted_arena_gives_none_until_something_is_free(arena: Arena) -> None:
    first, second = allocated(arena, 4 * MIB), allocated(arena, 3 * MIB)
    assert arena.allocate(2 * MIB) is None
    assert arena.drop(first)
    assert allocated(arena, 2 * MIB).start == first.start
    assert second.state is SlotState.FILLING


def test_a_slot_is_free_only_after_sender_and_all_receivers_have_let_go(arena: Arena) -> None:
    slot = allocated(arena, 100)
    arena.sent(slot)
    arena.sent(slot)
    assert not arena.drop(slot)
    assert not arena.released(slot)
    assert state_of(slot) is SlotState.IN_FLIGHT
    assert arena.released(slot)
    assert state_of(slot) is SlotState.FREE and in_use(arena) == 0


def test_a_quarantined_slot_is_not_used_again_until_it_is_released(arena: Arena) -> None:
    slot = allocated(arena, 100)
    arena.sent(slot)
    arena.drop(slot)
    arena.aborted(slot)
    assert arena.stats()["slots_quarantined"] == 1
    assert not arena.share(slot)
    assert allocated(arena, 100).start != slot.start
    assert arena.released(slot)


def test_a_slot_cannot_be_freed_twice(arena: Arena) -> None:
    slot = allocated(arena, 100)
    assert arena.drop(slot)
    with pytest.raises(IllegalTransition):
        arena.drop(slot)
    assert in_use(arena) == 0


def test_every_use_of_a_slot_has_a_generation_of_its_own(arena: Arena) -> None:
    seen = set()
    for _ in range(5):
        slot = allocated(arena, 100)
        seen.add((slot.start, slot.generation))
        arena.drop(slot)
    assert len(seen) == 5 and len({start for start, _ in seen}) == 1


def test_a_tensor_of_the_arena_holds_its_slot_until_its_last_view_is_gone(arena: Arena) -> None:
    tensor = arena.allocate_tensor((100, 100), torch.bfloat16)
    assert tensor.shape == (100, 100) and tensor.dtype == torch.bfloat16
    view = tensor[3]
    del tensor
    assert in_use(arena) > 0
    del view
    assert in_use(arena) == 0


def test_a_tensor_that_is_sent_holds_its_slot_until_it_is_released_too(arena: Arena) -> None:
    tensor = arena.allocate_tensor((1000,), torch.float32)
    found = arena.find(memoryview(tensor[16:32].numpy().view(np.uint8)))
    assert found is not None
    slot, at = found
    assert at == 64
    arena.sent(slot)
    del tensor
    gc.collect()
    assert in_use(arena) > 0
    arena.released(slot)
    assert in_use(arena) == 0


def test_memory_from_elsewhere_is_not_found_in_the_arena(arena: Arena) -> None:
    kept = arena.allocate_tensor((1000,), torch.float32)
    assert kept is not None
    assert arena.find(memoryview(bytearray(100))) is None
    assert arena.find(memoryview(b"")) is None


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_tensor_takes_no_slot(arena: Arena, shape: tuple[int, ...]) -> None:
    assert arena.allocate_tensor(shape, torch.float32).shape == shape
    assert in_use(arena) == 0


@pytest.mark.parametrize("shape", [(-2,), (-1, -1), (2.0,), (float("nan"),), ("2",), (1 << 70,), None], ids=str)
def test_a_shape_that_no_tensor_has_takes_no_slot_and_the_next_tensor_is_whole(arena: Arena, shape: Any) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        arena.allocate_tensor(shape, torch.float32)
    gc.collect()
    assert in_use(arena) == 0
    assert arena.allocate_tensor((1000,), torch.float32).shape == (1000,)


def test_a_tensor_is_copied_where_no_descriptor_is_left_for_a_second_mapping(arena: Arena) -> None:
    tensor = arena.allocate_tensor((100_000,), torch.uint8)
    part = memoryview(tensor.numpy())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        assert arena.read_region(part) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    region = arena.read_region(part)
    arena.settle()
    assert region is not None and len(region) == 100_000
    del tensor, part, region
    assert in_use(arena) == 0


class Interrupted(Sequence[memoryview]):
    """The parts of a pack; another thread goes on as soon as the parts behind the first are looked at."""

    def __init__(self, parts: list[memoryview], other: Callable[[], None]) -> None:
        self._parts = parts
        self._other = other

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            self._other()
        return self._parts[index]


def test_the_rest_behind_a_tensor_that_another_thread_has_sent_meanwhile_reaches_its_receivers(arena: Arena) -> None:
    tensor = arena.allocate_tensor((100_000,), torch.uint8)
    tensor.fill_(7)
    part, rest = memoryview(tensor.numpy()), memoryview(b"behind it")
    placing = Placing(arena)
    assert placing.place(Pack([part], [0], 100_000)) is not None  # by the other thread, whose author keeps the tensor
    offset = 100_000 + -100_000 % ALIGNMENT
    both = Pack(Interrupted([part, rest], arena.settle), [0, offset], offset + len(rest))
    placed = placing.place(both)
    assert placed is not None
    with arena.map_again() as seen_by_peers:
        start = placed.offset + offset
        assert seen_by_peers[placed.offset : placed.offset + 3] == b"\7\7\7"
        assert seen_by_peers[start : start + len(rest)] == bytes(rest)


def test_memory_above_recent_use_is_given_back_and_what_was_prefaulted_is_kept(arena: Arena) -> None:
    slot = allocated(arena, 6 * MIB)
    arena.write(slot, 0, memoryview(bytes(6 * MIB)))
    arena.drop(slot)
    assert resident(arena) >= 6 * MIB
    assert arena.trim() == 0  # it was in use since the last time
    assert arena.trim() > 4 * MIB
    assert MIB <= resident(arena) < 2 * MIB
    again = allocated(arena, 6 * MIB)
    arena.write(again, 5 * MIB, memoryview(b"x" * MIB))
    assert arena.trim() == 0
    assert bytes(arena._view[again.offset + 5 * MIB :][:2]) == b"xx"


def test_trimming_touches_nothing_that_is_in_use(arena: Arena) -> None:
    low, high = allocated(arena, 3 * MIB), allocated(arena, 3 * MIB)
    arena.write(high, 0, memoryview(b"y" * (3 * MIB)))
    arena.drop(low)
    for _ in range(3):
        arena.trim()
    assert bytes(arena._view[high.offset : high.offset + 3 * MIB]) == b"y" * (3 * MIB)


def test_an_arena_takes_memory_only_as_it_is_used() -> None:
    huge = Arena(1 << 40, prefault_nbytes=0)
    try:
        assert resident(huge) <= 2 * PAGE
        assert huge.allocate(1 << 39) is not None
    finally:
        huge.close()


def test_an_impossible_arena_is_a_fault_of_the_configuration() -> None:
    with pytest.raises(ConfigurationError, match="relay arena of"):
        Arena(1 << 62)


def test_many_threads_never_get_the_same_memory(arena: Arena) -> None:
    clashes = []

    def work(mark: int) -> None:
        for _ in range(200):
            slot = arena.allocate(5000)
            if slot is None:
                continue
            arena.write(slot, 0, memoryview(bytes([mark]) * 5000))
            if bytes(arena._view[slot.offset : slot.offset + 5000]) != bytes([mark]) * 5000:
                clashes.append(mark)
            arena.drop(slot)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == [] and in_use(arena) == 0


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["put", "tensor", "send", "release", "abort", "drop"]), st.integers(0, 9))))
def test_whatever_happens_slots_do_not_overlap_and_all_are_free_at_the_end(steps: Any) -> None:
    arena = Arena(1 * MIB)
    live: list[Slot] = []
    tensors: list[torch.Tensor | None] = []
    try:
        for step, number in steps:
            chosen = live[number % len(live)] if live else None
            match step:
                case "put":
                    slot = arena.allocate(number * 30_000)
                    if slot is not None:
                        arena.sent(slot)
                        arena.drop(slot)
                        live.append(slot)
                case "tensor":
                    tensors.append(arena.allocate_tensor((number * 1000 + 1,), torch.float32))
                case "send" if chosen:
                    if arena.share(chosen):
                        live.append(chosen)
                case "release" if chosen:
                    live.remove(chosen)
                    arena.released(chosen)
                case "abort" if chosen:
                    arena.aborted(chosen)
                case "drop" if tensors:
                    del tensors[number % len(tensors)]
            spans = sorted((slot.start, slot.start + slot.size) for slot in arena._slots.values())
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        for slot in live:
            arena.released(slot)
        tensors.clear()
        assert in_use(arena) == 0
        assert arena._extents.free_extents() == [(PAGE, arena.nbytes)]
    finally:
        arena.close()


def test_a_pinned_arena_gives_no_page_back(arena: Arena) -> None:
    """A device reads and writes the pages that were there at registration, and no later ones."""
    slot = allocated(arena, 6 * MIB)
    arena.write(slot, 0, memoryview(bytes(6 * MIB)))
    assert arena.drop(slot)
    before = resident(arena)
    arena.pin()
    assert (arena.trim(), arena.trim()) == (0, 0)
    assert resident(arena) == before > 6 * MIB
    assert arena.stats()["arena_bytes_resident"] == arena.nbytes
