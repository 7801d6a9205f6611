"""``gpuMemory``: what a process may take of its device."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines import gpumemory

GIB = 1 << 30


def stage(
    name: str, *, gpus: tuple[int, ...] = (0,), share: float | None = None, nbytes: int | None = None
) -> StagePlan:
    return StagePlan(name=name, group="g", factory="m:f", gpus=gpus, gpu_memory_fraction=share, gpu_memory_bytes=nbytes)


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        ([stage("a", share=0.25)], 0.25),
        ([stage("a", share=0.25), stage("b", share=0.5)], 0.75),
        ([stage("a", nbytes=20 * GIB), stage("b", nbytes=20 * GIB)], 0.5),
        ([stage("a", share=0.9), stage("b", share=0.9)], 1.0),
        ([stage("a", share=0.25), stage("cpu", gpus=())], 0.25),
        ([stage("a", share=0.25), stage("b")], None),
        ([stage("cpu", gpus=())], None),
    ],
)
def test_the_stages_of_a_process_share_the_sum_of_their_budgets(stages: list[StagePlan], wanted: float | None) -> None:
    assert gpumemory.fraction(stages, 80 * GIB) == wanted


def _torch(*, built: bool, **cuda: Any) -> SimpleNamespace:
    backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: built))
    return SimpleNamespace(cuda=SimpleNamespace(**cuda), backends=backends)


def test_a_torch_without_cuda_has_nothing_to_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _torch(built=False))
    gpumemory.keep([stage("a", share=0.5)], 0)


def test_torch_is_given_the_share_of_the_process_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, int]] = []
    torch = _torch(
        built=True,
        get_device_properties=lambda _device: SimpleNamespace(total_memory=40 * GIB),
        set_per_process_memory_fraction=lambda share, device: limits.append((share, device)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    gpumemory.keep([stage("a", nbytes=10 * GIB)], 1)
    gpumemory.keep([stage("a", share=0.5), stage("b")], 1)
    assert limits == [(0.25, 1)]


@pytest.mark.parametrize(("stages", "gpu_id"), [([stage("a", share=0.5)], None), ([stage("a")], 0)])
def test_without_a_device_or_a_budget_torch_is_not_even_imported(
    stages: list[StagePlan], gpu_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it would raise
    gpumemory.keep(stages, gpu_id)


@pytest.mark.gpu
def test_what_goes_beyond_the_budget_is_refused_on_a_device() -> None:
    """Needs a CUDA device: the allocator's limit is the driver's side of this promise."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    capacity = torch.cuda.get_device_properties(0).total_memory
    gpumemory.keep([stage("a", share=0.1)], 0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(int(capacity * 0.2), dtype=torch.uint8, device="cuda:0")
