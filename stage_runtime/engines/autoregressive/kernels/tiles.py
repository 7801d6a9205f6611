"""The innermost parts of `loops`, `chunk_attention` and `products`, as LLVM's vector instructions.

numba's vectorizer would keep their sums in memory; here they stay in registers while the inputs go by. bf16 values are
the upper halves of f32's, sums are f32. Addresses are whole numbers; packed weights are panels
``[outputs / LANES, inputs, LANES]``.
"""

# numba has no types for mypy.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stage_runtime.engines.autoregressive.kernels import loop_cache

LANES: Final = 16  # outputs of a panel: one register of AVX-512, several of others
PANELS: Final = 2
OUTPUTS: Final = PANELS * LANES  # of a tile
PAIR: Final = 4  # bytes of two bf16 values


class Registers(NamedTuple):
    """The registers of a processor while inputs go by. rows: of a tile, at most; with so many it has one panel at a
    time.

    sums: vectors of `LANES` beside others, for two panels of fewer rows, and for several queries of a KV head.
    """

    rows: int
    sums: int


WIDE: Final = Registers(rows=16, sums=16)  # 32 registers of 16 lanes
#: 16 registers of 8 lanes (AVX2), or 32 of 4 (ARM64). Most sums went to memory and back for every input with 16 rows.
NARROW: Final = Registers(rows=6, sums=5)


def registers(features: str) -> Registers:
    """features: of the processor, as LLVM lists them."""
    return WIDE if "+avx512f" in features.split(",") else NARROW


FEATURES: Final = loop_cache.features()
REGISTERS: Final = registers(FEATURES)
#: Whether the processor multiplies bf16 by bf16, two at a time, and adds both products to an f32.
DOTS: Final = "+avx512bf16" in FEATURES.split(",")
ROWS: Final = REGISTERS.rows
AHEAD: Final = 2048  # bytes of weights: asked for so long before they are read; measured in turns with 0, 1024 and 4096

_WORD: Final = ir.IntType(64)
_F32: Final = ir.FloatType()
_VECTOR: Final = ir.VectorType(_F32, LANES)
_UPPER_HALVES: Final = ir.VectorType(ir.IntType(16), LANES)
_BITS: Final = ir.VectorType(ir.IntType(32), LANES)


