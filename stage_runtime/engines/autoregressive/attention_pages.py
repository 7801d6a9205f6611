"""Attention of decode rows over pages where they lie, by a compiled loop (`kernels`). For CPUs with numba.

Prompts' chunks, and layers with a soft cap, are computed as `attention.GatherAttention` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stage_runtime.engines.autoregressive import native
from stage_runtime.engines.autoregressive.attention import BatchMeta, GatherAttention, LayerShape, _Group

NO_WINDOW: Final = 1 << 40
LEAST_READ: Final = 256  # tokens of a KV head for which a thread is worth its start


class _Decode(NamedTuple):
    """The decode rows of a step. tables: ``[rows, width]``."""

    rows: list[int]
    tokens: Tensor
    lengths: Tensor
    tables: Tensor
    host_lengths: list[int]


class _Plan:
    """One step: its decode rows for the loop, and groups for what the loop does not compute."""

    def __init__(self, batch: BatchMeta, decode: _Decode | None, chunks: list[_Group]) -> None:
        self.batch = batch
        self.decode = decode
        self.chunks = chunks
        self.slots = batch.slot_mapping
        self.groups: list[_Group] | None = None  #: The decode rows for layers with a soft cap, once they are needed.
        self.bounds: dict[tuple[int, int], Tensor] = {}  #: Of the parts, by KV heads and sets of them.


class PageAttention(GatherAttention):
    """Raises in `alloc`: ValueError: no loop for this device or dtype. ImportError: numba is missing."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = torch.empty(0)

    def alloc(
        self, layers: Mapping[int, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        from stage_runtime.engines.autoregressive import kernels

        if torch.device(device).type != "cpu" or dtype not in native.DTYPES:
            raise ValueError(f"no compiled attention for {dtype} on {device}")
        self._kernels = kernels
        super().alloc(layers, num_blocks, block_size, dtype, device)

    def plan(self, batch: BatchMeta) -> _Plan:
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
        return _Plan(batch, decode, self._chunk_groups(batch))

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: _Plan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        self._write(layer, k, v, plan.slots)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        groups = plan.chunks
        if plan.decode is not None and softcap is None:
            self._decode(layer, q, plan, plan.decode, out, scale, window)
        elif plan.decode is not None:
            if plan.groups is None:
                plan.groups = self._decode_groups(plan.batch, plan.decode.rows)
            groups = plan.groups + groups
        self._attend_groups(layer, (q, k, v, out), groups, scale, window, softcap)
        return out

    def _decode(
        self, layer: int, q: Tensor, plan: _Plan, decode: _Decode, out: Tensor, scale: float, window: int | None
    ) -> None:
        keys, values = self._keys[layer], self._values[layer]
        heads, key_dim = keys.shape[2:]
        group, longest = q.shape[1] // heads, max(decode.host_lengths)
        if q.stride(-1) != 1:
            q = q.contiguous()
        sets = 1 if len(decode.rows) >= native.parts_for(sum(decode.host_lengths) * heads, LEAST_READ) else heads
        bounds = plan.bounds.get((heads, sets))
        if bounds is None:
            bounds = plan.bounds[heads, sets] = torch.tensor(_bounds(decode.host_lengths, heads, sets))
        parts, each = len(bounds) - 1, heads // sets
        words = each * group * (max(key_dim, values.shape[-1]) + longest) + 16  # 16: threads share no line of the cache
        if self._scratch.numel() < parts * words:
            self._scratch = torch.empty(parts * words * 2)
        loop = self._kernels.decode_attention(
            q.dtype is torch.bfloat16, key_dim, values.shape[-1], group, self._block_size
        )
        loop(
            parts,
            *(one.data_ptr() for one in (q, keys, values, out)),
            *(one.data_ptr() for one in (decode.tokens, decode.lengths, decode.tables, bounds)),
            self._scratch.data_ptr(),
            words,
            decode.tables.shape[1],
            heads,
            window or NO_WINDOW,
            native.bits(scale),
            q.stride(0),
            q.stride(1),
            each,
        )


def _bounds(lengths: Sequence[int], heads: int, sets: int) -> list[int]:
    """Where each part begins and ends, in units of (row, set of KV heads). Parts read about equally many tokens."""
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
