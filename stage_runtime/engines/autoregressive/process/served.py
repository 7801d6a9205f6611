"""The factory that engine processes of `omni.Autoregressive` call."""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.connectors import registry
from stage_runtime.engines.autoregressive.connectors.registry import Around
from stage_runtime.engines.autoregressive.core.kv_connector import Post
from stage_runtime.engines.autoregressive.core.serving import EngineKV, Served
from stage_runtime.engines.autoregressive.expert_parallel.meetings import ExpertRanks
from stage_runtime.engines.autoregressive.expert_parallel.places import Place
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
    loaded = load(spec, device=device, digest=registry.crosses(spec, role), experts=ranks)

    def connect(*, post: Post, rooms: EngineKV) -> None:
        source = operator.attrgetter("kv_source")
        registry.connect(spec, loaded, Around(post, role, rooms, source, rooms.tell, log.info))

    if ranks is not None:
        ranks.begin()
    return Served(loaded.core, loaded.num_blocks, connect=connect, lockstep=ranks)
