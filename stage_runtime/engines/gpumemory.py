"""A process keeps to its stages' ``gpuMemory``: torch's allocator refuses what goes beyond.

So a stage that takes too much meets an OutOfMemoryError of its own; without the cap its neighbour on the device
would. The cap covers torch's allocator. The CUDA context itself (some hundred MiB per process) and libraries that
allocate by themselves come on top; ``gpuMemoryLimit`` leaves room for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from omnipipeline_spec.types.plan import StagePlan

log = logging.getLogger(__name__)


def fraction(stages: Iterable[StagePlan], capacity_bytes: int) -> float | None:
    """What the stages of one process may take of their device together, 0 < f <= 1.

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


def keep(stages: Iterable[StagePlan], gpu_id: int | None) -> None:
    """Cap this process on its device, once, before a factory runs. Imports torch only when there is a budget.

    gpu_id: the local device; None on the CPU.
    """
    users = [stage for stage in stages if stage.gpus]
    if gpu_id is None or not any(stage.gpu_memory_fraction or stage.gpu_memory_bytes for stage in users):
        return
    import torch

    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        log.warning("no cap on GPU %d: this torch was built for the CPU and allocates nothing there", gpu_id)
        return
    capacity = torch.cuda.get_device_properties(gpu_id).total_memory
    share = fraction(users, capacity)
    if share is None:
        log.warning("no cap on GPU %d: not every stage of this process states gpuMemory", gpu_id)
        return
    torch.cuda.set_per_process_memory_fraction(share, gpu_id)
    log.info("GPU %d: at most %.0f MiB of %.0f", gpu_id, share * capacity / 2**20, capacity / 2**20)