class _Bf16(ir.Type):  # type: ignore[misc]
    """LLVM's, for which llvmlite has no class."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bf16)

    def __hash__(self) -> int:
        return hash(_Bf16)


_PAIRS: Final = ir.VectorType(_Bf16(), 2 * LANES)


def weight_bytes(halved: bool) -> int:
    return 2 if halved else 4


def tile(halved: bool, registers: Registers = REGISTERS) -> Any:
    """``output = x @ weights + bias`` for at most as many rows as ``registers`` has, and `OUTPUTS` outputs.

    The function takes: rows; addresses of x ``[inputs, rows]``, weights, bias, output; inputs, and the output's
    distance between rows.
    """

    return _tile(registers, functools.partial(_product, halved=halved))


def pair_tile(rounded: bool, registers: Registers = REGISTERS) -> Any:
    """The same as `tile`, for bf16 by bf16: x is ``[pairs, rows, 2]``, panels are ``[pairs, LANES, 2]``.

    It needs a processor that has `DOTS`. The function takes the number of pairs of inputs, not of inputs. rounded: the
    output is bf16; else f32, as the bias.
    """

    return _tile(registers, functools.partial(_dot_product, rounded=rounded))


def _tile(registers: Registers, product: Callable[..., None]) -> Any:
    @intrinsic
    def multiply(typing_context, rows, x, weights, bias, output, inputs, stride):
        def build(context, builder, signature, values):
            _by_rows(builder, values[0], registers, lambda *form: product(_Code(builder), *form, *values[1:]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), build

    return multiply


def _by_rows(builder: Any, rows: Any, registers: Registers, product: Callable[[int, range], None]) -> None:
    """Code of ``product`` for each number of rows, and for the panels whose sums stay in registers."""
    after = builder.append_basic_block("after")
    switch = builder.switch(rows, after)
    for count in range(1, registers.rows + 1):
        block = builder.append_basic_block(f"rows{count}")
        switch.add_case(_word(count), block)
        builder.position_at_end(block)
        panels = PANELS if count * PANELS <= registers.sums else 1
        for first in range(0, PANELS, panels):
            product(count, range(first, first + panels))
        builder.branch(after)
    builder.position_at_end(after)


def scores(bf16: bool, dim: int, wide: int, group: int) -> Any:
    """The products of the queries of a KV head with keys of a page. ``dim`` is a multiple of `LANES`.

    The function takes: addresses of the queries ``[group, wide]``, f32, of the first key, and of the first score, f32;
    the number of keys; distances between keys, and between the scores of one query and of the next, in values.
    """

    @intrinsic
    def multiply(typing_context, queries, keys, found, count, by_key, by_query):
        def build(context, builder, signature, values):
            code = _Code(builder)
            for some in _portions(dim, group):
                _scores(code, bf16, dim, wide, some, *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), build

    return multiply


def weighted(bf16: bool, dim: int, wide: int, group: int) -> Any:
    """Add the values of a page, by their weights, to the sums of the queries of a KV head. ``dim`` as of `scores`.

    The function takes: addresses of the sums ``[group, wide]``, f32, of the first value, and of the first weight, f32;
    then as `scores`.
    """

    @intrinsic
    def add(typing_context, sums, values, weights, count, by_value, by_query):
        def build(context, builder, signature, given):
            code = _Code(builder)
            for some in _portions(dim, group):
                _weighted(code, bf16, dim, wide, some, *given)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), build

    return add


@intrinsic
def largest(typing_context, values, count):
    """The largest of ``count`` f32, a multiple of `LANES` and not 0. NaN is passed over."""

    def build(context, builder, signature, given):
        code = _Code(builder)

        def body(index: Any, tops: list[Any]) -> list[Any]:
            found = code.vector(code.at(given[0], (index, LANES * 4)))
            return [builder.select(builder.fcmp_ordered(">", found, tops[0]), found, tops[0])]

        least = ir.Constant(_VECTOR, [float("-inf")] * LANES)
        (tops,) = code.loop(builder.udiv(given[1], _word(LANES)), [least], body)
        return code.top(tops)

    return types.float32(types.int64, types.int64), build


def _portions(dim: int, group: int) -> Iterator[range]:
    """Queries whose vectors fit in registers."""
    most = max(1, REGISTERS.sums // (dim // LANES))
    for first in range(0, group, most):
        yield range(first, min(group, first + most))


class _Code:
    """The common part of the loops."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        lanes = f"v{LANES}f32"
        self._fused = self._declared(f"llvm.fmuladd.{lanes}", ir.FunctionType(_VECTOR, [_VECTOR] * 3))
        self._added = self._declared(f"llvm.vector.reduce.fadd.{lanes}", ir.FunctionType(_F32, [_F32, _VECTOR]))
        self._top = self._declared(f"llvm.vector.reduce.fmax.{lanes}", ir.FunctionType(_F32, [_VECTOR]))

    def _declared(self, name: str, kind: Any) -> Any:
        module = self.builder.module
        return module.globals[name] if name in module.globals else ir.Function(module, kind, name)

    def at(self, address: Any, *distances: tuple[Any, int]) -> Any:
        """The address plus distances, each a count and its size in bytes."""
        for count, size in distances:
            address = self.builder.add(address, self.builder.mul(count, _word(size)))
        return address

    def vector(self, address: Any, bf16: bool = False) -> Any:
        if not bf16:
            return self.builder.load(self.builder.inttoptr(address, _VECTOR.as_pointer()), align=4)
        halves = self.builder.load(self.builder.inttoptr(address, _UPPER_HALVES.as_pointer()), align=2)
        bits = self.builder.shl(self.builder.zext(halves, _BITS), ir.Constant(_BITS, [16] * LANES))
        return self.builder.bitcast(bits, _VECTOR)

    def same(self, address: Any) -> Any:
        """One f32 in all lanes."""
        value = self.builder.load(self.builder.inttoptr(address, _F32.as_pointer()), align=4)
        nothing = ir.Constant(_VECTOR, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(_BITS, [0] * LANES))

    def pairs(self, address: Any) -> Any:
        """`LANES` pairs of bf16."""
        found = self.builder.load(self.builder.inttoptr(address, _BITS.as_pointer()), align=4)
        return self.builder.bitcast(found, _PAIRS)

    def same_pair(self, address: Any) -> Any:
        """One pair of bf16 in all lanes."""
        value = self.builder.load(self.builder.inttoptr(address, ir.IntType(32).as_pointer()), align=4)
        nothing = ir.Constant(_BITS, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        same = self.builder.shuffle_vector(first, nothing, ir.Constant(_BITS, [0] * LANES))
        return self.builder.bitcast(same, _PAIRS)

    def dotted(self, one: Any, other: Any, total: Any) -> Any:
        """``total`` and both products of each pair."""
        kind = ir.FunctionType(_VECTOR, [_VECTOR, _PAIRS, _PAIRS])
        call = self._declared("llvm.x86.avx512bf16.dpbf16ps.512", kind)
        return self.builder.call(call, [total, one, other])

    def rounded(self, vector: Any) -> Any:
        """The vector rounded to bf16: to the nearest, ties to even. NaN stays NaN."""
        builder = self.builder

        def all_lanes(value: int) -> Any:
            return ir.Constant(_BITS, [value] * LANES)

        bits = builder.bitcast(vector, _BITS)
        odd = builder.and_(builder.lshr(bits, all_lanes(16)), all_lanes(1))
        upper = builder.lshr(builder.add(builder.add(bits, all_lanes(0x7FFF)), odd), all_lanes(16))
        upper = builder.select(builder.fcmp_unordered("uno", vector, vector), all_lanes(0x7FC0), upper)
        return builder.trunc(upper, _UPPER_HALVES)

    def fetch(self, address: Any) -> None:
        """Prefetch memory that is read soon. An address that cannot be read does no harm."""
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        asked = self._declared("llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [pointer, word, word, word]))
        for_reading, nearest, data = (ir.Constant(word, one) for one in (0, 3, 1))
        self.builder.call(asked, [self.builder.inttoptr(address, pointer), for_reading, nearest, data])

    def fused(self, one: Any, other: Any, total: Any) -> Any:
        return self.builder.call(self._fused, [one, other, total])

    def total(self, vector: Any) -> Any:
        return self.builder.call(self._added, [ir.Constant(_F32, 0.0), vector], fastmath=("reassoc",))

    def top(self, vector: Any) -> Any:
        """The largest of the lanes that are not NaN."""
        return self.builder.call(self._top, [vector], fastmath=("nnan",))

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=align)

    def loop(self, count: Any, begins: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """``count`` times, at least once: ``body(index, sums)`` returns the next sums. Returns: the last ones."""
        builder = self.builder
        before, within, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(within)
        builder.position_at_end(within)
        index = builder.phi(_WORD)
        sums = [builder.phi(_VECTOR) for _ in begins]
        found = body(index, sums)
        after = builder.add(index, _word(1))
        index.add_incoming(_word(0), before)
        index.add_incoming(after, builder.block)
        for one, begin, end in zip(sums, begins, found, strict=True):
            one.add_incoming(begin, before)
            one.add_incoming(end, builder.block)
        builder.cbranch(builder.icmp_signed("<", after, count), within, done)
        builder.position_at_end(done)
        return found


def _product(
    code: _Code,
    rows: int,
    panels: range,
    x: Any,
    weights: Any,
    bias: Any,
    output: Any,
    inputs: Any,
    stride: Any,
    *,
    halved: bool,
) -> None:
    """A tile, or one panel of it."""
    width = weight_bytes(halved)
    lines = [code.at(weights, (inputs, panel * LANES * width)) for panel in panels]

    def body(index: Any, sums: list[Any]) -> list[Any]:
        taken = [code.vector(line, halved) for line in _read(code, lines, index, width)]
        values = [code.same(code.at(x, (index, rows * 4), (_word(row), 4))) for row in range(rows)]
        pairs = [(value, one) for value in values for one in taken]
        return [code.fused(value, one, total) for (value, one), total in zip(pairs, sums, strict=True)]

    _keep(code, code.loop(inputs, _biases(code, bias, panels) * rows, body), panels, output, stride, 4)


def _dot_product(
    code: _Code,
    rows: int,
    panels: range,
    x: Any,
    weights: Any,
    bias: Any,
    output: Any,
    pairs: Any,
    stride: Any,
    *,
    rounded: bool,
) -> None:
    """The same as `_product`, by pairs of inputs."""
    lines = [code.at(weights, (pairs, panel * LANES * PAIR)) for panel in panels]

    def body(index: Any, sums: list[Any]) -> list[Any]:
        taken = [code.pairs(line) for line in _read(code, lines, index, PAIR)]
        values = [code.same_pair(code.at(x, (index, rows * PAIR), (_word(row), PAIR))) for row in range(rows)]
        both = [(value, one) for value in values for one in taken]
        return [code.dotted(value, one, total) for (value, one), total in zip(both, sums, strict=True)]

    sums = code.loop(pairs, _biases(code, bias, panels) * rows, body)
    _keep(code, [code.rounded(one) for one in sums] if rounded else sums, panels, output, stride, 2 if rounded else 4)


def _biases(code: _Code, bias: Any, panels: range) -> list[Any]:
    return [code.vector(code.at(bias, (_word(panel), LANES * 4))) for panel in panels]


def _read(code: _Code, lines: Sequence[Any], index: Any, width: int) -> list[Any]:
    """Addresses of the weights of an input, or of a pair; those that follow are asked for. width: of one, in bytes."""
    for line in lines:
        code.fetch(code.at(line, (index, LANES * width), (_word(AHEAD), 1)))
    return [code.at(line, (index, LANES * width)) for line in lines]


def _keep(code: _Code, sums: Sequence[Any], panels: range, output: Any, stride: Any, width: int) -> None:
    """Store sums, by row and panel. width: of an output, in bytes."""
    for number, one in enumerate(sums):
        row, panel = divmod(number, len(panels))
        code.store(one, code.at(output, (stride, row * width), (_word(panels[panel]), LANES * width)), align=width)


def _scores(
    code: _Code,
    bf16: bool,
    dim: int,
    wide: int,
    some: range,
    queries: Any,
    keys: Any,
    found: Any,
    count: Any,
    by_key: Any,
    by_query: Any,
) -> None:
    parts = range(0, dim, LANES)
    taken = {(one, at): code.vector(code.at(queries, (_word(one * wide + at), 4))) for one in some for at in parts}

    def body(index: Any, _sums: list[Any]) -> list[Any]:
        line = code.at(keys, (code.builder.mul(index, by_key), weight_bytes(bf16)))
        totals = dict.fromkeys(some, ir.Constant(_VECTOR, [0.0] * LANES))
        for at in parts:
            key = code.vector(code.at(line, (_word(at), weight_bytes(bf16))), bf16)
            totals = {one: code.fused(taken[one, at], key, total) for one, total in totals.items()}
        for one, total in totals.items():
            code.store(code.total(total), code.at(found, (by_query, one * 4), (index, 4)))
        return []

    code.loop(count, [], body)


def _weighted(
    code: _Code,
    bf16: bool,
    dim: int,
    wide: int,
    some: range,
    sums: Any,
    values: Any,
    weights: Any,
    count: Any,
    by_value: Any,
    by_query: Any,
) -> None:
    places = [(one, at) for one in some for at in range(0, dim, LANES)]

    def body(index: Any, totals: list[Any]) -> list[Any]:
        line = code.at(values, (code.builder.mul(index, by_value), weight_bytes(bf16)))
        shares = {one: code.same(code.at(weights, (by_query, one * 4), (index, 4))) for one in some}
        taken = {at: code.vector(code.at(line, (_word(at), weight_bytes(bf16))), bf16) for at in range(0, dim, LANES)}
        return [code.fused(shares[one], taken[at], total) for (one, at), total in zip(places, totals, strict=True)]

    addresses = [code.at(sums, (_word(one * wide + at), 4)) for one, at in places]
    for value, address in zip(code.loop(count, [code.vector(one) for one in addresses], body), addresses, strict=True):
        code.store(value, address)


def _word(value: int) -> Any:
    return ir.Constant(_WORD, value)
