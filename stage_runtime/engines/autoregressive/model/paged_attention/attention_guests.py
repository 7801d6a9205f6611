"""Attention by other projects' kernels on GPUs, behind `attention.AttentionBackend`: flash-attn and flashinfer.

Optional extras of those names, imported when a stage asks for one (``kernels``). The cache and its writing are
`attention.GatherAttention`'s. Written by their documentation (flash-attn 2, flashinfer 0.6): not tried on a GPU so far.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.model.paged_attention.attention import (
    BatchMeta,
    GatherAttention,
    LayerCall,
    LayerShape,
)
from stage_runtime.errors import ConfigurationError

FLASH_PAGE: Final = 256  # tokens: flash-attn's pages are multiples of it
WORKSPACE_BYTES: Final = 128 << 20  # flashinfer's recommendation
HALVES: Final = (torch.float16, torch.bfloat16)

Varlen: TypeAlias = Callable[..., Tensor]
MakeWrapper: TypeAlias = Callable[[Tensor], Any]


class _Rows(NamedTuple):
    """A step's rows as flash-attn takes them; all int32."""

    starts: Tensor  #: ``[rows + 1]``: of each row's queries, and the end.
    key_starts: Tensor  #: ``[rows + 1]``: the same of its keys.
    tables: Tensor  #: ``[rows, widest]``
    most_queries: int
    most_keys: int
    slots: Tensor


class FlashAttention(GatherAttention):
    """One `flash_attn_varlen_func` a layer, over pages by their block tables."""

    def __init__(self, varlen: Varlen | None = None) -> None:
        """varlen: instead of flash-attn's. Raises: ConfigurationError: it cannot be imported."""
        super().__init__()
        self._varlen: Varlen = varlen or _imported("flash_attn", "flash-attn").flash_attn_varlen_func

    def alloc(
        self, layers: Mapping[int, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        """Raises: ConfigurationError: flash-attn does not compute such pages or layers."""
        _check("flash-attn", dtype)
        if block_size % FLASH_PAGE:
            raise ConfigurationError(
                f"omni.Autoregressive(kernels='flash-attn', block_size={block_size}): a multiple of {FLASH_PAGE}"
            )
        for index, shape in layers.items():
            if shape.key_dim != shape.value_dim:
                raise ConfigurationError(
                    f"omni.Autoregressive(kernels='flash-attn'): layer {index} has keys of {shape.key_dim} values and "
                    f"values of {shape.value_dim}"
                )
        super().alloc(layers, num_blocks, block_size, dtype, device)

    def plan(self, batch: BatchMeta) -> _Rows:
        counts = [end - start for start, end in itertools.pairwise(batch.starts)]
        lengths = [computed + count for computed, count in zip(batch.computed, counts, strict=True)]
        key_starts = [0, *itertools.accumulate(lengths)]
        return _Rows(
            self._int32(batch.starts),
            self._int32(key_starts),
            self._tables(batch, range(len(counts))).int(),
            max(counts),
            max(lengths),
            batch.slot_mapping,
        )

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def forward(self, call: LayerCall, plan: _Rows) -> Tensor:
        layer, q, _k, _v, scale, window, softcap, _sinks = call
        self._write(call, plan.slots)
        return self._varlen(
            q.contiguous(),
            self._keys[layer],
            self._values[layer],
            cu_seqlens_q=plan.starts,
            cu_seqlens_k=plan.key_starts,
            max_seqlen_q=plan.most_queries,
            max_seqlen_k=plan.most_keys,
            softmax_scale=scale,
            causal=True,  # a row's last query sees its last key
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
            block_table=plan.tables,
        )


class _Layer(NamedTuple):
    """The kind of layer that flashinfer plans for: layers of one kind share a plan."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None


class _Pages(NamedTuple):
    """A step's rows as flashinfer takes them; all int32."""

    starts: Tensor  #: ``[rows + 1]``
    page_starts: Tensor  #: ``[rows + 1]``: of each row's pages, and the end.
    pages: Tensor  #: Pages of all rows, one after the other.
    in_last: Tensor  #: ``[rows]``: tokens of the last page.
    slots: Tensor
    planned: set[_Layer]


class FlashinferAttention(GatherAttention):
    """flashinfer's wrapper of prefills over pages, which computes rows that decode, too; planned once a step."""

    def __init__(self, make: MakeWrapper | None = None) -> None:
        """make: a wrapper with a workspace, instead of flashinfer's.

        Raises: ConfigurationError: it cannot be imported.
        """
        super().__init__()
        if make is None:
            wrapper = _imported("flashinfer", "flashinfer").BatchPrefillWithPagedKVCacheWrapper
            self._make: MakeWrapper = lambda workspace: wrapper(workspace, "NHD")
        else:
            self._make = make
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._wrappers: dict[_Layer, Any] = {}

    def alloc(
        self, layers: Mapping[int, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        """Raises: ConfigurationError: flashinfer does not compute this dtype."""
        _check("flashinfer", dtype)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        super().alloc(layers, num_blocks, block_size, dtype, device)

    def plan(self, batch: BatchMeta) -> _Pages:
        lengths = [
            computed + end - start
            for computed, (start, end) in zip(batch.computed, itertools.pairwise(batch.starts), strict=True)
        ]
        counts = [-(-length // self._block_size) for length in lengths]
        tables = [table[:count] for table, count in zip(batch.block_tables, counts, strict=True)]
        in_last = [length - (count - 1) * self._block_size for length, count in zip(lengths, counts, strict=True)]
        starts, page_starts, pages, last = (
            torch.tensor(list(values), dtype=torch.int32, device=self._device)
            for values in (batch.starts, [0, *itertools.accumulate(counts)], itertools.chain(*tables), in_last)
        )
        return _Pages(starts, page_starts, pages, last, batch.slot_mapping, set())

    def forward(self, call: LayerCall, plan: _Pages) -> Tensor:
        layer, q, k, v, scale, window, softcap, _sinks = call
        self._write(call, plan.slots)
        kind = _Layer(q.shape[1], k.shape[1], q.shape[2], v.shape[2], scale, window, softcap)
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            wrapper = self._wrappers[kind] = self._make(self._workspace)
        if kind not in plan.planned:
            self._plan(wrapper, kind, plan, q.dtype)
            plan.planned.add(kind)
        out: Tensor = wrapper.run(q.contiguous(), (self._keys[layer], self._values[layer]))
        return out

    def _plan(self, wrapper: Any, kind: _Layer, plan: _Pages, dtype: torch.dtype) -> None:
        wrapper.plan(
            plan.starts,
            plan.page_starts,
            plan.pages,
            plan.in_last,
            kind.heads,
            kind.kv_heads,
            kind.key_dim,
            self._block_size,
            head_dim_vo=kind.value_dim,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
        )


def _check(kernels: str, dtype: torch.dtype) -> None:
    if dtype not in HALVES:
        given = str(dtype).removeprefix("torch.")
        raise ConfigurationError(f"omni.Autoregressive(kernels={kernels!r}): float16 or bfloat16; this is {given}")


def _imported(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"omni.Autoregressive(kernels={extra!r}): {name} cannot be imported ({error}): "
            f"pip install 'omnipipeline[{extra}]'"
        ) from error
