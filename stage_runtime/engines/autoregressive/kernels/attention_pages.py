"""Attention over pages where they lie, by compiled loops: `loops` and `chunk_attention`. It needs a CPU and numba.

Layers with a soft cap or sinks, and chunks of values of odd sizes, are computed as `attention.GatherAttention` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.kernels import native
from stage_runtime.engines.autoregressive.model.paged_attention.attention import (
    BatchMeta,
    GatherAttention,
    LayerCall,
    LayerShape,
    _Group,
    output_of,
)

NO_WINDOW: Final = 1 << 40
LEAST_READ: Final = 256  # tokens of a KV head for which a thread is worth its start
DECODE_WORDS: Final = 9  # what `PageAttention.decode_step` gives
CHUNK_WORDS: Final = 7
LEAST_SEEN: Final = 1 << 12  # pairs of a query and a key of a KV head, for which one is


class _Decode(NamedTuple):
    """The decode rows of a step. tables: ``[rows, width]``."""

    rows: list[int]
    tokens: Tensor
    lengths: Tensor
    tables: Tensor
    host_lengths: list[int]


class _Chunks(NamedTuple):
    """Prompts' chunks of a step. pieces: first token, tokens, position of the first, row of ``tables``."""

    pieces: list[tuple[int, int, int, int]]
    tables: Tensor


class AttentionShape(NamedTuple):
    """The shape of a layer's attention. group: query heads that share a KV head."""

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int


class StepPlan:
    """One step: its decode rows and its chunks, for the loops; and groups for what these do not compute."""

    def __init__(self, batch: BatchMeta, decode: _Decode | None, chunks: _Chunks | None) -> None:
        self.batch = batch
        self.decode = decode
        self.chunks = chunks
        self.slots = batch.slot_mapping
        self.bounds: dict[tuple[int, int], Tensor] = {}  #: Bounds of the parts, by KV heads and sets of them.
        self.units: dict[int, tuple[Tensor, Tensor]] = {}  #: Units of chunks, and bounds of their parts, by KV heads.
        self.decode_groups: list[_Group] | None = None  #: These two once they are needed.
        self.chunk_groups: list[_Group] | None = None


