"""Linear layers with weights in the form that this processor multiplies fastest: measured when a model is loaded.

The fastest form differs by processor and by vendor (f32, 16 rows, two processors of two vendors: oneDNN's packed
form 2.8x as fast as plain on one of them, MKL's on the other), so nothing is assumed.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from stage_runtime.engines.autoregressive.kernels import native, product_times

log = logging.getLogger(__name__)

LinearsBackend = Literal["plain", "onednn", "mkl", "numba"]
Shape: TypeAlias = tuple[int, int]  #: outputs, inputs
ROWS: Final = (1, 16, 64)  # rows of a step for which each form is timed
LEAST_ROUNDS: Final = 5
MOST_S: Final = 0.5  # of this thread, for one shape
CLOSE: Final = 1.1  # as a factor: less than what two measurements of one form differ by
TICK_S: Final = 1e-7  # a clock that has not moved
PREFERRED: Final[tuple[LinearsBackend, ...]] = ("numba", "onednn", "mkl", "plain")  # the first may need half the memory
#: Time that a program of a decoder's layers saves in each layer: 0.24 to 0.41 ms were measured, with 1 to 32 rows.
CALLS_S: Final = 0.3e-3
SMALLEST: Final = 64 * 64  # below, the call itself is what takes time
MKL_HINT: Final = 16  # rows that MKL packs for
LEAST_COPIED: Final = 1 << 14  # values for which a thread is worth its start
LEAST_READ: Final = 1 << 15  # weights for which it is


class PackedLinear(nn.Module):
    """A linear layer with a weight in a packed form; a drop-in for `nn.Linear` in inference on a CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None, backend: LinearsBackend) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.product = packed(weight, bias, backend)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.product(rows).view(*x.shape[:-1], self.out_features)


def packed(weight: Tensor, bias: Tensor | None, backend: LinearsBackend) -> Callable[[Tensor], Tensor]:
    """A function that multiplies rows ``[n, in]`` by ``weight [out, in]``, kept in the backend's form.

    Raises: RuntimeError: this build of torch, or this dtype, has no such form.
    """
    if not _built(backend):
        raise RuntimeError(f"this build of torch has no {backend}")
    if backend == "onednn":
        form = torch.ops.mkldnn._reorder_linear_weight(weight)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, form, bias, "none", [], "")
    if backend == "mkl":
        if weight.dtype != torch.float32:
            raise RuntimeError("MKL packs f32 only")
        form = torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_HINT)
        return lambda x: torch.ops.mkl._mkl_linear(x, form, weight, bias, x.shape[0])
    if backend == "numba":
        return TiledLinear(weight, bias)
    return lambda x: functional.linear(x, weight, bias)


def _built(backend: LinearsBackend) -> bool:
    """Whether this build of torch has the operators of a form."""
    if backend == "onednn":
        return hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if backend == "mkl":
        return hasattr(torch.ops.mkl, "_mkl_linear") and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
    return True


