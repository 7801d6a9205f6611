"""The loops of `lora.compiled`: rows taken out of a matrix, and added to one. It is imported only when
`native.available`, as `loops` is.
"""

# numba has no types for mypy, and compiles functions by their source.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np

from stage_runtime.engines.autoregressive.kernels import tiles
from stage_runtime.engines.autoregressive.kernels.loops import access, f32_at, f64_of, i64_at, loop, next_part


@loop
def take(bf16: bool) -> Any:
    """Rows of a matrix in f32, in the form that `products.interleave` gives.

    Arguments: input, output, the rows' places ``[rows]``, or 0: the first ones in order; rows, values that are taken of
    each, the input's stride by row. bf16: the input is.
    """
    at, load, _store = access(bf16)

    def kernel(data):
        words = i64_at(data)
        source, output, places, listed = at(words[2]), f32_at(words[3]), i64_at(words[4]), words[4] != 0
        rows, values, stride = words[5], words[6], words[7]
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            first, last = part * values // words[1], (part + 1) * values // words[1]
            for begin in range(0, rows, tiles.ROWS):
                count = min(tiles.ROWS, rows - begin)
                for one in range(first, last):
                    target = begin * values + one * count
                    for row in range(count):
                        place = places[begin + row] if listed else begin + row
                        output[target + row] = load(source, place * stride + one)

    return kernel


@loop
def add(bf16: bool) -> Any:
    """Add rows in f32, times a factor, to rows of a matrix.

    Arguments: the added rows, the matrix, its rows' places as of `take`; rows, values of each, the strides of both by
    row, the factor. bf16: the matrix is.
    """
    at, load, store = access(bf16)

    def kernel(data):
        words = i64_at(data)
        added, target, places, listed = f32_at(words[2]), at(words[3]), i64_at(words[4]), words[4] != 0
        rows, values, by_row, by_target = words[5], words[6], words[7], words[8]
        factor = np.float32(f64_of(words[9]))
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            first, last = part * values // words[1], (part + 1) * values // words[1]
            for row in range(rows):
                base, base_target = row * by_row, (places[row] if listed else row) * by_target
                for one in range(first, last):
                    store(target, base_target + one, load(target, base_target + one) + factor * added[base + one])

    return kernel
