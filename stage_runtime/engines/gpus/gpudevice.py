"""torch's current GPU in the threads of a stage. torch has one for each thread, and it is GPU 0 until it is set.

A stage with GPU 1 whose author writes ``device="cuda"`` would else compute on the GPU of another one. Called by
`loading` before a factory runs, and by `threads.stage_threads` in each thread that a stage starts.
"""

from __future__ import annotations

import contextvars
import importlib
import importlib.util
import sys
from typing import Final

_gpu: Final = contextvars.ContextVar[int | None]("omni_gpu", default=None)


def use(gpu_id: int | None) -> None:
    """Compute on that GPU in this thread, and in those that `threads.start` starts from here. None: no GPU, and torch
    is not imported.
    """
    _gpu.set(gpu_id)
    if gpu_id is not None and "torch" not in sys.modules and importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")
    apply()


def apply() -> None:
    """Selects the GPU that `use` chose. A new thread calls it, in a copy of its starter's context."""
    gpu_id, torch = _gpu.get(), sys.modules.get("torch")
    if gpu_id is None or torch is None:
        return
    if torch.cuda.is_available() and gpu_id < torch.cuda.device_count():  # or the machine only pretends to have GPUs
        torch.cuda.set_device(gpu_id)