class TiledLinear:
    """A product by compiled loops (`products.multiply`).

    f32 weights that bf16 holds exactly, as those of most checkpoints, are kept as bf16: the numbers are the same, and a
    step of few requests, which takes as long as its weights take to be read, reads half as much. bf16 weights are
    multiplied by bf16 rows, where the processor does that (`tiles.DOTS`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Raises: RuntimeError: as `packed`."""
        if not tiled(weight):
            raise RuntimeError(f"no compiled product for {weight.dtype} {list(weight.shape)}")
        from stage_runtime.engines.autoregressive.kernels import products, tiles

        self.outputs, self.inputs, self.dtype = *weight.shape, weight.dtype
        if weight.dtype is torch.bfloat16:
            self.words = self.inputs // 2  #: Words of four bytes in a row of x: loops count these.
            panels = weight.view(-1, tiles.LANES, self.words, 2)
            self.multiply = products.multiply(False, True, True)
            #: The same as `multiply`, with an output in f32.
            self.multiply_sums = products.multiply(False, True, False)
        else:
            self.words = self.inputs
            short = weight.bfloat16()
            halved = torch.equal(short.float(), weight)
            panels = (short if halved else weight).view(-1, tiles.LANES, self.inputs)
            self.multiply = self.multiply_sums = products.multiply(halved)
        self._weight = panels.transpose(1, 2).contiguous()
        self._bias = (weight.new_zeros(self.outputs) if bias is None else bias).float().contiguous()
        self.interleave = products.interleave()
        self._most_parts = self.outputs // tiles.OUTPUTS
        self.weight_bytes = self._weight.numel() * self._weight.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        x, rows = x.contiguous(), x.shape[0]
        out = x.new_empty(rows, self.outputs)
        if rows > 1:
            blocks = torch.empty_like(x)
            self.interleave(self.copy_parts(rows), x.data_ptr(), blocks.data_ptr(), rows, self.words)
            x = blocks
        self.multiply(self.parts(), x.data_ptr(), *self.addresses, out.data_ptr(), rows, self.words, self.outputs)
        return out

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the weight and the bias."""
        return self._weight.data_ptr(), self._bias.data_ptr()

    def copy_parts(self, rows: int) -> int:
        """How many parts `interleave` has."""
        return min(native.parts_for(rows * self.inputs, LEAST_COPIED), self.words)

    def parts(self) -> int:
        """How many parts `multiply` has."""
        return min(native.parts_for(self._weight.numel(), LEAST_READ), self._most_parts)


def tiled(weight: Tensor) -> bool:
    """Whether there is a `TiledLinear` of it."""
    if not native.available() or weight.dtype not in native.DTYPES:
        return False
    from stage_runtime.engines.autoregressive.kernels import tiles

    if weight.dtype is torch.bfloat16 and not (tiles.DOTS and weight.shape[1] % 2 == 0):
        return False
    return weight.shape[0] % tiles.OUTPUTS == 0 and weight.numel() > 0


def known_times(
    weight: Tensor, candidates: Sequence[LinearsBackend], kept: Path | None
) -> dict[LinearsBackend, list[float]]:
    """The times that `measure` gives, or those of a file in ``kept`` that an earlier process has written."""
    if kept is None or len(candidates) == 1:
        return measure(weight, candidates)
    halved = weight.dtype is torch.float32 and torch.equal(weight.bfloat16().float(), weight)
    path = product_times.path_of(kept, *weight.shape, weight.dtype, halved, *candidates, *ROWS)
    found = product_times.read(path, candidates, len(ROWS))
    if found is not None and found.settled:
        return cast("dict[LinearsBackend, list[float]]", found.times)
    rounds = _timed_rounds(weight, candidates)
    times, is_settled = least(rounds), settled(rounds)
    if found is not None and found.times.keys() == times.keys():  # of a start in which the processor was in use, too
        before = cast("dict[LinearsBackend, list[float]]", found.times)
        times = least([before, times])
        is_settled = is_settled or _close(before, times)
    product_times.write(
        path, product_times.KeptTimes(times={str(form): list(of) for form, of in times.items()}, settled=is_settled)
    )
    return times


def measure(weight: Tensor, candidates: Sequence[LinearsBackend]) -> dict[LinearsBackend, list[float]]:
    """Seconds of this thread that each form takes for each of `ROWS`: the least of rounds in which all take turns.

    Rounds are repeated until their least values are `settled`: whoever else uses the processor makes some of them slow.
    """
    return least(_timed_rounds(weight, candidates))


def _timed_rounds(weight: Tensor, candidates: Sequence[LinearsBackend]) -> list[dict[LinearsBackend, list[float]]]:
    forms = {}
    for backend in candidates:
        try:
            multiply = packed(weight, None, backend)
            for count in ROWS:
                multiply(weight.new_zeros(count, weight.shape[1]))
            forms[backend] = multiply
        except RuntimeError as error:
            log.debug("no %s linears: %s", backend, error)
    inputs = [torch.randn(count, weight.shape[1]).to(weight.dtype) for count in ROWS]
    rounds: list[dict[LinearsBackend, list[float]]] = []
    began = time.thread_time()
    while not settled(rounds) and (len(rounds) < LEAST_ROUNDS or time.thread_time() - began < MOST_S):
        rounds.append({backend: [_seconds(multiply, rows) for rows in inputs] for backend, multiply in forms.items()})
    return rounds


def _seconds(multiply: Callable[[Tensor], Tensor], rows: Tensor) -> float:
    began = time.thread_time()  # not wall time: machines are shared
    multiply(rows)
    return time.thread_time() - began


def least(rounds: Sequence[Mapping[LinearsBackend, Sequence[float]]]) -> dict[LinearsBackend, list[float]]:
    """The least time of each form when nothing else is in its way."""
    return {
        backend: [min(times) for times in zip(*(one[backend] for one in rounds), strict=True)] for backend in rounds[0]
    }


def settled(rounds: Sequence[Mapping[LinearsBackend, Sequence[float]]]) -> bool:
    """Whether the last `LEAST_ROUNDS` rounds have made no least value smaller by more than `CLOSE`."""
    if len(rounds) < 2 * LEAST_ROUNDS:
        return False
    return _close(least(rounds[:-LEAST_ROUNDS]), least(rounds))


def _close(before: Mapping[LinearsBackend, Sequence[float]], now: Mapping[LinearsBackend, Sequence[float]]) -> bool:
    """Whether more rounds have made no time smaller by more than `CLOSE`."""
    return all(new * CLOSE >= old for backend in now for old, new in zip(before[backend], now[backend], strict=True))


def choose(times: Mapping[LinearsBackend, Sequence[float]]) -> LinearsBackend:
    """The form that is slower than the fastest by the smallest factor, on the geometric mean of `ROWS`.

    Forms within `CLOSE` of the best one are equal: the first of `PREFERRED` among them is taken, so that a machine
    makes the same choice each time.
    """
    factors = {
        backend: math.exp(statistics.fmean(math.log(max(one, TICK_S)) for one in of)) for backend, of in times.items()
    }
    best = min(factors.values())
    return next(backend for backend in PREFERRED if factors.get(backend, math.inf) <= best * CLOSE)


def pack(
    model: nn.Module,
    choice: LinearsBackend | Literal["auto"] = "auto",
    *,
    loops: bool = True,
    program: Sequence[Sequence[nn.Module]] = (),
    kept: Path | None = None,
) -> dict[LinearsBackend, int]:
    """Replace the linear layers of ``model`` on a CPU, each shape in the form that is fastest for it.

    choice: of all layers; with "numba", those whose shape has no such form are as with "auto". loops: whether "auto"
    may choose it. program: linear layers of each layer of a decoder that are one program if all of them are "numba":
    the choice is then made for all together (`together`). kept: a folder of `product_times`.
    Returns: how many layers have which form.
    """
    times: dict[Shape, dict[LinearsBackend, list[float]]] = {}
    chosen: dict[Shape, LinearsBackend] = {}
    used: dict[LinearsBackend, int] = {}
    found = [(parent, name, linear, *_weights(linear)) for parent, name, linear in _linears(model)]
    for _parent, _name, _linear, weight, _bias in found:
        shape = _shape(weight)
        if shape in chosen:
            continue
        if choice == "auto" or (choice == "numba" and not tiled(weight)):
            times[shape] = known_times(weight, _candidates(weight, loops), kept)
            chosen[shape] = choose(times[shape])
        else:
            chosen[shape] = choice
    shapes = [[_shape(_weights(linear)[0]) for linear in layer] for layer in program]
    as_one = loops and all(one in times for layer in shapes for one in layer) and together(times, shapes)
    members = {id(linear) for layer in program for linear in layer} if as_one else set()
    for parent, name, linear, weight, bias in found:
        backend: LinearsBackend = "numba" if id(linear) in members else chosen[_shape(weight)]
        used[backend] = used.get(backend, 0) + 1
        if backend != "plain":
            setattr(parent, name, PackedLinear(weight, bias, backend))
    return used


def together(
    times: Mapping[Shape, Mapping[LinearsBackend, Sequence[float]]],
    layers: Sequence[Sequence[Shape]],
    threads: int | None = None,
) -> bool:
    """Whether a decoder's layers are faster as one program, with all products in the form "numba", than one by one.

    times: as `measure` gives them. layers: the shapes of each layer's products. threads: while one calls loops, the
    others wait; None: as many as torch has. Decided by the geometric mean of `ROWS`, as `choose` does.
    """
    shapes = [shape for layer in layers for shape in layer]
    if not all("numba" in times[shape] for shape in shapes):
        return False
    calls = len(layers) * CALLS_S * (threads or torch.get_num_threads())
    factors = []
    for index in range(len(ROWS)):
        as_one = sum(times[shape]["numba"][index] for shape in shapes)
        apart = sum(times[shape][choose(times[shape])][index] for shape in shapes) + calls
        factors.append(math.log(max(as_one, TICK_S) / max(apart, TICK_S)))
    return statistics.fmean(factors) <= 0


def _shape(weight: Tensor) -> Shape:
    return weight.shape[0], weight.shape[1]


def _candidates(weight: Tensor, loops: bool) -> Sequence[LinearsBackend]:
    if weight.numel() < SMALLEST:
        return ("plain",)
    return ("plain", "onednn", "mkl", "numba") if loops else ("plain", "onednn", "mkl")


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear or type(child).__name__ == "Conv1D":
                yield parent, name, child


def _weights(linear: Any) -> tuple[Tensor, Tensor | None]:
    """``[out, in]``; GPT-2's Conv1D has it the other way round."""
    bias = None if linear.bias is None else linear.bias.detach()
    weight = linear.weight.detach()
    return (weight if type(linear) is nn.Linear else weight.T.contiguous()), bias
