"""How well steps follow each other: a model that takes a fixed time for each step, and requests that come one by one.

A step takes the same time for any number of rows, so the ideal is one step for each token of the longest wait: a
request's tokens, and the steps before the last request came. Called by `benchmarks.engine` (``--fake-ms``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor, ThreadExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits, SchedulerOutput

VOCABULARY = 1000


class FakeRunner:
    """The interface of `ModelRunner` without a model: it waits as for a device, and holds no lock meanwhile."""

    def __init__(self, step_s: float) -> None:
        self.sizes: list[int] = []
        self._step_s = step_s

    def state_of(self, params: SamplingParams, prompt: Sequence[int]) -> None: ...

    def keep(self, request_id: str, state: None) -> None: ...

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None: ...

    def execute_model(self, step: SchedulerOutput, hold: bool = False, drafted: Any = None) -> ModelOutput:
        if step.rows:
            self.sizes.append(len(step.rows))
            time.sleep(self._step_s)
        return ModelOutput({row.request.id: row.place for row in step.rows if row.samples}, {}, {})

    def sample_tokens(self, masks: Mapping[str, Any], after: Any = None) -> ModelOutput:
        raise AssertionError("no request has a grammar")

    def close(self) -> None: ...


def measure(step_s: float, *, overlap: bool, requests: int = 11, tokens: int = 200) -> dict[str, float]:
    """requests: all but one come at once, the last one after three steps."""
    runner = FakeRunner(step_s)
    model = cast(ModelRunner, runner)
    limits = SchedulerLimits(max_requests=requests, max_batched_tokens=4096)
    scheduler = Scheduler(limits, BlockPool(4096))
    core = EngineCore(scheduler, ThreadExecutor(model) if overlap else InlineExecutor(model), ModelFacts(VOCABULARY))
    asks = [
        EngineCoreRequest(request_id=f"{at}", prompt_token_ids=[at] * 32, params=SamplingParams(max_tokens=tokens))
        for at in range(requests)
    ]
    late = asks.pop()
    began, used, late_at = time.monotonic(), time.process_time(), 0
    for ask in asks:
        core.add_request(ask)
    while core.has_work():
        core.step_fn()
        if not late_at and len(runner.sizes) >= 3:
            core.add_request(late)
            late_at = len(runner.sizes)
    wall, processor = time.monotonic() - began, time.process_time() - used
    core.shutdown()
    ideal = (late_at + tokens) * step_s
    return {
        "steps": len(runner.sizes),
        "wall_ms": wall * 1000,
        "ideal_steps_of_steps": (late_at + tokens) / len(runner.sizes),
        "of_ideal": ideal / wall,
        "processor_us_per_step": processor / len(runner.sizes) * 1e6,
        "smallest_full_step": min(runner.sizes[late_at + 1 : tokens - 1]),
    }
