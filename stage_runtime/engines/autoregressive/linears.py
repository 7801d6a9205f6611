"""Linear layers with weights in the form that this processor multiplies fastest: measured when a model is loaded.

Which one is fastest differs by processor and by vendor (f32, 16 rows, two processors of two vendors: oneDNN's packed
form 2.8x as fast as plain on one of them, MKL's on the other), so nothing is assumed.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger(__name__)

Backend = Literal["plain", "onednn", "mkl"]
ROWS: Final = (1, 16, 64)  # rows of a step for which each form is timed
LEAST_ROUNDS: Final = 5
MOST_S: Final = 0.5  # of this thread, for one shape
CLOSE: Final = 1.1  # as a factor: less than what two measurements of one form differ by
TICK_S: Final = 1e-7  # a clock that has not moved
PREFERRED: Final[tuple[Backend, ...]] = ("onednn", "mkl", "plain")
SMALLEST: Final = 64 * 64  # below, the call itself is what takes time
MKL_HINT: Final = 16  # rows that MKL packs for


class PackedLinear(nn.Module):
    """A linear layer with a weight in a packed form; a drop-in for `nn.Linear` in inference on a CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None, backend: Backend) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._multiply = packed(weight, bias, backend)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._multiply(rows).view(*x.shape[:-1], self.out_features)


def packed(weight: Tensor, bias: Tensor | None, backend: Backend) -> Callable[[Tensor], Tensor]:
    """A function that multiplies rows ``[n, in]`` by ``weight [out, in]``, kept in the backend's form.

    Raises: RuntimeError: this build of torch, or this dtype, has no such form.
    """
    if backend == "onednn":
        form = torch.ops.mkldnn._reorder_linear_weight(weight)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, form, bias, "none", [], "")
    if backend == "mkl":
        if weight.dtype != torch.float32:
            raise RuntimeError("MKL packs f32 only")
        form = torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_HINT)
        return lambda x: torch.ops.mkl._mkl_linear(x, form, weight, bias, x.shape[0])
    return lambda x: functional.linear(x, weight, bias)


def measure(weight: Tensor, candidates: Sequence[Backend]) -> dict[Backend, list[float]]:
    """Seconds of this thread that each form takes for each of `ROWS`: the least of rounds in which all take turns.

    Rounds are repeated until their least values are `settled`: whoever else uses the processor makes some of them slow.
    """
    forms = {}
    for backend in candidates:
        try:
            multiply = packed(weight, None, backend)
            for count in ROWS:
                multiply(weight.new_zeros(count, weight.shape[1]))
            forms[backend] = multiply
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            log.debug("no %s linears: %s", backend, error)
    inputs = [torch.randn(count, weight.shape[1]).to(weight.dtype) for count in ROWS]
    rounds: list[dict[Backend, list[float]]] = []
    began = time.thread_time()
    while not settled(rounds) and (len(rounds) < LEAST_ROUNDS or time.thread_time() - began < MOST_S):
        rounds.append({backend: [_seconds(multiply, rows) for rows in inputs] for backend, multiply in forms.items()})
    return least(rounds)


def _seconds(multiply: Callable[[Tensor], Tensor], rows: Tensor) -> float:
    began = time.thread_time()  # not wall time: machines are shared
    multiply(rows)
    return time.thread_time() - began


def least(rounds: Sequence[Mapping[Backend, Sequence[float]]]) -> dict[Backend, list[float]]:
    """What each form takes when nothing else is in its way."""
    return {
        backend: [min(times) for times in zip(*(one[backend] for one in rounds), strict=True)] for backend in rounds[0]
    }


def settled(rounds: Sequence[Mapping[Backend, Sequence[float]]]) -> bool:
    """Whether the last `LEAST_ROUNDS` rounds have made no least value smaller by more than `CLOSE`."""
    if len(rounds) < 2 * LEAST_ROUNDS:
        return False
    before, now = least(rounds[:-LEAST_ROUNDS]), least(rounds)
    return all(new * CLOSE >= old for backend in now for old, new in zip(before[backend], now[backend], strict=True))


def choose(times: Mapping[Backend, Sequence[float]]) -> Backend:
    """The form that is slower than the fastest by the smallest factor, on the geometric mean of `ROWS`.

    Forms within `CLOSE` of the best one are equal: the first of `PREFERRED` among them is taken, so that a machine
    makes the same choice each time.
    """
    factors = {
        backend: math.exp(statistics.fmean(math.log(max(one, TICK_S)) for one in of)) for backend, of in times.items()
    }
    best = min(factors.values())
    return next(backend for backend in PREFERRED if factors.get(backend, math.inf) <= best * CLOSE)


def pack(model: nn.Module, choice: Backend | Literal["auto"] = "auto") -> dict[Backend, int]:
    """Replace the linear layers of ``model`` on a CPU, each shape in the form that is fastest for it.

    Returns: how many layers have which form.
    """
    chosen: dict[tuple[int, int], Backend] = {}
    used: dict[Backend, int] = {}
    for parent, name, linear in list(_linears(model)):
        weight, bias = _weights(linear)
        shape = (weight.shape[0], weight.shape[1])
        if shape not in chosen:
            small = weight.numel() < SMALLEST
            candidates: Sequence[Backend] = ("plain",) if small else ("plain", "onednn", "mkl")
            chosen[shape] = choose(measure(weight, candidates)) if choice == "auto" else choice
        backend = chosen[shape]
        used[backend] = used.get(backend, 0) + 1
        if backend != "plain":
            setattr(parent, name, PackedLinear(weight, bias, backend))
    return used


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
