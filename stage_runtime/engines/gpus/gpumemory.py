"""A process keeps to its stages' ``gpuMemory``: torch's allocator refuses what goes beyond.

So a stage that takes too much meets an OutOfMemoryError of its own; without the cap its neighbour on the device
would. The cap covers torch's allocator. The CUDA context itself (some hundred MiB per process) and libraries that
allocate by themselves come on top; ``gpuMemoryLimit`` leaves room for them.

Engines of one stage in processes of their own divide the stage's budget.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterable
from typing import Final

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.errors import ConfigurationError

log = logging.getLogger(__name__)

#: The budget of the stage that is being loaded in this thread, as a fraction of its device.
_of_stage: Final = contextvars.ContextVar[float | None]("omni_gpu_memory", default=None)


def share_of_stage() -> float | None:
    """The share of its device that the stage being loaded in this thread may take; None: it states no budget."""
    return _of_stage.get()


def check_capacity(stages: Iterable[StagePlan], gpu: int, capacity_bytes: int, limit: float) -> None:
    """stages: of all processes. gpu: as their plans name it. limit: ``gpuMemoryLimit``.

    Raises: ConfigurationError: the budgets in bytes on that GPU sum to more than it has; names the stages.
    """
    wanted = {one.name: one.gpu_memory_bytes for one in stages if gpu in one.gpus and one.gpu_memory_bytes is not None}
    total, allowed = sum(wanted.values()), int(capacity_bytes * limit)
    if total > allowed:
        summed = " + ".join(f"{name} {nbytes / 2**30:.4g}Gi" for name, nbytes in wanted.items())
        raise ConfigurationError(
            f"gpuMemory: the budgets on GPU {gpu} sum to {total} bytes ({summed}); it has {capacity_bytes} bytes, "
            f"of which gpuMemoryLimit {limit:g} allows {allowed}"
        )


def left_for_cache(*, total: int, free: int, share: float, weights: int) -> int:
    """Bytes of a device that an engine may use beside its weights.

    share: the engine's, of the whole device; what others of its process have allocated does not count against it.
    """
    return max(min(free, int(share * total) - weights), 0)


def fraction(stages: Iterable[StagePlan], capacity_bytes: int) -> float | None:
    """The share of their device that the stages of one process may take together, 0 < f <= 1.

    capacity_bytes: the device's memory.
    Returns: None when a stage that uses the GPU states no budget: then the process has none.
    """
    total = 0.0
    users = [stage for stage in stages if stage.gpus]
    for stage in users:
        if stage.gpu_memory_fraction is not None:
            total += stage.gpu_memory_fraction
        elif stage.gpu_memory_bytes is not None:
            total += stage.gpu_memory_bytes / capacity_bytes
        else:
            return None
    return min(total, 1.0) if users else None


def cap(share: float, gpu_id: int) -> None:
    """Cap an engine's process of its own at its part of the stage's budget, before it loads anything."""
    import torch

    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        torch.cuda.set_per_process_memory_fraction(share, gpu_id)
    _of_stage.set(share)


def keep(
    stages: Iterable[StagePlan],
    gpu_id: int | None,
    *,
    loading: StagePlan | None = None,
    beside: Iterable[StagePlan] = (),
    limit: float = 1.0,
) -> None:
    """Cap this process on its device, before a factory runs. Imports torch only when there is a budget.

    gpu_id: the local device; None on the CPU. loading: the one of them that is loaded now in this thread. beside: all
    stages that may share the device, also of other processes. limit: as of `check_capacity`.
    Raises: ConfigurationError: the budgets in bytes exceed the device.
    """
    stages = list(stages)
    _of_stage.set(None)
    users = [stage for stage in stages if stage.gpus]
    if gpu_id is None or not any(stage.gpu_memory_fraction or stage.gpu_memory_bytes for stage in users):
        return
    import torch

    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        log.warning("no cap on GPU %d: this torch was built for the CPU and allocates nothing there", gpu_id)
        return
    capacity = torch.cuda.get_device_properties(gpu_id).total_memory
    for gpu in () if loading is None else loading.gpus:
        check_capacity(beside, gpu, capacity, limit)
    if loading is not None:
        _of_stage.set(fraction([loading], capacity))
    share = fraction(users, capacity)
    if share is None:
        log.warning("no cap on GPU %d: not every stage of this process states gpuMemory", gpu_id)
        return
    torch.cuda.set_per_process_memory_fraction(share, gpu_id)
    log.info("GPU %d: this process may use %.0f MiB of %.0f", gpu_id, share * capacity / 2**20, capacity / 2**20)
