"""A real engine with tiny weights, for an engine process."""

from __future__ import annotations

from stage_runtime.engines.autoregressive.core.serving import Served
from tests.engines import generation_kit


def tiny(kind: str = "llama") -> Served:
    core = generation_kit.core(kind)
    return Served(core, core.scheduler.pool.capacity)
