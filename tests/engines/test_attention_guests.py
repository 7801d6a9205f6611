"""Other projects' attention kernels are given what their documentation asks for: fakes compute by it, with torch.

Tests marked ``gpu`` use the real ones, on a GPU.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import stage_runtime as omni
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.model.paged_attention.attention import (
    AttentionBackend,
    BatchMeta,
    GatherAttention,
    LayerCall,
    LayerShape,
)
from stage_runtime.engines.autoregressive.model.paged_attention.attention_guests import (
    FLASH_PAGE,
    FlashAttention,
    FlashinferAttention,
)
from stage_runtime.errors import ConfigurationError
from tests.engines.generation_kit import tiny_model, tiny_tokenizer
from tests.thoroughness import examples

GUESTS = ["flash-attn", "flashinfer"]


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, softcap: float) -> Tensor:
    """One request, whose last query sees its last key. left: keys before a query's own that it sees; -1: all."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.float().repeat_interleave(group, 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(len(q))[:, None] + len(k) - len(q)
    keys = torch.arange(len(k))[None]
    unseen = (keys > own) | ((keys < own - left) if left >= 0 else torch.zeros_like(keys > own))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), v).to(q.dtype)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    block_table: Tensor,
) -> Tensor:
    """flash-attn 2's, of paged keys and values."""
    assert {cu_seqlens_q.dtype, cu_seqlens_k.dtype, block_table.dtype} == {torch.int32}
    assert q.is_contiguous() and k.shape[1] % FLASH_PAGE == 0 and causal and softmax_scale is not None
    assert window_size == (-1, -1) or window_size[1] == 0
    lengths, counts = cu_seqlens_k.diff().tolist(), cu_seqlens_q.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(counts), max(lengths))
    out = []
    for rows, table, length in zip(torch.split(q, counts), block_table.tolist(), lengths, strict=True):
        keys, values = (one[table].flatten(0, 1)[:length] for one in (k, v))
        out.append(attended(rows, keys, values, softmax_scale, window_size[0], softcap))
    return torch.cat(out)


class BatchPrefillWithPagedKVCacheWrapper:
    """flashinfer's."""

    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype is torch.uint8 and len(workspace) >= 128 << 20

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        indices = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert {one.dtype for one in indices} == {torch.int32}
        assert causal and sm_scale is not None and q_data_type == kv_data_type
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo
        self._indices, self._page_size = [one.tolist() for one in indices], page_size
        self._options = sm_scale, window_left, logits_soft_cap or 0.0
        self._dtype = q_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert q.is_contiguous() and q.dtype == self._dtype
        assert self._heads == (q.shape[1], keys.shape[2], q.shape[2], values.shape[3])
        starts, page_starts, pages, in_last = self._indices
        assert all(1 <= one <= self._page_size for one in in_last)
        out = []
        for row, (first, last) in enumerate(itertools.pairwise(page_starts)):
            length = (last - first - 1) * self._page_size + in_last[row]
            seen = [one[pages[first:last]].flatten(0, 1)[:length] for one in (keys, values)]
            out.append(attended(q[starts[row] : starts[row + 1]], seen[0], seen[1], *self._options))
        return torch.cat(out)


def guest(name: str) -> tuple[AttentionBackend, int]:
    """A guest that computes with a fake, and a size of its pages."""
    if name == "flash-attn":
        return FlashAttention(flash_attn_varlen_func), FLASH_PAGE
    return FlashinferAttention(BatchPrefillWithPagedKVCacheWrapper), 4


