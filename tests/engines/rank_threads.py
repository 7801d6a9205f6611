"""Tensor-parallel ranks as threads of one process: an engine core of several ranks, without torch.distributed."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import stage_runtime as omni
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.tensor_parallel.ranks import RankOrder, Ranks, follow
from tests.engines.generation_kit import tiny_model, tiny_tokenizer

WAIT_S = 60.0


class Meeting:
    """State that the ranks of one engine share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.orders: list[queue.Queue[RankOrder]] = [queue.Queue() for _ in range(size)]
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)

    def exchange(self, rank: int, part: Any) -> list[Any]:
        self.parts[rank] = part
        self.barrier.wait()
        found = list(self.parts)
        self.barrier.wait()
        return found


class ThreadRanks(Ranks):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def add_up(self, part: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, part)).sum(0)

    def join(self, part: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, part), dim=-1)

    def gather(self, part: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self.rank, part)

    def scatter(self, parts: Sequence[Tensor], nbytes: int) -> Tensor:
        part: Tensor = self._meeting.exchange(self.rank, list(parts))[0][self.rank]
        assert part.numel() == nbytes
        return part

    def least(self, value: int) -> int:
        found: list[int] = self._meeting.exchange(self.rank, value)
        return min(found)

    def send(self, order: RankOrder) -> None:
        for one in self._meeting.orders[1:]:
            one.put(order)

    def receive(self) -> RankOrder:
        return self._meeting.orders[self.rank].get(timeout=WAIT_S)

    def close(self) -> None: ...


@contextlib.contextmanager
def ranked(kind: str, size: int, **fields: Any) -> Iterator[EngineCore]:
    """The core of an engine with ``size`` ranks; 1: an engine without any. fields: of `omni.Autoregressive`."""
    limits = {"block_size": 4, "max_requests": 8, "max_batched_tokens": 32, "max_chunk": 16, "max_model_len": 120}
    spec = omni.Autoregressive(model="in memory", **{"kernels": "torch", **limits, **fields})
    meeting = Meeting(size)

    def made(rank: int) -> loader.Loaded:
        ranks = None if size == 1 else ThreadRanks(rank, meeting)
        return loader.assemble(spec, tiny_model(kind), tiny_tokenizer(), ranks=ranks)

    def followed(rank: int) -> None:
        follow(made(rank).runner, ThreadRanks(rank, meeting))

    tiny_model(kind)  # before threads ask for it
    threads = [threading.Thread(target=followed, args=(rank,), daemon=True) for rank in range(1, size)]
    for one in threads:
        one.start()
    core = made(0).core
    try:
        yield core
    finally:
        core.shutdown()
        for one in threads:
            one.join(WAIT_S)
        assert not any(one.is_alive() for one in threads)
