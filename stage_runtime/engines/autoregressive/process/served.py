"""The factory that engine processes of `omni.Autoregressive` call."""

from __future__ import annotations

import logging
from typing import Any

import torch

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.connectors import folder, pairing
from stage_runtime.engines.autoregressive.core.kv_connector import Post
from stage_runtime.engines.autoregressive.core.serving import EngineKV, Served
from stage_runtime.engines.autoregressive.expert_parallel.meetings import ExpertRanks, Place
from stage_runtime.engines.autoregressive.loading.loader import load
from stage_runtime.engines.gpus import gpumemory

log = logging.getLogger(__name__)


def autoregressive(*, place: Place | None = None, **fields: Any) -> Served:
    """The engine of ``omni.Autoregressive(**fields)``. ``device``: of torch. ``gpu_share``: of it, for this process.
    ``kv_role``: with `disaggregation`. place: among the engines that share the model's experts.
    """
    device, share, role = fields.pop("device", "cpu"), fields.pop("gpu_share", None), fields.pop("kv_role", "")
    if share is not None:
        gpumemory.cap(share, torch.device(device).index or 0)
    spec = Autoregressive(**fields)
    ranks = None if place is None else ExpertRanks(place)
    loaded = load(spec, device=device, digest=bool(spec.kv_folder or role), experts=ranks)

    def connect(*, post: Post, rooms: EngineKV) -> None:
        if role:
            pairing.connect(
                spec,
                loaded,
                rooms,
                role,
                post=post,
                source=lambda request: request.kv_source,
                notice=rooms.tell,
                progress=log.info,
            )
        elif spec.kv_folder:
            folder.connect(loaded.core, loaded.runner, spec, loaded.weights, post=post)

    if ranks is not None:
        ranks.begin()
    return Served(loaded.core, loaded.num_blocks, connect=connect, lockstep=ranks)