class PageAttention(GatherAttention):
    """Raises in `alloc`: ValueError: no loop for this device or dtype. ImportError: numba is missing."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch, self._chunk_scratch = torch.empty(0), torch.empty(0)
        self._halved = False

    def alloc(
        self, layers: Mapping[int, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        from stage_runtime.engines.autoregressive.kernels import chunk_attention, loops

        if torch.device(device).type != "cpu" or dtype not in native.DTYPES:
            raise ValueError(f"no compiled attention for {dtype} on {device}")
        self._loops, self._chunk_attention = loops, chunk_attention
        self._halved = dtype is torch.bfloat16
        super().alloc(layers, num_blocks, block_size, dtype, device)

    def plan(self, batch: BatchMeta) -> StepPlan:
        counts = [end - start for start, end in itertools.pairwise(batch.starts)]
        rows = [row for row, count in enumerate(counts) if count == 1]
        decode = None
        if rows:
            lengths = [batch.computed[row] + 1 for row in rows]
            decode = _Decode(
                rows,
                torch.tensor([batch.starts[row] for row in rows]),
                torch.tensor(lengths),
                self._tables(batch, rows),
                lengths,
            )
        return StepPlan(batch, decode, self._chunks(batch, [row for row, count in enumerate(counts) if count > 1]))

    def _chunks(self, batch: BatchMeta, rows: Sequence[int]) -> _Chunks | None:
        if not rows:
            return None
        pieces, most = [], self._chunk_attention.QUERIES
        for index, row in enumerate(rows):
            start, end = batch.starts[row], batch.starts[row + 1]
            for first in range(start, end, most):
                pieces.append((first, min(most, end - first), batch.computed[row] + first - start, index))
        return _Chunks(pieces, self._tables(batch, rows))

    def forward(self, call: LayerCall, plan: StepPlan) -> Tensor:
        self._write(call, plan.slots)
        if call.q.stride(-1) != 1:
            call = call._replace(q=call.q.contiguous())
        layer, q, _k, v, scale, window, *_others = call
        out = output_of(call)
        groups: list[_Group] = []
        if plan.decode is not None and call.plain:
            self._decode(layer, q, plan, out, scale, window)
        elif plan.decode is not None:
            if plan.decode_groups is None:
                plan.decode_groups = self._decode_groups(plan.batch, plan.decode.rows)
            groups = plan.decode_groups
        if plan.chunks is not None and call.plain and self.computes_chunks(v.shape[-1]):
            self._attend_chunks(layer, q, plan, out, scale, window)
        elif plan.chunks is not None:
            if plan.chunk_groups is None:
                plan.chunk_groups = self._chunk_groups(plan.batch)
            groups = groups + plan.chunk_groups
        self._attend_groups(call, out, groups)
        return out

    def _decode(self, layer: int, q: Tensor, plan: StepPlan, out: Tensor, scale: float, window: int | None) -> None:
        shape = self.shape(layer, q.shape[1])
        parts, *step = self.decode_step(plan, shape)
        self.decode_loop(shape)(parts, *self._of_layer(layer, q, out, scale, window), *step)

    def _attend_chunks(
        self, layer: int, q: Tensor, plan: StepPlan, out: Tensor, scale: float, window: int | None
    ) -> None:
        shape = self.shape(layer, q.shape[1])
        parts, *step = self.chunk_step(plan, shape)
        self.chunk_loop(shape)(parts, *self._of_layer(layer, q, out, scale, window), *step)

    def _of_layer(self, layer: int, q: Tensor, out: Tensor, scale: float, window: int | None) -> tuple[int, ...]:
        keys, values = self._keys[layer], self._values[layer]
        pointers = (one.data_ptr() for one in (q, keys, values, out))
        return (*pointers, keys.shape[2], window or NO_WINDOW, native.bits(scale), q.stride(0), q.stride(1))

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Its keys and values."""
        return self._keys[layer], self._values[layer]

    def shape(self, layer: int, heads: int) -> AttentionShape:
        """heads: of queries."""
        keys, values = self._keys[layer], self._values[layer]
        return AttentionShape(keys.shape[2], heads // keys.shape[2], keys.shape[3], values.shape[3])

    def decode_loop(self, shape: AttentionShape) -> native.Loop:
        _heads, group, key_dim, value_dim = shape
        return self._loops.decode_attention(self._halved, key_dim, value_dim, group, self._block_size)

    def chunk_loop(self, shape: AttentionShape) -> native.Loop:
        _heads, group, key_dim, value_dim = shape
        return self._chunk_attention.attention(self._halved, key_dim, value_dim, group, self._block_size)

    def decode_step(self, plan: StepPlan, shape: AttentionShape) -> list[int]:
        """Parts of `decode_loop`, and its arguments of the step, which live as long as the plan, or the next step."""
        decode, heads = plan.decode, shape.kv_heads
        if decode is None:
            return [0] * DECODE_WORDS
        longest = max(decode.host_lengths)
        sets = 1 if len(decode.rows) >= native.parts_for(sum(decode.host_lengths) * heads, LEAST_READ) else heads
        bounds = plan.bounds.get((heads, sets))
        if bounds is None:
            bounds = plan.bounds[heads, sets] = torch.tensor(_bounds(decode.host_lengths, heads, sets))
        parts, each = len(bounds) - 1, heads // sets
        # 16: threads share no line of the cache
        words = each * shape.group * (max(shape.key_dim, shape.value_dim) + longest) + 16
        if self._scratch.numel() < parts * words:
            self._scratch = torch.empty(parts * words * 2)
        used = (decode.tokens, decode.lengths, decode.tables, bounds, self._scratch)
        return [parts, *(one.data_ptr() for one in used), words, decode.tables.shape[1], each]

    def chunk_step(self, plan: StepPlan, shape: AttentionShape) -> list[int]:
        """Parts of `chunk_loop`, and its arguments of the step, which live as long as those of `decode_step`."""
        chunks, heads = plan.chunks, shape.kv_heads
        if chunks is None:
            return [0] * CHUNK_WORDS
        if heads not in plan.units:
            plan.units[heads] = _units(chunks.pieces, heads)
        units, bounds = plan.units[heads]
        parts, words = len(bounds) - 1, self._chunk_attention.scratch(shape.key_dim, shape.value_dim, shape.group)
        if self._chunk_scratch.numel() < parts * words:
            self._chunk_scratch = torch.empty(parts * words)
        used = (units, chunks.tables, bounds, self._chunk_scratch)
        return [parts, *(one.data_ptr() for one in used), words, chunks.tables.shape[1]]

    def computes_chunks(self, value_dim: int) -> bool:
        """Whether there is a `chunk_loop` for values of that size."""
        return self._chunk_attention.fits(value_dim)


def _units(pieces: Sequence[tuple[int, int, int, int]], heads: int) -> tuple[Tensor, Tensor]:
    """Pieces of chunks by KV heads, and where each part begins and ends. Parts see about equally many keys."""
    units = [(*piece, head) for piece in pieces for head in range(heads)]
    work = [tokens * (position + tokens) for _first, tokens, position, *_ in units]
    total, seen, bounds = sum(work), 0, [0]
    parts = min(native.parts_for(total, LEAST_SEEN), len(units))
    for index, one in enumerate(work):
        seen += one
        while len(bounds) < parts and seen * parts >= total * len(bounds):
            bounds.append(index + 1)
    return torch.tensor(units), torch.tensor(bounds + [len(units)] * (parts + 1 - len(bounds)))


def _bounds(lengths: Sequence[int], heads: int, sets: int) -> list[int]:
    """The places where each part begins and ends, in units of (row, set of KV heads). Parts read about equally many
    tokens.
    """
    total = sum(lengths) * sets
    parts = native.parts_for(sum(lengths) * heads, LEAST_READ)
    bounds, seen = [0], 0
    for unit in range(len(lengths) * sets):
        seen += lengths[unit // sets]
        while len(bounds) < parts and seen * parts >= total * len(bounds):
            bounds.append(unit + 1)
    return bounds + [len(lengths) * sets] * (parts + 1 - len(bounds))


def available(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in native.DTYPES and native.available()
