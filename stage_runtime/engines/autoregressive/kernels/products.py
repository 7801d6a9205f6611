"""The loops of `linears.TiledLinear`. It is imported only when `native.available`, as `loops` is."""

# numba has no types for mypy, and compiles functions by their source.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any, Final

from stage_runtime.engines.autoregressive.kernels import tiles
from stage_runtime.engines.autoregressive.kernels.loops import f32_at, i64_at, loop, next_part

#: Whole tiles, of as many rows as stay in a second-level cache beside a panel of weights.
ROWS_AT_ONCE: Final = 128 // tiles.ROWS * tiles.ROWS


@loop
def interleave() -> Any:
    """Rows as `multiply` reads them: each block of `tiles.ROWS` rows, the last one smaller, as ``[inputs, rows]``.

    Arguments: input and output, f32, rows, inputs. A pair of values of bf16 is copied as one, and counted so.
    """

    def kernel(data):
        words = i64_at(data)
        source, output, rows, inputs = f32_at(words[2]), f32_at(words[3]), words[4], words[5]
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            first, last = part * inputs // words[1], (part + 1) * inputs // words[1]
            for row in range(rows):
                begin = row // tiles.ROWS * tiles.ROWS
                count = min(tiles.ROWS, rows - begin)
                base, base_out = row * inputs, begin * inputs + row - begin
                for at in range(first, last):
                    output[base_out + at * count] = source[base + at]

    return kernel


@loop
def multiply(halved: bool, paired: bool = False, rounded: bool = False) -> Any:
    """A linear layer: ``output = x @ weights + bias``. halved: weights are bf16; everything else is f32. paired: x and
    weights are bf16, and ``inputs`` counts pairs of them; rounded: the output, too.

    Arguments: x as `interleave` gives it, weights as `tiles` packs them, bias, output, rows, inputs, outputs.
    """
    tile = tiles.pair_tile(rounded) if paired else tiles.tile(halved)
    width, out = tiles.weight_bytes(halved), 2 if rounded else 4

    def kernel(data):
        words = i64_at(data)
        x, weights, bias, output = words[2], words[3], words[4], words[5]
        rows, inputs, outputs = words[6], words[7], words[8]
        groups = outputs // tiles.OUTPUTS
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            for begin in range(0, rows, ROWS_AT_ONCE):
                for group in range(part * groups // words[1], (part + 1) * groups // words[1]):
                    column = group * tiles.OUTPUTS
                    for row in range(begin, min(rows, begin + ROWS_AT_ONCE), tiles.ROWS):
                        tile(
                            min(tiles.ROWS, rows - row),
                            x + row * inputs * 4,
                            weights + column * inputs * width,
                            bias + column * 4,
                            output + (row * outputs + column) * out,
                            inputs,
                            outputs,
                        )

    return kernel
