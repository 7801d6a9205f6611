"""Attention by the compiled loop gives what gathering gives, for every shape that a layer may have."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.kernels import attention_pages
from stage_runtime.engines.autoregressive.model.paged_attention.attention import (
    BatchMeta,
    GatherAttention,
    LayerCall,
    LayerShape,
)
from stage_runtime.errors import ConfigurationError
from tests.engines.generation_kit import tiny_model, tiny_tokenizer
from tests.thoroughness import examples

pytest.importorskip("numba")

BLOCK = 4


def batch(lengths: list[int], counts: list[int], draw: random.Random) -> tuple[BatchMeta, int]:
    """Rows of ``counts`` tokens that make them ``lengths`` long, in blocks of any order; and the number of blocks."""
    needed = [-(-length // BLOCK) for length in lengths]
    blocks = list(range(1, sum(needed) + 1))
    draw.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    starts, slots = [0], []
    for length, count, table in zip(lengths, counts, tables, strict=True):
        starts.append(starts[-1] + count)
        slots += [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(length - count, length)]
    computed = [length - count for length, count in zip(lengths, counts, strict=True)]
    return BatchMeta(starts, computed, tables, torch.tensor(slots)), sum(needed) + 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=examples(25))
@given(data=st.data())
def test_pages_read_in_place_give_what_gathered_pages_give(dtype: torch.dtype, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=7))
    counts = [data.draw(st.sampled_from([1, 1, 1, min(3, length), length])) for length in lengths]
    kv_heads, group, key_dim, value_dim = data.draw(
        st.sampled_from(
            [(1, 1, 8, 8), (2, 3, 8, 8), (3, 1, 6, 10), (2, 2, 16, 16), (2, 3, 64, 64), (1, 7, 48, 32), (1, 20, 6, 32)]
        )
    )
    options: dict[str, Any] = {
        "scale": key_dim**-0.5,
        "window": data.draw(st.sampled_from([None, 1, 5])),
        "softcap": data.draw(st.sampled_from([None, None, 3.0])),
    }
    meta, blocks = batch(lengths, counts, random.Random(data.draw(st.integers(0, 99))))
    torch.manual_seed(1)
    total = meta.starts[-1]
    q = torch.randn(kv_heads * group, total, key_dim).to(dtype).transpose(0, 1)  # as transformers' layers give it
    k, v = torch.randn(total, kv_heads, key_dim).to(dtype), torch.randn(total, kv_heads, value_dim).to(dtype)
    cached = [torch.randn(blocks, BLOCK, kv_heads, dim).to(dtype) for dim in (key_dim, value_dim)]
    found = []
    with torch.inference_mode():
        for backend in (GatherAttention(), attention_pages.PageAttention()):
            backend.alloc({0: LayerShape(kv_heads, key_dim, value_dim)}, blocks, BLOCK, dtype, "cpu")
            backend._keys[0].copy_(cached[0])
            backend._values[0].copy_(cached[1])
            found.append(backend.forward(LayerCall(0, q, k, v, **options), backend.plan(meta)))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 9, 300])
def test_long_prompts_are_attended_in_segments_as_if_they_were_one(window: int | None) -> None:
    """Chunks at the beginning, at the end and in the middle of segments of keys, beside a row that decodes."""
    lengths, counts = [700, 3, 256, 530, 90], [530, 1, 256, 9, 70]
    meta, blocks = batch(lengths, counts, random.Random(5))
    torch.manual_seed(2)
    q = torch.randn(meta.starts[-1], 6, 32)
    k, v = torch.randn(meta.starts[-1], 2, 32), torch.randn(meta.starts[-1], 2, 32)
    cached = torch.randn(blocks, BLOCK, 2, 32)
    found = []
    with torch.inference_mode():
        for backend in (GatherAttention(), attention_pages.PageAttention()):
            backend.alloc({0: LayerShape(2, 32, 32)}, blocks, BLOCK, torch.float32, "cpu")
            backend._keys[0].copy_(cached)
            backend._values[0].copy_(cached.flip(0))
            found.append(backend.forward(LayerCall(0, q, k, v, 0.2, window), backend.plan(meta)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_nan_of_a_chunk_reaches_its_last_token_and_no_other_request(poisoned: str) -> None:
    meta, blocks = batch([9, 9], [9, 9], random.Random(3))
    step = {"query": torch.ones(18, 2, 32), "key": torch.ones(18, 2, 32), "value": torch.ones(18, 2, 32)}
    step[poisoned][17, 0, 0] = float("nan")
    backend = attention_pages.PageAttention()
    backend.alloc({0: LayerShape(2, 32, 32)}, blocks, BLOCK, torch.float32, "cpu")
    out = backend.forward(LayerCall(0, step["query"], step["key"], step["value"], 1.0), backend.plan(meta))
    assert torch.isfinite(out[:9]).all()
    assert torch.isnan(out[17, 0]).any()


@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_nan_of_a_row_reaches_its_output_and_no_other(poisoned: str) -> None:
    meta, blocks = batch([9, 9], [1, 1], random.Random(3))
    step = {"query": torch.ones(2, 2, 8), "key": torch.ones(2, 2, 8), "value": torch.ones(2, 2, 8)}
    step[poisoned][1, 0, 0] = float("nan")
    backend = attention_pages.PageAttention()
    backend.alloc({0: LayerShape(2, 8, 8)}, blocks, BLOCK, torch.float32, "cpu")
    out = backend.forward(LayerCall(0, step["query"], step["key"], step["value"], 1.0), backend.plan(meta))
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1, 0]).any()
    assert torch.isfinite(out[1, 1]).all()


def test_kernels_of_numba_are_refused_for_a_dtype_without_them() -> None:

    import stage_runtime as omni
    from stage_runtime.engines.autoregressive.loading import loader

    spec = omni.Autoregressive(model="in memory", kernels="numba", dtype="float16", linears="plain")
    model = tiny_model("llama").half()
    with pytest.raises(ConfigurationError, match="float32 or bfloat16"):
        loader.assemble(spec, model, tiny_tokenizer())
