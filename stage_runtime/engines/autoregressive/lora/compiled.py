"""The sums that an adapter adds to a layer's output on a CPU, by compiled loops: a program for each layer and adapter.

torch would compute it by several small operators, each divided among its threads. Each of these waits on a machine that
others use for the thread that has no processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from stage_runtime.engines.autoregressive.kernels import linears, native
from stage_runtime.engines.autoregressive.lora.checkpoints import Factors

LEAST: Final = 1 << 14  # values for which a thread is worth its start
ROWS_OF_A_READ: Final = 8  # so many rows by a weight take about as long as the weight takes to be read


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `CompiledAdded` computes it."""
    return device.type == "cpu" and dtype in native.DTYPES and native.available()


class Scratch:
    """The f32 buffers of all programs of a thread, by name: each run overwrites them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def address(self, name: str, values: int) -> int:
        """The address of a buffer of at least so many values."""
        found = self._buffers.get(name)
        if found is None or len(found) < values:
            found = self._buffers[name] = torch.empty(values)
        return found.data_ptr()


class CompiledAdded:
    """An adapter's part at one module: of one linear layer, or of those that the module has joined.

    Numbers are f32 throughout; weights that bf16 holds exactly are kept as bf16.
    """

    def __init__(self, parts: Sequence[tuple[int, Factors]], scratch: Scratch) -> None:
        """parts: each layer's factors, and the first output of the module that is the layer's. Its dtype is theirs."""
        from stage_runtime.engines.autoregressive.kernels import rows

        dtype = parts[0][1].a.dtype
        self._scratch = scratch
        self._inputs = parts[0][1].a.shape[1]
        self._itemsize = dtype.itemsize
        self._firsts = [first for first, _factors in parts]
        self._ranks = [factors.a.shape[0] for _first, factors in parts]
        self._sizes = [factors.b.shape[0] for _first, factors in parts]
        self._down = _tiled(torch.cat([factors.a for _first, factors in parts]))
        self._ups = [_tiled(factors.b) for _first, factors in parts]
        take, bf16 = rows.take(False), dtype is torch.bfloat16
        inner = self._down.outputs
        entries: list[native.Entry] = [
            (rows.take(bf16), ("take", "source", "blocks", "places", "rows", self._inputs, self._inputs)),
            (self._down.multiply, ("down", "blocks", *self._down.addresses, "inner", "rows", self._inputs, inner)),
        ]
        for index, (up, (_first, factors)) in enumerate(zip(self._ups, parts, strict=True)):
            rank, size = self._ranks[index], self._sizes[index]
            words = "added", f"target {index}", "places", "rows", size, up.outputs, "width", native.bits(factors.scale)
            entries += [
                (take, ("take inner", f"inner {index}", "blocks", 0, "rows", rank, inner)),
                (up.multiply, (f"up {index}", "blocks", *up.addresses, "added", "rows", rank, up.outputs)),
                (rows.add(bf16), (f"add {index}", *words)),
            ]
        self._program = native.NamedProgram(entries)

    @property
    def nbytes(self) -> int:
        return sum(one.weight_bytes for one in (self._down, *self._ups))

    def add(self, rows: Tensor, out: Tensor, places: Tensor | None) -> None:
        """rows: ``[tokens, inputs]``. out: ``[tokens, outputs]``, contiguous; the sum is written into it."""
        rows = rows.contiguous()
        count = len(rows) if places is None else len(places)
        address = self._scratch.address
        inner = address("inner", count * self._down.outputs)
        given = {
            "source": rows.data_ptr(),
            "blocks": address("blocks", count * max(self._inputs, *self._ranks)),
            "places": 0 if places is None else places.data_ptr(),
            "rows": count,
            "inner": inner,
            "added": address("added", count * max(one.outputs for one in self._ups)),
            "width": out.shape[1],
            "take": min(native.parts_for(count * self._inputs, LEAST), self._inputs),
            "take inner": 1,
            "down": _parts(self._down, count),
        }
        at = 0
        for index, (first, rank, size, up) in enumerate(
            zip(self._firsts, self._ranks, self._sizes, self._ups, strict=True)
        ):
            given[f"target {index}"] = out.data_ptr() + first * self._itemsize
            given[f"inner {index}"] = inner + at * 4
            given[f"up {index}"] = _parts(up, count)
            given[f"add {index}"] = min(native.parts_for(count * size, LEAST), size)
            at += rank
        self._program.run(given)


def _tiled(weight: Tensor) -> linears.TiledLinear:
    """The weight ``[outputs, inputs]`` in f32, with outputs of zeros up to a whole number of tiles."""
    from stage_runtime.engines.autoregressive.kernels import tiles

    return linears.TiledLinear(functional.pad(weight.float(), (0, 0, 0, -len(weight) % tiles.OUTPUTS)), None)


def _parts(linear: linears.TiledLinear, rows: int) -> int:
    """How many parts the product has: small weights are worth several threads when they are many rows'."""
    from stage_runtime.engines.autoregressive.kernels import tiles

    work = linear.outputs * linear.inputs * max(1, rows // ROWS_OF_A_READ)
    return min(native.parts_for(work, linears.LEAST_READ), linear.outputs // tiles.OUTPUTS)
