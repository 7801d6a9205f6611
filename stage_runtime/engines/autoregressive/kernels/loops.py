"""The loops themselves, in the subset of Python that numba compiles. Imported only when `native.available`.

Each takes the address of its arguments as `native.Loop` lays them out. Values are f32, or bf16 read and written as
their 16 bits; sums are f32. Loops see no shapes beyond their arguments: the callers check.
"""

# numba has no types for mypy, and compiles functions by their source.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.extending import intrinsic

from stage_runtime.engines.autoregressive.kernels import loop_cache, tiles
from stage_runtime.engines.autoregressive.kernels.native import Loop

FAST = {"reassoc", "contract", "nsz", "arcp"}  # not nnan: NaN must reach the logits, which end the request
SIGNATURE = types.void(types.intp)


def _casting(build: Any, source: Any, target: Any) -> Any:
    def typed(typing_context, value):
        return target(source), lambda context, builder, signature, values: build(
            builder, values[0], context.get_value_type(target)
        )

    return intrinsic(typed)


f32_of = _casting(lambda builder, value, kind: builder.bitcast(value, kind), types.int32, types.float32)
bits_of = _casting(lambda builder, value, kind: builder.bitcast(value, kind), types.float32, types.int32)
f64_of = _casting(lambda builder, value, kind: builder.bitcast(value, kind), types.int64, types.float64)
i64_at = _casting(lambda builder, value, kind: builder.inttoptr(value, kind), types.int64, types.CPointer(types.int64))
f32_at = _casting(
    lambda builder, value, kind: builder.inttoptr(value, kind), types.int64, types.CPointer(types.float32)
)
u16_at = _casting(lambda builder, value, kind: builder.inttoptr(value, kind), types.int64, types.CPointer(types.uint16))


