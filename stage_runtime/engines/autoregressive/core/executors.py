"""Where a step is computed: in the caller's thread, or in one thread of its own while the next step is scheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from stage_runtime.engines.autoregressive.model.model_runner import Masks, ModelRunner
from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.rules.autoregressive.steps import SchedulerOutput

T = TypeVar("T")


class InlineExecutor:
    """On a CPU nothing is won by a second thread: the step's Python part takes 1 % of it."""

    max_concurrent_batches = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._runner.add(request_id, params, prompt)

    def call(self, function: Callable[[ModelRunner], T]) -> Future[T]:
        return _called(lambda: function(self._runner))

    def execute_model(self, step: SchedulerOutput, hold: bool = False) -> Future[ModelOutput]:
        return _called(lambda: self._runner.execute_model(step, hold))

    def sample_tokens(self, masks: Masks) -> Future[ModelOutput]:
        return _called(lambda: self._runner.sample_tokens(masks))

    def shutdown(self) -> None:
        self._runner.close()


def _called(function: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
    return future


class ThreadExecutor:
    """One thread that computes steps in order, two at most under way."""

    max_concurrent_batches = 2

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="model")

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._pool.submit(self._runner.keep, request_id, self._runner.state_of(params, prompt))  # after steps under way

    def call(self, function: Callable[[ModelRunner], T]) -> Future[T]:
        return self._pool.submit(function, self._runner)

    def execute_model(self, step: SchedulerOutput, hold: bool = False) -> Future[ModelOutput]:
        return self._pool.submit(self._runner.execute_model, step, hold)

    def sample_tokens(self, masks: Masks) -> Future[ModelOutput]:
        return self._pool.submit(self._runner.sample_tokens, masks)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True)
        self._runner.close()
