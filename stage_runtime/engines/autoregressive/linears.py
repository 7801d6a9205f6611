"""Linear layers with weights in the form that this processor multiplies fastest: measured when a model is loaded.

Which one is fastest differs by processor and by vendor (f32, 16 rows, two processors of two vendors: oneDNN's packed
form 2.8x as fast as plain on one of them, MKL's on the other), so nothing is assumed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger(__name__)

Backend = Literal["plain", "onednn", "mkl"]
ROWS: Final = (1, 16, 64)  # rows of a step for which each form is timed
REPEATS: Final = 5
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


def measure(weight: Tensor, candidates: Sequence[Backend]) -> dict[Backend, float]:
    """Seconds of this thread that each form takes for `ROWS` together, the best of some repeats taken in turns."""
    forms = {}
    for backend in candidates:
        try:
            multiply = packed(weight, None, backend)
            for count in ROWS:
                multiply(weight.new_zeros(count, weight.shape[1]))
            forms[backend] = multiply
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            log.debug("no %s linears: %s", backend, error)
    best = {backend: [float("inf")] * len(ROWS) for backend in forms}
    inputs = [torch.randn(count, weight.shape[1]).to(weight.dtype) for count in ROWS]
    for _ in range(REPEATS):
        for backend, multiply in forms.items():
            for at, rows in enumerate(inputs):
                began = time.thread_time()  # not wall time: machines are shared
                multiply(rows)
                best[backend][at] = min(best[backend][at], time.thread_time() - began)
    return {backend: sum(times) for backend, times in best.items()}


def fastest(weight: Tensor, candidates: Sequence[Backend]) -> Backend:
    times = measure(weight, candidates)
    return min(times, key=lambda backend: times[backend])


def pack(model: nn.Module, choice: Backend | Literal["auto"] = "auto") -> dict[Backend, int]:
    """Replace the linear layers of ``model`` on a CPU, each shape by the form that is fastest for it.

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
            chosen[shape] = fastest(weight, candidates) if choice == "auto" else choice
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
