"""A real engine core whose executor counts: the next token is the last one plus one. Imported in engine processes.

It fails, waits and reports as tests ask by ``kwargs`` and utilities. It imports no torch, so that it starts quickly.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.core.serving import Served
from stage_runtime.engines.autoregressive.expert_parallel.places import Place
from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.reasoning import Matcher
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar, GrammarRefused
from stage_runtime.engines.autoregressive.text.structured_output.grammars import prepared_schema
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits, SchedulerOutput

if TYPE_CHECKING:
    from stage_runtime.engines.autoregressive.expert_parallel.meetings import ExpertRanks

VOCABULARY = 1000
BLOCKS = 200
LAUNCHED = "tests.engines.counting_core:counting"


class CountingExecutor:
    """`core.Executor`. A step with the token ``fatal`` in it ends the engine; with ``endless``, never returns."""

    max_concurrent_batches = 1

    def __init__(self, *, step_s: float, fatal: int | None, slow: int | None) -> None:
        self._step_s, self._fatal, self._slow = step_s, fatal, slow
        self.steps = 0
        self.ranks: ExpertRanks | None = None  #: Engines that it meets before each step.

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None: ...

    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        raise AssertionError("no blocks cross")

    def execute_model(self, step: SchedulerOutput, hold: bool = False, drafted: Any = None) -> Future[ModelOutput]:
        self.steps += bool(step.rows)
        future: Future[ModelOutput] = Future()
        if self.ranks is not None and step.rows:
            with self.ranks.pass_of(len(step.rows)):
                pass
        seen = {token for row in step.rows for token in row.request.tokens}
        if self._fatal in seen:
            raise MemoryError("the executor is broken")
        if self._step_s:
            threading.Event().wait(self._step_s)
        if self._slow in seen:
            threading.Event().wait(3600)
        sampled = {row.request.id: (row.request.tokens[-1] + 1) % VOCABULARY for row in step.rows if row.samples}
        future.set_result(ModelOutput(sampled, {}, {}))
        return future

    def sample_tokens(self, masks: Mapping[str, Any], after: Any = None) -> Future[ModelOutput]:
        raise AssertionError("no request has a grammar")

    def shutdown(self) -> None:
        if self.ranks is not None:
            self.ranks.close()


def counting(
    *,
    place: Place | None = None,
    step_s: float = 0.0,
    fatal: int | None = None,
    slow: int | None = None,
    max_requests: int = 64,
    prompt_most: int = 500,
    fails: str | None = None,
    lingers: bool = False,
) -> Served:
    if lingers:
        threading.Thread(target=threading.Event().wait).start()
    if fails == "raise":
        raise RuntimeError("no weights here")
    if fails == "exit":
        os._exit(9)
    limits = SchedulerLimits(
        block_size=16, max_requests=max_requests, max_batched_tokens=2048, max_chunk=512, max_model_len=prompt_most
    )
    executor = CountingExecutor(step_s=step_s, fatal=fatal, slow=slow)
    if place is not None:
        from stage_runtime.engines.autoregressive.expert_parallel.meetings import ExpertRanks

        executor.ranks = ExpertRanks(place)
    core = EngineCore(Scheduler(limits, BlockPool(BLOCKS)), executor, ModelFacts(VOCABULARY, grammars=_refused))
    utilities: dict[str, Callable[..., Any]] = {
        "echo": lambda core, *values: list(values),
        "double": lambda core, rows: rows * 2,
        "zeros": lambda core, count: np.zeros(count),
        "pid": lambda core: os.getpid(),
        "executed": lambda core: (executor.steps, executor.ranks.meetings if executor.ranks else 0),
        "free_blocks": lambda core: core.scheduler.pool.free,
        "unsendable": lambda core: object(),
        "fail": _fail,
    }

    return Served(core, BLOCKS, utilities, lockstep=executor.ranks)


def _refused(grammar: Grammar) -> Matcher:
    prepared_schema(grammar.text, grammar.place)
    raise GrammarRefused(grammar.place, "answers that count follow none")


def _fail(core: EngineCore) -> None:
    raise ValueError("as asked")


def no_engine() -> int:
    return 3
