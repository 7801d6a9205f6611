"""Attention over a paged KV cache, behind one interface; and the implementation that runs on any device of torch.

A layer's K and V are ``[num_blocks, block_size, kv_heads, head_dim]``: the layout that flash-attn's block tables and
flashinfer take too. A step's tokens lie flat, one request after the other; requests that decode (one token) come in
groups of similar length, so that little is padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from stage_runtime.engines.autoregressive.model.paged_attention.block_pages import Page

GROUPS: Final = 4  # of decode rows; measured on two cores with 16 rows: one padded group takes 1.3x as long


class LayerShape(NamedTuple):
    """The values that one layer caches for a token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class BatchMeta(NamedTuple):
    """One step, on the host. ``rows``: requests in the order of their tokens.

    starts: first token of each row in the flat batch, and the end. computed: tokens of each row before this step.
    block_tables: blocks of each row, as many as its tokens need.
    """

    starts: list[int]
    computed: list[int]
    block_tables: list[list[int]]
    slot_mapping: Tensor


class LayerCall(NamedTuple):
    """One layer's attention in a step. window: how many tokens back one sees, itself included.

    sinks: ``[heads]``, one more logit of each query head's softmax, which has no value (GPT-OSS).
    """

    layer: int
    q: Tensor  #: ``[T, heads, D]``
    k: Tensor  #: ``[T, kv_heads, D]``
    v: Tensor  #: ``[T, kv_heads, D]``
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a softmax of scaled products alone: the kind that kernels compute."""
        return self.softcap is None and self.sinks is None


class AttentionBackend(Protocol):
    def alloc(
        self, layers: Mapping[int, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        """Allocate the cache of all layers."""

    def regions(self) -> Sequence[Page]:
        """K and V of each layer, where they lie: ``[num_blocks, block_size, kv_heads, dim]``."""

    def plan(self, batch: BatchMeta) -> Any:
        """The plan that all layers of one step share."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks that may hold NaN before others get them: padding is masked by adding, and NaN stays NaN."""

    def forward(self, call: LayerCall, plan: Any) -> Tensor:
        """Write the step's K and V, and attend. Returns: ``[T, heads, D]``."""