def batch(lengths: list[int], counts: list[int], size: int, draw: random.Random, device: str) -> tuple[BatchMeta, int]:
    needed = [-(-length // size) for length in lengths]
    blocks = list(range(1, sum(needed) + 1))
    draw.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    starts = [0, *itertools.accumulate(counts)]
    slots = [
        table[at // size] * size + at % size
        for length, count, table in zip(lengths, counts, tables, strict=True)
        for at in range(length - count, length)
    ]
    computed = [length - count for length, count in zip(lengths, counts, strict=True)]
    return BatchMeta(starts, computed, tables, torch.tensor(slots, device=device)), sum(needed) + 1


def compare(found: AttentionBackend, size: int, data: st.DataObject, device: str, dim: int) -> None:
    """Compare with `GatherAttention`, in two layers of one kind and one of another."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    counts = [data.draw(st.sampled_from([1, 1, min(3, length), length])) for length in lengths]
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 3)]))
    meta, blocks = batch(lengths, counts, size, random.Random(data.draw(st.integers(0, 99))), device)
    torch.manual_seed(1)
    total = meta.starts[-1]
    q = torch.randn(kv_heads * group, total, dim).to(device, torch.bfloat16).transpose(0, 1)
    k, v = (torch.randn(total, kv_heads, dim).to(device, torch.bfloat16) for _ in range(2))
    cached = [torch.randn(blocks, size, kv_heads, dim).to(device, torch.bfloat16) for _ in range(2)]
    softcap = data.draw(st.sampled_from([None, 3.0]))
    windows = [None, None, data.draw(st.sampled_from([1, 5]))]
    with torch.inference_mode():
        plans = []
        backends = (GatherAttention(), found)
        for backend in backends:
            shapes = dict.fromkeys(range(3), LayerShape(kv_heads, dim, dim))
            backend.alloc(shapes, blocks, size, torch.bfloat16, device)
            for layer in range(3):
                backend._keys[layer].copy_(cached[0])  # type: ignore[attr-defined]
                backend._values[layer].copy_(cached[1])  # type: ignore[attr-defined]
            plans.append(backend.plan(meta))
        for layer, window in enumerate(windows):
            expected, given = (
                backend.forward(LayerCall(layer, q, k, v, dim**-0.5, window, softcap), plan)
                for backend, plan in zip(backends, plans, strict=True)
            )
            torch.testing.assert_close(given, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", GUESTS)
@settings(max_examples=examples(20))
@given(data=st.data())
def test_a_guest_is_given_what_its_documentation_asks_for(name: str, data: st.DataObject) -> None:
    found, size = guest(name)
    compare(found, size, data, "cpu", 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GUESTS)
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_a_guest_on_a_gpu_attends_as_gathering_does(name: str, data: st.DataObject) -> None:
    pytest.importorskip({"flash-attn": "flash_attn", "flashinfer": "flashinfer"}[name])
    if name == "flash-attn":
        compare(FlashAttention(), FLASH_PAGE, data, "cuda", 64)
    else:
        compare(FlashinferAttention(), 16, data, "cuda", 64)


@pytest.mark.parametrize(
    ("name", "dtype", "size", "value_dim", "message"),
    [
        ("flash-attn", torch.bfloat16, 16, 8, r"block_size=16\): a multiple of 256"),
        ("flash-attn", torch.float32, 256, 8, "float16 or bfloat16; this is float32"),
        ("flash-attn", torch.float16, 256, 4, "layer 0 has keys of 8 values and values of 4"),
        ("flashinfer", torch.float32, 16, 8, "float16 or bfloat16; this is float32"),
    ],
)
def test_what_a_guest_does_not_compute_is_refused(
    name: str, dtype: torch.dtype, size: int, value_dim: int, message: str
) -> None:
    found, _size = guest(name)
    with pytest.raises(ConfigurationError, match=message):
        found.alloc({0: LayerShape(1, 8, value_dim)}, 2, size, dtype, "cpu")


@pytest.mark.parametrize("name", GUESTS)
def test_a_guest_without_a_gpu_is_refused(name: str) -> None:
    spec = omni.Autoregressive(model="in memory", kernels=name, linears="plain")
    with pytest.raises(ConfigurationError, match=f"kernels='{name}'.*: needs a GPU"):
        loader.assemble(spec, tiny_model("llama"), tiny_tokenizer())


@pytest.mark.parametrize(("make", "name"), [(FlashAttention, "flash-attn"), (FlashinferAttention, "flashinfer")])
def test_a_guest_that_is_not_installed_is_refused_with_the_extra_s_name(make: Any, name: str) -> None:
    try:
        make()
    except ConfigurationError as error:
        assert f"pip install 'omnipipeline[{name}]'" in str(error)
