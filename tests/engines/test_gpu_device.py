"""Threads of a stage compute on the stage's GPU. torch.cuda is a fake that records its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stage_runtime.engines.making import loading
from stage_runtime.engines.threads import stage_threads
from tests.engines.test_loading_engines import Here, plan


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The GPU that was set last, by thread."""
    found: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: found.__setitem__(threading.current_thread().name, gpu))
    return found


def run(name: str, target: Callable[[], Any]) -> None:
    failed = list[BaseException]()
    stage_threads.start(name, target, crashed=failed.append).join()
    assert failed == []


def loaded(gpu_id: int | None) -> None:
    loading.create(plan("factories:plain"), Here(), gpu_id=gpu_id)


@pytest.mark.parametrize(("gpu_id", "expected"), [(1, {"stage": 1, "worker": 1}), (None, {}), (2, {})])
def test_a_stage_s_threads_compute_on_its_gpu(
    gpu_id: int | None, expected: dict[str, int], chosen: dict[str, int]
) -> None:
    def stage() -> None:
        loaded(gpu_id)
        run("worker", lambda: None)

    run("stage", stage)
    run("another stage", lambda: None)
    assert chosen == expected
