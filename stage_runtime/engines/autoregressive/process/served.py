"""The factory that engine processes of `omni.Autoregressive` call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stage_runtime.api import Autoregressive
from stage_runtime.engines import gpumemory
from stage_runtime.engines.autoregressive.connectors import folder
from stage_runtime.engines.autoregressive.core.serving import Served
from stage_runtime.engines.autoregressive.loading.loader import load


def autoregressive(**fields: Any) -> Served:
    """The engine of ``omni.Autoregressive(**fields)``. ``device``: of torch. ``gpu_share``: of it, for this process."""
    device, share = fields.pop("device", "cpu"), fields.pop("gpu_share", None)
    if share is not None:
        gpumemory.cap(share, torch.device(device).index or 0)
    spec = Autoregressive(**fields)
    loaded = load(spec, device=device, digest=bool(spec.kv_folder))
    connect = partial(folder.connect, loaded.core, loaded.runner, spec, loaded.weights) if spec.kv_folder else None
    return Served(loaded.core, loaded.num_blocks, dummy_batch=loaded.runner.execute_dummy_batch, connect=connect)
