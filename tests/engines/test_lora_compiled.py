"""Adapters by compiled loops: the sums of torch's operators, for any number of rows, ranks and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stage_runtime.engines.autoregressive.kernels import native
from stage_runtime.engines.autoregressive.lora import compiled
from stage_runtime.engines.autoregressive.lora.checkpoints import Factors
from tests.engines.rank_threads import ranked

pytestmark = pytest.mark.skipif(not native.available(), reason="needs numba")
INPUTS = 48
PARTS = [(0, 40, 3, 0.5), (40, 16, 4, -2.0), (72, 33, 18, 1.25)]  # first output, outputs, rank, scale; a gap between
OUTPUTS = 110


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("count", [1, 7, 40, 150])
def test_loops_add_what_the_products_of_the_factors_give(
    count: int, listed: bool, dtype: torch.dtype, threads: int
) -> None:
    draw = torch.Generator().manual_seed(count)
    made = [
        (first, Factors(torch.randn(rank, INPUTS, generator=draw), torch.randn(size, rank, generator=draw), scale))
        for first, size, rank, scale in PARTS
    ]
    parts = [(first, Factors(one.a.to(dtype), one.b.to(dtype), one.scale)) for first, one in made]
    added = compiled.CompiledAdded(parts, compiled.Scratch())
    tokens = 2 * count if listed else count
    places = torch.randperm(tokens, generator=draw)[:count] if listed else None
    rows = torch.randn(tokens, INPUTS, generator=draw).to(dtype)
    out = torch.randn(tokens, OUTPUTS, generator=draw).to(dtype)
    expected = out.double()
    taken = torch.arange(tokens) if places is None else places
    for first, one in parts:
        change = rows[taken].double() @ one.a.double().T @ one.b.double().T * one.scale
        expected[taken, first : first + len(one.b)] += change
    for _turn in range(2):  # the second one meets the buffers of the first
        found = out.clone()
        added.add(rows, found, places)
        atol, rtol = (1e-4, 1e-4) if dtype is torch.float32 else (0.05, 0.02)
        torch.testing.assert_close(found, expected.to(dtype), atol=atol, rtol=rtol)


def test_an_engine_with_compiled_loops_computes_adapters_by_them() -> None:
    for kernels, loops in (("numba", True), ("torch", False)):
        with ranked("llama", 1, kernels=kernels, max_loras=1) as core:
            layers = core.executor.call(lambda runner: runner.model.adapters).result()
            assert (layers._scratch is not None) == loops
