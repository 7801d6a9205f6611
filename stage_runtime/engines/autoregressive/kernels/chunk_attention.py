"""Attention of prompts' chunks, over pages where they lie. It is imported only when `native.available`, as `loops` is.

The keys and values of a segment are copied into the form that `tiles.tile` multiplies by, once for many queries; sums
of the segments before are scaled when a larger score is found (as flash attention does), so that what a thread needs
stays in its cache, however long the prompt is.
"""

# numba has no types for mypy, and compiles functions by their source.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from stage_runtime.engines.autoregressive.kernels import tiles
from stage_runtime.engines.autoregressive.kernels.loops import _exp, access, f32_at, f64_of, i64_at, loop, next_part

QUERIES: Final = 64  # tokens of a unit, at most: so often is a copied segment read
KEYS: Final = 128  # of a segment: a multiple of `tiles.OUTPUTS`

_tile = tiles.tile(False)


@njit
def _product(rows, x, weights, bias, output, inputs, stride):
    """One copy of the code for both products."""
    _tile(rows, x, weights, bias, output, inputs, stride)


def fits(value_dim: int) -> bool:
    """Whether the loop computes values of that size."""
    return value_dim % tiles.OUTPUTS == 0


def scratch(key_dim: int, value_dim: int, group: int) -> int:
    """Words of f32 that each part needs."""
    of_segment = KEYS * (key_dim + value_dim + 2 * tiles.ROWS)
    of_tile = tiles.ROWS * (value_dim + 1)
    return tiles.OUTPUTS + of_segment + of_tile + QUERIES * group * (key_dim + value_dim + 2)


