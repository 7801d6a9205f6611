"""The tensor-parallel ranks of one engine: what they reduce together, and what rank 0 sends the others.

Rank 0 schedules and samples. It sends each pass to the others (`Leading`), which compute their share of it
(`follow`). Groups of torch.distributed: orders wait for as long as nothing is to be computed, sums and moves of blocks
do not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from stage_runtime.engines.autoregressive.model.adapted import AdapterFacts, AdapterRead, AdapterRefused
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import Computed
from stage_runtime.engines.autoregressive.model.paged_attention.block_pages import BlockPages
from stage_runtime.engines.autoregressive.model.rows.input_batch import Pass
from stage_runtime.engines.autoregressive.tensor_parallel import shares
from stage_runtime.errors import describe

log = logging.getLogger(__name__)

IDLE: Final = timedelta(days=365)  # between two orders
SUM_S: Final = 60.0  # a rank that is so late is taken for frozen; longer than any pass


class RankLost(BaseException):
    """The ranks no longer compute the same: the engine ends. Not an Exception, which would end one request only."""


class ComputePass(msgspec.Struct, frozen=True, tag="compute", array_like=True):
    batch: Pass


class Clear(msgspec.Struct, frozen=True, tag="clear", array_like=True):
    blocks: list[int]


class Export(msgspec.Struct, frozen=True, tag="export", array_like=True):
    """Give rank 0 these blocks."""

    blocks: list[int]


class Import(msgspec.Struct, frozen=True, tag="import", array_like=True):
    """Take these blocks from rank 0."""

    blocks: list[int]


class ReadAdapter(msgspec.Struct, frozen=True, tag="read_adapter", array_like=True):
    """Begin to read your share of an adapter, beside passes."""

    number: int
    path: str


class KeepAdapter(msgspec.Struct, frozen=True, tag="keep_adapter", array_like=True):
    """Compute the adapter from now on, whose files have this digest on rank 0, if all ranks have read it."""

    number: int
    path: str
    digest: bytes


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter", array_like=True):
    number: int


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    """No more passes."""


RankOrder = ComputePass | Clear | Export | Import | ReadAdapter | KeepAdapter | DropAdapter | End
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RankOrder).decode


class Ranks:
    """This process among its engine's ranks."""

    def __init__(self, rank: int, size: int, *, init_method: str = "env://", sum_timeout_s: float = SUM_S) -> None:
        """Blocks until all ranks are there. ``init_method``: as torch.distributed has it."""
        self.rank, self.size = rank, size
        self._owns = not dist.is_initialized()
        if self._owns:
            dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size)
        on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
        self._orders = dist.new_group(backend="gloo", timeout=IDLE)
        patience = timedelta(seconds=sum_timeout_s)
        self._sums = dist.new_group(backend="nccl" if on_gpu else "gloo", timeout=patience)
        self._moves = dist.new_group(backend="gloo", timeout=patience) if on_gpu else self._sums  # of host memory

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in place of ours."""
        part = part.contiguous()
        dist.all_reduce(part, group=self._sums)
        return part

    def join(self, part: Tensor) -> Tensor:
        """All ranks' parts, one after the other along the last dimension."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self._sums)
        return torch.cat(parts, dim=-1)

    def gather(self, part: Tensor) -> list[Tensor]:
        """All ranks' parts, of one size, on the host. Ranks other than 0 get none."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        dist.gather(part, parts or None, dst=0, group=self._moves)
        return parts

    def scatter(self, parts: Sequence[Tensor], nbytes: int) -> Tensor:
        """This rank's part, of ``nbytes``, of those that rank 0 gives."""
        part = torch.empty(nbytes, dtype=torch.uint8)
        dist.scatter(part, list(parts) if self.rank == 0 else None, src=0, group=self._moves)
        return part

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        found = torch.tensor([value])
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._orders)
        return int(found)

    def send(self, order: RankOrder) -> None:
        """Sends an order to all other ranks. Only rank 0 calls it."""
        body = torch.frombuffer(bytearray(_encode(order)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([body.numel()]), 0, group=self._orders)
        dist.broadcast(body, 0, group=self._orders)

    def receive(self) -> RankOrder:
        """Rank 0's next order."""
        length = torch.zeros(1, dtype=torch.long)
        dist.broadcast(length, 0, group=self._orders)
        body = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(body, 0, group=self._orders)
        order: RankOrder = _decode(body.numpy().tobytes())
        return order

    def close(self) -> None:
        """Ends gloo's threads, too: one that still holds a tensor when the interpreter ends would abort the process."""
        groups = [self._orders, self._sums, *([] if self._moves is self._sums else [self._moves])]
        del self._orders, self._sums, self._moves
        while groups:
            dist.destroy_process_group(groups.pop())
        if self._owns:
            dist.destroy_process_group()


class RankPages(BlockPages):
    """Rank 0's: a block that crosses has the heads of all ranks, and the rows that rank 0 alone keeps."""

    def __init__(self, own: BlockPages, ranks: Ranks) -> None:
        super().__init__(own.pages)
        self._own = own
        self._ranks = ranks
        whole = [shape for _name, shape in own.shapes if len(shape) == 3]  # with heads: they come first
        nbytes = own.item_nbytes[: len(whole)]
        self._shared = [(shape[0], nbytes // shape[0]) for shape, nbytes in zip(whole, nbytes, strict=True)]
        self._shared_nbytes = sum(nbytes)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        ranks, shared = self._ranks.size, len(self._shared)
        found = self._own.shapes
        heads = [(name, (size, heads * ranks, dim)) for name, (size, heads, dim) in found[:shared]]
        return [*heads, *found[shared:]]

    @property
    def item_nbytes(self) -> list[int]:
        shared, found = len(self._shared), self._own.item_nbytes
        return [*(one * self._ranks.size for one in found[:shared]), *found[shared:]]

    def export(self, blocks: Sequence[int], into: Tensor | None = None) -> Tensor:
        """Raises: RankLost: another rank does not give its part."""
        try:
            self._ranks.send(Export(list(blocks)))
            own, shared = self._own.export(blocks), len(blocks) * self._shared_nbytes
            parts = self._ranks.gather(own[:shared])
        except Exception as error:
            raise RankLost(f"tensor-parallel rank 0: blocks were not given out: {describe(error)}") from error
        return torch.cat([shares.join(parts, self._shared, len(blocks)), own[shared:]], out=into)

    def load(self, blocks: Sequence[int], flat: Tensor) -> None:
        """Raises: ValueError: it has another size. RankLost: another rank does not take its part."""
        self._check(blocks, flat)
        shared, count = len(blocks) * self._shared_nbytes, len(blocks)
        parts = shares.split(flat[: shared * self._ranks.size], self._ranks.size, self._shared, count)
        try:
            self._ranks.send(Import(list(blocks)))
            own = self._ranks.scatter(parts, shared)
            self._own.load(blocks, torch.cat([own, flat[shared * self._ranks.size :]]))
        except Exception as error:
            raise RankLost(f"tensor-parallel rank 0: blocks were not taken in: {describe(error)}") from error


class Leading(ModelRunner):
    """Rank 0's runner: each pass is computed by all ranks."""

    def __init__(self, model: Any, backend: Any, ranks: Ranks, **options: Any) -> None:
        """options: of `ModelRunner`."""
        super().__init__(model, backend, **options)
        self.pages = RankPages(self.pages, ranks)
        self._ranks = ranks
        self._paths: dict[int, str] = {}  #: Paths of adapters that are being read.
        self._ended = False

    def _compute(self, batch: Pass, plan: Any) -> Computed:
        """Raises: RankLost: whatever goes wrong once the others have the pass: they would go on alone."""
        try:
            self._ranks.send(ComputePass(batch))
            return super()._compute(batch, plan)
        except Exception as error:
            raise RankLost(f"tensor-parallel rank 0 of {self._ranks.size}: a pass failed: {describe(error)}") from error

    def clear(self, blocks: Sequence[int]) -> None:
        self._order(Clear(list(blocks)))
        super().clear(blocks)

    def read_adapter(self, number: int, path: str) -> Future[AdapterRead]:
        self._paths[number] = path
        self._order(ReadAdapter(number, path))
        return super().read_adapter(number, path)

    def keep_adapter(self, number: int) -> AdapterFacts:
        facts = super().keep_adapter(number)
        path = self._paths.pop(number)
        self._order(KeepAdapter(number, path, facts.digest))
        try:
            everywhere = self._ranks.least(1)
        except RuntimeError as error:
            raise RankLost(f"tensor-parallel rank 0: another rank has ended: {describe(error)}") from error
        if not everywhere:
            super().drop_adapter(number)  # the others have dropped it
            raise AdapterRefused(f"{path}: another tensor-parallel rank cannot load the same files: see its log")
        return facts

    def drop_adapter(self, number: int) -> None:
        self._paths.pop(number, None)
        self._order(DropAdapter(number))
        super().drop_adapter(number)

    def _order(self, order: RankOrder) -> None:
        try:
            self._ranks.send(order)
        except RuntimeError as error:
            raise RankLost(f"tensor-parallel rank 0: another rank has ended: {describe(error)}") from error

    def close(self) -> None:
        """Tell the others to end. Idempotent."""
        if self._ended:
            return
        self._ended = True
        try:
            self._ranks.send(End())
        except RuntimeError as error:
            log.warning("the other tensor-parallel ranks did not get the order to end: %s", describe(error))
        self._ranks.close()


def follow(runner: ModelRunner, ranks: Ranks) -> None:
    """Carry out rank 0's orders until it ends.

    Raises: RankLost: an order failed here, or rank 0 is gone.
    """
    try:
        with torch.inference_mode():
            while True:
                match ranks.receive():
                    case ComputePass(batch):
                        runner.compute(batch)
                    case Clear(blocks):
                        runner.clear(blocks)
                    case Export(blocks):
                        ranks.gather(runner.pages.export(blocks))
                    case Import(blocks):
                        nbytes = len(blocks) * runner.pages.block_nbytes
                        runner.pages.load(blocks, ranks.scatter((), nbytes))
                    case ReadAdapter(number, path):
                        _read(runner, ranks, number, path)
                    case KeepAdapter() as order:
                        _keep(runner, ranks, order)
                    case DropAdapter(number):
                        runner.drop_adapter(number)
                    case End():
                        ranks.close()
                        return
    except Exception as error:
        raise RankLost(f"tensor-parallel rank {ranks.rank} of {ranks.size}: {describe(error)}") from error


def _read(runner: ModelRunner, ranks: Ranks, number: int, path: str) -> None:
    try:
        runner.read_adapter(number, path)
    except AdapterRefused as error:
        log.warning("tensor-parallel rank %d: %s", ranks.rank, error)


def _keep(runner: ModelRunner, ranks: Ranks, order: KeepAdapter) -> None:
    """All ranks keep the adapter, or none does."""
    kept = 0
    try:
        kept = int(runner.keep_adapter(order.number).digest == order.digest)
        if not kept:
            log.warning("tensor-parallel rank %d: %s has other files than on rank 0", ranks.rank, order.path)
    except Exception as error:  # such as a device without memory for it: the others learn of it when all meet
        log.warning("tensor-parallel rank %d: %s: %s", ranks.rank, order.path, describe(error))
    if not ranks.least(kept):
        runner.drop_adapter(order.number)
