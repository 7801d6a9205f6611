"""Chunks of a GPU's memory: when they are taken. The clock is the test's."""

from __future__ import annotations

from typing import Any

import torch

from stage_runtime.payloads.pack import OnDevice
from stage_runtime.relays.cuda_ipc.chunks import ChunkPool
from tests.relays.stand_in_gpu import StandIn

MIB = 1 << 20
SMALL = OnDevice("cuda:0", 0, [torch.zeros(4096, dtype=torch.uint8)], [0])


class Counting(StandIn):
    """Counts what is asked of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.allocated = list[int]()

    def allocate(self, device: str, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        return super().allocate(device, nbytes)


def test_a_full_gpu_is_asked_for_memory_once_in_30_seconds() -> None:
    """Each try makes torch give back what its allocator keeps for the stages."""
    memory, now = Counting(offers=False), [0.0]
    chunks = ChunkPool(memory, 512 * MIB, clock=lambda: now[0])
    assert [chunks.place(SMALL, 4096) for _ in range(100)] == [None] * 100
    assert memory.allocated == [64 * MIB]
    now[0] = 29.9
    assert chunks.place(SMALL, 4096) is None and len(memory.allocated) == 1
    now[0], memory.offers = 30.0, True
    assert chunks.place(SMALL, 4096) is not None and len(memory.allocated) == 2
    memory.close()


def test_the_first_chunk_is_taken_before_the_stages_take_the_rest() -> None:
    memory = Counting()
    chunks = ChunkPool(memory, 512 * MIB, ["cuda:0", "cuda:1"])
    memory.offers = False
    assert memory.allocated == [64 * MIB, 64 * MIB]
    assert chunks.place(SMALL, 4096) is not None and len(memory.allocated) == 2
    memory.close()


def test_a_gpu_that_is_full_at_the_start_is_no_error() -> None:
    memory = Counting(offers=False)
    assert ChunkPool(memory, 512 * MIB, ["cuda:0"]).stats()["gpu_bytes"] == 0


def test_a_small_share_is_one_chunk() -> None:
    memory = Counting()
    chunks = ChunkPool(memory, 8 * MIB, ["cuda:0"])
    large = OnDevice("cuda:0", 0, [torch.zeros(9 * MIB, dtype=torch.uint8)], [0])
    assert chunks.place(large, 9 * MIB) is None and chunks.place(SMALL, 4096) is not None
    assert memory.allocated == [8 * MIB]
    memory.close()