@loop
def attention(bf16: bool, key_dim: int, value_dim: int, group: int, block_size: int) -> Any:
    """Each query sees the keys up to its own.

    Arguments, of the layer: as `loops.decode_attention`. Arguments of the step: units ``[units, 5]``: first token,
    tokens, position of the first, row of the tables, KV head; tables ``[rows, width]``; bounds of the parts in units;
    scratch, words of it for each part; width.
    """
    at, load, store = access(bf16)
    lanes, outputs = tiles.LANES, tiles.OUTPUTS
    heads_at_once = -(-group // -(-group // tiles.ROWS))  # equal tiles: one of few rows is slow
    tokens_at_once = tiles.ROWS // heads_at_once

    def kernel(data):
        words = i64_at(data)
        queries, keys, values, output = at(words[2]), at(words[3]), at(words[4]), at(words[5])
        heads, window, scale = words[6], words[7], np.float32(f64_of(words[8]))
        by_token, by_head = words[9], words[10]
        units, tables, bounds = i64_at(words[11]), i64_at(words[12]), i64_at(words[13])
        width = words[16]
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            zeros_at = words[14] + part * words[15] * 4
            keys_at = zeros_at + outputs * 4
            values_at = keys_at + KEYS * key_dim * 4
            scores_at = values_at + KEYS * value_dim * 4
            shares_at = scores_at + KEYS * tiles.ROWS * 4
            x_at = shares_at + KEYS * tiles.ROWS * 4
            found_at = x_at + QUERIES * group * key_dim * 4
            factors = f32_at(found_at + tiles.ROWS * value_dim * 4)
            sums = f32_at(found_at + tiles.ROWS * (value_dim + 1) * 4)
            tops = f32_at(found_at + tiles.ROWS * (value_dim + 1) * 4 + QUERIES * group * value_dim * 4)
            wholes = f32_at(found_at + tiles.ROWS * (value_dim + 1) * 4 + QUERIES * group * (value_dim + 1) * 4)
            zeros, packed_keys, packed_values = f32_at(zeros_at), f32_at(keys_at), f32_at(values_at)
            scores, shares, x, found = f32_at(scores_at), f32_at(shares_at), f32_at(x_at), f32_at(found_at)
            for i in range(outputs):
                zeros[i] = np.float32(0)
            for unit in range(bounds[part], bounds[part + 1]):
                token, tokens, position = units[unit * 5], units[unit * 5 + 1], units[unit * 5 + 2]
                table, head = units[unit * 5 + 3] * width, units[unit * 5 + 4]
                for i in range(tokens * group):
                    tops[i] = np.float32(-np.inf)
                    wholes[i] = np.float32(0)
                for i in range(tokens * group * value_dim):
                    sums[i] = np.float32(0)
                # Queries as `tiles.tile` reads them: one block after the other.
                block = 0
                for first_head in range(0, group, heads_at_once):
                    of_token = min(heads_at_once, group - first_head)
                    for first in range(0, tokens, tokens_at_once):
                        rows = min(tokens_at_once, tokens - first) * of_token
                        for r in range(rows):
                            base = (token + first + r // of_token) * by_token
                            base += (head * group + first_head + r % of_token) * by_head
                            for d in range(key_dim):
                                x[block + d * rows + r] = load(queries, base + d) * scale
                        block += rows * key_dim
                begin, end = max(0, position + 1 - window), position + tokens
                while begin < end:
                    count = min(KEYS, end - begin)
                    for k in range(count):
                        place = begin + k
                        slot = tables[table + place // block_size] * block_size + place % block_size
                        source = (slot * heads + head) * key_dim
                        target = k // lanes * lanes * key_dim + k % lanes
                        for d in range(key_dim):
                            packed_keys[target + d * lanes] = load(keys, source + d)
                        source = (slot * heads + head) * value_dim
                        for panel in range(value_dim // lanes):
                            target = (panel * count + k) * lanes
                            for d in range(lanes):
                                packed_values[target + d] = load(values, source + panel * lanes + d)
                    block = x_at
                    for first_head in range(0, group, heads_at_once):
                        of_token = min(heads_at_once, group - first_head)
                        for first in range(0, tokens, tokens_at_once):
                            some = min(tokens_at_once, tokens - first)
                            rows = some * of_token
                            own_x = block
                            block += rows * key_dim * 4
                            if begin > position + first + some - 1 or begin + count <= position + first + 1 - window:
                                continue
                            for k in range(0, min(count, position + first + some - begin), outputs):
                                _product(
                                    rows,
                                    own_x,
                                    keys_at + k * key_dim * 4,
                                    zeros_at,
                                    scores_at + k * 4,
                                    key_dim,
                                    KEYS,
                                )
                            for r in range(rows):
                                own = position + first + r // of_token - begin  # its own key's place
                                low, high = min(count, max(0, own + 1 - window)), max(0, min(count, own + 1))
                                state = (first + r // of_token) * group + first_head + r % of_token
                                line = r * KEYS
                                top = tops[state]
                                whole_lanes = (high - low) // lanes * lanes if low < high else 0
                                if whole_lanes > 0:
                                    top = max(top, tiles.largest(scores_at + (line + low) * 4, whole_lanes))
                                for k in range(low + whole_lanes, high):
                                    top = max(top, scores[line + k])
                                whole = np.float32(0)
                                for k in range(low, high):
                                    share = _exp(scores[line + k] - top)
                                    scores[line + k] = share
                                    whole += share
                                for k in range(low):
                                    scores[line + k] = np.float32(0)
                                for k in range(high, count):
                                    scores[line + k] = np.float32(0)
                                factor = np.float32(1)
                                if low < high:
                                    factor = _exp(tops[state] - top)
                                factors[r] = factor
                                tops[state] = top
                                wholes[state] = wholes[state] * factor + whole
                            for r in range(rows):
                                for k in range(count):
                                    shares[k * rows + r] = scores[r * KEYS + k]
                            for d in range(0, value_dim, outputs):
                                _product(
                                    rows,
                                    shares_at,
                                    values_at + d * count * 4,
                                    zeros_at,
                                    found_at + d * 4,
                                    count,
                                    value_dim,
                                )
                            for r in range(rows):
                                state = (first + r // of_token) * group + first_head + r % of_token
                                for d in range(value_dim):
                                    sums[state * value_dim + d] = (
                                        sums[state * value_dim + d] * factors[r] + found[r * value_dim + d]
                                    )
                    begin += count
                for t in range(tokens):
                    for g in range(group):
                        share = np.float32(1) / wholes[t * group + g]
                        base = ((token + t) * heads * group + head * group + g) * value_dim
                        for d in range(value_dim):
                            store(output, base + d, sums[(t * group + g) * value_dim + d] * share)

    return kernel
