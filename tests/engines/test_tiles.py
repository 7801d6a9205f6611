"""The tiles of products fit the registers of the processor, and each form of them gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("numba")

import numba

from stage_runtime.engines.autoregressive.kernels import tiles
from stage_runtime.engines.autoregressive.kernels.tiles import NARROW, WIDE, Registers


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("+avx,+avx2,+avx512bw,+avx512f,+fma", WIDE),
        ("+avx,+avx2,-avx512f,+fma", NARROW),
        ("+neon,+v8a", NARROW),
        ("", NARROW),
    ],
)
def test_tiles_are_as_large_as_the_processor_s_registers_hold(features: str, expected: Registers) -> None:
    assert tiles.registers(features) == expected


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("registers", [NARROW, WIDE])
def test_a_tile_of_any_number_of_rows_is_the_product(registers: Registers, halved: bool) -> None:
    tile = tiles.tile(halved, registers)

    @numba.njit  # type: ignore[untyped-decorator]
    def run(rows: Any, x: Any, weights: Any, bias: Any, output: Any, inputs: Any, stride: Any) -> None:
        tile(rows, x, weights, bias, output, inputs, stride)

    torch.manual_seed(1)
    inputs = 37
    weights = torch.randn(tiles.OUTPUTS, inputs).bfloat16()
    panels = weights.view(tiles.PANELS, tiles.LANES, inputs).transpose(1, 2).contiguous()
    panels, bias = panels if halved else panels.float(), torch.randn(tiles.OUTPUTS)
    for rows in range(1, registers.rows + 1):
        x = torch.randn(inputs, rows)
        output = torch.full((rows, tiles.OUTPUTS + 8), 7.0)
        run(rows, *(one.data_ptr() for one in (x, panels, bias, output)), inputs, output.shape[1])
        torch.testing.assert_close(output[:, : tiles.OUTPUTS], x.T @ weights.float().T + bias, rtol=1e-5, atol=1e-5)
        assert output[:, tiles.OUTPUTS :].tolist() == [[7.0] * 8] * rows


@pytest.mark.skipif(not tiles.DOTS, reason="this processor does not multiply bf16 by bf16")
@pytest.mark.parametrize("rounded", [False, True])
def test_a_tile_of_pairs_is_the_product_of_bf16_by_bf16(rounded: bool) -> None:
    tile = tiles.pair_tile(rounded)

    @numba.njit  # type: ignore[untyped-decorator]
    def run(rows: Any, x: Any, weights: Any, bias: Any, output: Any, pairs: Any, stride: Any) -> None:
        tile(rows, x, weights, bias, output, pairs, stride)

    torch.manual_seed(1)
    pairs = 37
    weights = torch.randn(tiles.OUTPUTS, 2 * pairs).bfloat16()
    panels = weights.view(tiles.PANELS, tiles.LANES, pairs, 2).transpose(1, 2).contiguous()
    bias, kind = torch.randn(tiles.OUTPUTS), torch.bfloat16 if rounded else torch.float32
    for rows in range(1, tiles.ROWS + 1):
        x = torch.randn(rows, 2 * pairs).bfloat16()
        if rows == 2:
            x[1, 5] = float("nan")
        given = x.view(rows, pairs, 2).transpose(0, 1).contiguous()
        output = torch.full((rows, tiles.OUTPUTS + 8), 7.0, dtype=kind)
        run(rows, *(one.data_ptr() for one in (given, panels, bias, output)), pairs, output.shape[1])
        expected = x.float() @ weights.float().T + bias
        found = output[:, : tiles.OUTPUTS].float()
        most = 2.0**-8 if rounded else 1e-5  # half of a bf16's last place, and the order of the sums
        torch.testing.assert_close(found, expected, rtol=most, atol=1e-4, equal_nan=True)
        assert output[:, tiles.OUTPUTS :].tolist() == [[7.0] * 8] * rows