@intrinsic
def next_part(typing_context, words):
    """Take a part: adds 1 to the first word, and returns what it was. Threads do so at the same time."""

    def build(context, builder, signature, values):
        from llvmlite import ir

        return builder.atomic_rmw("add", values[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), build


@njit(inline="always")
def _load_f32(p, at):
    return p[at]


@njit(inline="always")
def _store_f32(p, at, value):
    p[at] = value


@njit(inline="always")
def _load_bf16(p, at):
    return f32_of(np.int32(np.int32(p[at]) << np.int32(16)))


@njit(inline="always")
def _store_bf16(p, at, value):
    """Rounded to the nearest, ties to even, as torch does."""
    word = bits_of(value)
    rounded = (word + np.int32(0x7FFF) + ((word >> np.int32(16)) & np.int32(1))) >> np.int32(16)
    p[at] = np.uint16(rounded & np.int32(0xFFFF)) if value == value else np.uint16(0x7FC0)


@njit(fastmath={"contract"})
def _exp(x):
    """e to the x to 2 units in the last place, in a form that vectorizes. NaN stays NaN."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    shifted = x * np.float32(1.44269504) + np.float32(12582912.0)  # its low bits are round(x / ln 2)
    n = shifted - np.float32(12582912.0)
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    scale = (bits_of(shifted) - np.int32(0x4B400000) + np.int32(127)) << np.int32(23)
    return y * f32_of(scale)


def access(bf16: bool) -> tuple[Any, Any, Any]:
    return (u16_at, _load_bf16, _store_bf16) if bf16 else (f32_at, _load_f32, _store_f32)


def loop(make: Callable[..., Any]) -> Callable[..., Loop]:
    """A loop for given constants, each compiled once. ``make`` returns the function to be compiled."""

    @functools.cache
    def made(*constants: int) -> Loop:
        name = f"{make.__name__}_{'_'.join(str(int(one)) for one in constants)}"

        def compile_() -> Any:
            kernel = make(*constants)
            kernel.__name__ = kernel.__qualname__ = name  # symbols of loops from different files must differ
            return cfunc(SIGNATURE, fastmath=FAST, error_model="numpy")(kernel)

        source = b"".join(_text(one) for one in (__file__, tiles.__file__, make.__code__.co_filename))
        found = loop_cache.compiled(name, source, compile_, kept=loop_cache.folder())
        return Loop(found.address, found.keeps)

    return made


@functools.cache
def _text(file: str) -> bytes:
    return Path(file).read_bytes()


def _scalar_scores(bf16: bool, dim: int, wide: int, group: int) -> Any:
    """`tiles.scores` of any ``dim``."""
    at, load, _store = access(bf16)

    @njit(inline="always")
    def multiply(queries, keys, found, count, by_key, by_query):
        query, key, score = f32_at(queries), at(keys), f32_at(found)
        for t in range(count):
            for g in range(group):
                total = np.float32(0)
                for d in range(dim):
                    total += query[g * wide + d] * load(key, t * by_key + d)
                score[g * by_query + t] = total

    return multiply


def _scalar_weighted(bf16: bool, dim: int, wide: int, group: int) -> Any:
    """`tiles.weighted` of any ``dim``."""
    at, load, _store = access(bf16)

    @njit(inline="always")
    def add(sums, values, weights, count, by_value, by_query):
        total, value, weight = f32_at(sums), at(values), f32_at(weights)
        for g in range(group):
            for t in range(count):
                for d in range(dim):
                    total[g * wide + d] += weight[g * by_query + t] * load(value, t * by_value + d)

    return add


@loop
def decode_attention(bf16: bool, key_dim: int, value_dim: int, group: int, block_size: int) -> Any:
    """Attention of one query token a row, over pages where they lie.

    Arguments, of the layer: queries, keys, values, output; KV heads, window, scale, strides of queries by token and by
    head. Arguments of the step: rows' tokens ``[rows]``, lengths ``[rows]``, tables ``[rows, width]``, bounds of the
    parts in units of (row, KV heads); scratch, words of it for each part; width; KV heads of a unit: with all of them,
    pages are read from end to end.
    """
    at, load, store = access(bf16)
    wide, size = max(key_dim, value_dim), 2 if bf16 else 4
    vectors = key_dim % tiles.LANES == value_dim % tiles.LANES == 0
    score_page = (tiles.scores if vectors else _scalar_scores)(bf16, key_dim, wide, group)
    add_page = (tiles.weighted if vectors else _scalar_weighted)(bf16, value_dim, wide, group)

    def kernel(data):
        words = i64_at(data)
        queries, output = at(words[2]), at(words[5])
        heads, window, scale = words[6], words[7], np.float32(f64_of(words[8]))
        by_token, by_head = words[9], words[10]
        tokens, lengths, tables, bounds = i64_at(words[11]), i64_at(words[12]), i64_at(words[13]), i64_at(words[14])
        width, each = words[17], words[18]
        count = each * group  # queries of a unit
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            place_of = words[15] + part * words[16] * 4
            scratch = f32_at(place_of)  # [count, wide]: the queries, later the sums of values; [count, length]: scores
            scores = count * wide
            for unit in range(bounds[part], bounds[part + 1]):
                row = unit * each // heads
                head = unit * each - row * heads
                length = lengths[row]
                first = max(0, length - window)
                for q in range(count):
                    base = tokens[row] * by_token + (head * group + q) * by_head
                    for d in range(key_dim):
                        scratch[q * wide + d] = load(queries, base + d) * scale
                place = first
                while place < length:
                    block = place // block_size
                    end = min(length, (block + 1) * block_size)
                    slot = (tables[row * width + block] - block) * block_size + place
                    for h in range(each):
                        score_page(
                            place_of + h * group * wide * 4,
                            words[3] + (slot * heads + head + h) * key_dim * size,
                            place_of + (scores + h * group * length + place) * 4,
                            end - place,
                            heads * key_dim,
                            length,
                        )
                    place = end
                for q in range(count):
                    top = np.float32(-np.inf)
                    at_q = scores + q * length
                    whole_lanes = (length - first) // tiles.LANES * tiles.LANES
                    if whole_lanes > 0:
                        top = tiles.largest(place_of + (at_q + first) * 4, whole_lanes)
                    for t in range(first + whole_lanes, length):
                        top = max(top, scratch[at_q + t])
                    whole = np.float32(0)
                    for t in range(first, length):
                        weight = _exp(scratch[at_q + t] - top)
                        scratch[at_q + t] = weight
                        whole += weight
                    share = np.float32(1) / whole
                    for t in range(first, length):
                        scratch[at_q + t] *= share
                for d in range(count * wide):
                    scratch[d] = np.float32(0)
                place = first
                while place < length:
                    block = place // block_size
                    end = min(length, (block + 1) * block_size)
                    slot = (tables[row * width + block] - block) * block_size + place
                    for h in range(each):
                        add_page(
                            place_of + h * group * wide * 4,
                            words[4] + (slot * heads + head + h) * value_dim * size,
                            place_of + (scores + h * group * length + place) * 4,
                            end - place,
                            heads * value_dim,
                            length,
                        )
                    place = end
                for q in range(count):
                    base = ((tokens[row] * heads + head) * group + q) * value_dim
                    for d in range(value_dim):
                        store(output, base + d, scratch[q * wide + d])

    return kernel


@loop
def rms_norm(bf16: bool) -> Any:
    """Each ``[dim]`` divided by the root of its mean square, times a weight. May write where it reads.

    Arguments: input, weight, output, rows, heads of a row, dim, input's and output's stride by row, epsilon.
    """
    at, load, store = access(bf16)

    def kernel(data):
        words = i64_at(data)
        source, weight, output = at(words[2]), at(words[3]), at(words[4])
        rows, heads, dim, by_row, by_row_out = words[5], words[6], words[7], words[8], words[9]
        epsilon = np.float32(f64_of(words[10]))
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            for row in range(part * rows // words[1], (part + 1) * rows // words[1]):
                for head in range(heads):
                    base, base_out = row * by_row + head * dim, row * by_row_out + head * dim
                    total = np.float32(0)
                    for d in range(dim):
                        value = load(source, base + d)
                        total += value * value
                    factor = np.float32(1) / np.sqrt(total / np.float32(dim) + epsilon)
                    for d in range(dim):
                        store(output, base_out + d, load(source, base + d) * factor * load(weight, d))

    return kernel


@loop
def add_rms_norm(bf16: bool) -> Any:
    """``sums += added``, then `rms_norm` of the sums. Both are f32; bf16: weight and output are not.

    Arguments: sums, added, weight, output, rows, dim, epsilon.
    """
    at, load, store = access(bf16)

    def kernel(data):
        words = i64_at(data)
        sums, added, weight, output = f32_at(words[2]), f32_at(words[3]), at(words[4]), at(words[5])
        rows, dim = words[6], words[7]
        epsilon = np.float32(f64_of(words[8]))
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            for row in range(part * rows // words[1], (part + 1) * rows // words[1]):
                base = row * dim
                total = np.float32(0)
                for d in range(dim):
                    value = sums[base + d] + added[base + d]
                    sums[base + d] = value
                    total += value * value
                factor = np.float32(1) / np.sqrt(total / np.float32(dim) + epsilon)
                for d in range(dim):
                    store(output, base + d, sums[base + d] * factor * load(weight, d))

    return kernel


@loop
def write_pages(bf16: bool) -> Any:
    """Copy rows into pages. Arguments: K and V rows, pages of K and of V, slots ``[rows]``, rows, values of a
    token's K and V, stride by row.
    """
    at, _load, _store = access(bf16)

    def kernel(data):
        words = i64_at(data)
        new_keys, new_values = at(words[2]), at(words[3])
        keys, values = at(words[4]), at(words[5])
        slots = i64_at(words[6])
        rows, key_size, value_size, by_row = words[7], words[8], words[9], words[10]
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            for row in range(part * rows // words[1], (part + 1) * rows // words[1]):
                for d in range(key_size):
                    keys[slots[row] * key_size + d] = new_keys[row * by_row + d]
                for d in range(value_size):
                    values[slots[row] * value_size + d] = new_values[row * by_row + d]

    return kernel


@loop
def silu_multiply(bf16: bool) -> Any:
    """``silu(gate) * up``, of rows ``[gate, up]``. Arguments: input ``[rows, 2 * dim]``, output, rows, dim."""
    at, load, store = access(bf16)

    def kernel(data):
        words = i64_at(data)
        source, output, rows, dim = at(words[2]), at(words[3]), words[4], words[5]
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            for row in range(part * rows // words[1], (part + 1) * rows // words[1]):
                base, base_out = row * 2 * dim, row * dim
                for d in range(dim):
                    gate = load(source, base + d)
                    store(output, base_out + d, gate / (np.float32(1) + _exp(-gate)) * load(source, base + dim + d))

    return kernel


@loop
def rotate(bf16: bool) -> Any:
    """Rotary embedding of the first heads of each row, in place: halves of a head are the two axes.

    Arguments: values, cosines and sines ``[rows, dim]``, rows, heads, dim, stride by row.
    """
    at, load, store = access(bf16)

    def kernel(data):
        words = i64_at(data)
        values, cosines, sines = at(words[2]), at(words[3]), at(words[4])
        rows, heads, dim, by_row = words[5], words[6], words[7], words[8]
        half = dim // 2
        while True:
            part = next_part(words)
            if part >= words[1]:
                return
            for row in range(part * rows // words[1], (part + 1) * rows // words[1]):
                turn = row * dim
                for head in range(heads):
                    base = row * by_row + head * dim
                    for d in range(half):
                        x, y = load(values, base + d), load(values, base + half + d)
                        c, s = load(cosines, turn + d), load(sines, turn + d)
                        c2, s2 = load(cosines, turn + half + d), load(sines, turn + half + d)
                        store(values, base + d, x * c - y * s)
                        store(values, base + half + d, y * c2 + x * s2)

    return kernel