class _Group:
    """Rows that are computed by one call: all decode, or one prompt's chunk."""

    def __init__(self, tokens: Tensor | slice, blocks: Tensor, queries: int, lengths: list[int]) -> None:
        self.tokens = tokens  #: The places of its queries in the flat batch.
        self.blocks = blocks  #: ``[rows, blocks]``
        self.queries = queries  #: Queries of each row.
        self.lengths = lengths  #: Tokens of each row, those of this step included.
        self._masks: dict[int | None, Tensor | None] = {}

    def causal(self, window: int | None) -> bool:
        """Whether the rows are whole prompts: a query sees all keys up to its own, so that no mask is needed."""
        return self.queries > 1 and self.lengths == [self.queries] and (window is None or self.queries <= window)

    def mask(self, width: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """The tensor that is added to the scores ``[rows, 1, queries, width]``; None: everything is seen."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(width, window, dtype)
        return self._masks[window]

    def _make_mask(self, width: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if self.causal(window):
            return None
        if self.queries == 1 and all(one == width and (window is None or one <= window) for one in self.lengths):
            return None
        device = self.blocks.device
        last = torch.tensor(self.lengths, device=device)[:, None, None] - 1
        position = last - self.queries + 1 + torch.arange(self.queries, device=device)[None, :, None]
        key = torch.arange(width, device=device)[None, None, :]
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))[:, None]


class GatherAttention:
    """Gathers the pages of a group of rows, then one `scaled_dot_product_attention` for the group.

    The query heads that share a KV head are its queries, so K and V are not repeated for them.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._block_size = 0
        self._device = "cpu"

    def alloc(
        self, layers: Mapping[int, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        self._block_size, self._device = block_size, device
        for index, shape in layers.items():
            place = (num_blocks, block_size, shape.kv_heads)
            self._keys[index] = torch.zeros(*place, shape.key_dim, dtype=dtype, device=device)
            self._values[index] = torch.zeros(*place, shape.value_dim, dtype=dtype, device=device)

    def clear(self, blocks: Sequence[int]) -> None:
        for cache in (*self._keys.values(), *self._values.values()):
            cache[list(blocks)] = 0

    def regions(self) -> Sequence[Page]:
        kinds = (("key", self._keys), ("value", self._values))
        return [Page(f"{layer}.{kind}", values[layer]) for layer in sorted(self._keys) for kind, values in kinds]

    def plan(self, batch: BatchMeta) -> Any:
        decode = [row for row, count in enumerate(_counts(batch)) if count == 1]
        return self._decode_groups(batch, decode) + self._chunk_groups(batch), batch.slot_mapping

    def _decode_groups(self, batch: BatchMeta, rows: Sequence[int]) -> list[_Group]:
        lengths = _lengths(batch)
        decode = sorted(rows, key=lambda row: lengths[row])
        same = bool(decode) and lengths[decode[0]] == lengths[decode[-1]]
        size = len(decode) if same else -(-len(decode) // GROUPS)
        groups = []
        for at in range(0, len(decode), size or 1):
            chosen = decode[at : at + size]
            tokens = torch.tensor([batch.starts[row] for row in chosen], device=self._device)
            groups.append(_Group(tokens, self._tables(batch, chosen), 1, [lengths[row] for row in chosen]))
        return groups

    def _chunk_groups(self, batch: BatchMeta) -> list[_Group]:
        lengths = _lengths(batch)
        return [
            _Group(slice(batch.starts[row], batch.starts[row + 1]), self._tables(batch, [row]), count, [lengths[row]])
            for row, count in enumerate(_counts(batch))
            if count > 1
        ]

    def _tables(self, batch: BatchMeta, rows: Sequence[int]) -> Tensor:
        widest = max(len(batch.block_tables[row]) for row in rows)
        tables = [batch.block_tables[row] + [0] * (widest - len(batch.block_tables[row])) for row in rows]
        return torch.tensor(tables, device=self._device)

    def forward(self, call: LayerCall, plan: Any) -> Tensor:
        groups, slots = plan
        self._write(call, slots)
        out = output_of(call)
        self._attend_groups(call, out, groups)
        return out

    def _write(self, call: LayerCall, slots: Tensor) -> None:
        keys, values = self._keys[call.layer], self._values[call.layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, slots, call.k)
        values.view(-1, *values.shape[2:]).index_copy_(0, slots, call.v)

    def _attend_groups(self, call: LayerCall, out: Tensor, groups: Sequence[_Group]) -> None:
        """Write the rows of ``groups`` into ``out``."""
        layer, q, k, v, _scale, window, *_others = call
        keys, values = self._keys[layer], self._values[layer]
        for group in groups:
            width = max(group.lengths)
            if group.queries > 1 and group.lengths[0] == group.queries:
                seen_k, seen_v = k[group.tokens][None], v[group.tokens][None]  # the prompt's first chunk
            else:
                seen_k = keys[group.blocks].flatten(1, 2)[:, :width]
                seen_v = values[group.blocks].flatten(1, 2)[:, :width]
            mask = group.mask(width, window, q.dtype)
            if group.queries == 1:
                out[group.tokens] = _attend_decode(call, q[group.tokens], seen_k, seen_v, mask)
            else:
                causal = group.causal(window)
                out[group.tokens] = _attend_chunk(call, q[group.tokens], seen_k, seen_v, mask, causal)


def output_of(call: LayerCall) -> Tensor:
    """Memory for what a layer's attention returns."""
    return call.q.new_empty(*call.q.shape[:2], call.v.shape[-1])


def _counts(batch: BatchMeta) -> list[int]:
    return [end - start for start, end in zip(batch.starts, batch.starts[1:], strict=False)]


def _lengths(batch: BatchMeta) -> list[int]:
    """Tokens of each row, those of this step included."""
    return [computed + count for computed, count in zip(batch.computed, _counts(batch), strict=True)]


def _attend_decode(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q ``[rows, heads, D]``, k and v ``[rows, width, kv_heads, D]``."""
    rows, heads, _ = q.shape
    kv_heads = k.shape[2]
    grouped = q.view(rows, kv_heads, heads // kv_heads, -1)
    sinks = None if call.sinks is None else call.sinks.view(1, kv_heads, heads // kv_heads, 1)
    attended = _attend(call, grouped, k.transpose(1, 2), v.transpose(1, 2), mask, sinks)
    return attended.reshape(rows, heads, -1)


def _attend_chunk(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """q ``[T, heads, D]``, k and v ``[1, width, kv_heads, D]``."""
    count, heads, _ = q.shape
    kv_heads = k.shape[2]
    grouped = q.view(count, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3)
    k, v = (one[0].transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1) for one in (k, v))
    sinks = None if call.sinks is None else call.sinks.view(kv_heads, heads // kv_heads, 1, 1)
    return _attend(call, grouped, k, v, mask, sinks, causal).permute(2, 0, 1, 3).reshape(count, heads, -1)


def _attend(
    call: LayerCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, causal: bool = False
) -> Tensor:
    """sinks: those of ``call``, in the shape of the scores' last axis but one."""
    if call.plain:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale, is_causal=causal)
    scores = q @ k.transpose(-1, -2)
    if call.softcap is None:
        scores = scores * call.scale
    else:
        scores = call.softcap * torch.tanh(scores * (call.scale / call.softcap))
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(later, float("-inf"))
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    whole = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    return whole.softmax(-1, dtype=torch.float32)[..., :-1].to(q.dtype) @ v
