"""``gpuMemory``: what a process may take of its device."""

from __future__ import annotations

import contextvars
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime import api as omni
from stage_runtime.engines.autoregressive.stage import factory
from stage_runtime.engines.gpus import gpumemory
from stage_runtime.errors import ConfigurationError

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


def test_budgets_in_bytes_on_one_gpu_must_fit_it_and_both_stages_are_named() -> None:
    stages = [stage("a", nbytes=12 * GIB), stage("b", nbytes=11 * GIB), stage("c", gpus=(1,), nbytes=90 * GIB)]
    gpumemory.check_capacity(stages, 0, 25 * GIB, 0.95)
    with pytest.raises(ConfigurationError) as caught:
        gpumemory.check_capacity(stages, 0, 24 * GIB, 0.95)
    assert str(caught.value) == (
        "gpuMemory: the budgets on GPU 0 sum to 24696061952 bytes (a 12Gi + b 11Gi); it has 25769803776 bytes, "
        "of which gpuMemoryLimit 0.95 allows 24481313587"
    )


@pytest.mark.parametrize(
    ("free", "share", "weights", "wanted"),
    [
        (80, 1.0, 16, 64),  # alone
        (80, 0.5, 16, 24),  # one of two engines, or half of the device by gpuMemory
        (10, 0.5, 16, 10),  # another program has the rest
        (80, 0.1, 16, 0),  # no room beside the weights
    ],
)
def test_an_engine_takes_its_share_less_its_weights(free: int, share: float, weights: int, wanted: int) -> None:
    assert gpumemory.left_for_cache(total=80, free=free, share=share, weights=weights) == wanted


def test_engine_processes_divide_the_budget_of_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = _torch(
        built=True,
        get_device_properties=lambda _device: SimpleNamespace(total_memory=40 * GIB),
        set_per_process_memory_fraction=lambda share, device: None,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    mine, other = stage("mine", share=0.5), stage("other", share=0.25)
    contextvars.copy_context().run(_launch_both, mine, other)


def _launch_both(mine: StagePlan, other: StagePlan) -> None:
    for device, budget, wanted in (("cuda:0", mine, 0.25), ("cuda:0", other, 0.125)):
        gpumemory.keep([mine, other], 0, loading=budget)
        spec = omni.Autoregressive(model="m", data_parallel_size=2)
        assert factory.launch_of(spec, device).kwargs["gpu_share"] == wanted
    assert "gpu_share" not in factory.launch_of(omni.Autoregressive(model="m"), "cpu").kwargs


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
