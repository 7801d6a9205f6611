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
