"""The report of an engine on itself, by the same numbers wherever it computes."""

from __future__ import annotations

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.process.messages.engine_messages import SchedulerStats


def stats_of(core: EngineCore, *, step_counter: int = 0) -> SchedulerStats:
    """The counts of an engine core now. Any thread may call it: it reads single numbers."""
    scheduler = core.scheduler
    pool, stats = scheduler.pool, scheduler.stats
    return SchedulerStats(
        scheduler.waiting,
        scheduler.running,
        step_counter,
        pool.capacity,
        pool.capacity - pool.free,
        pool.cached,
        core.steps,
        stats.preemptions,
        stats.prompt_tokens,
        stats.hit_tokens,
        stats.generated_tokens,
        scheduler.held,
        core.gauges(),
    )
