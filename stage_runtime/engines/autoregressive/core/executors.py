"""The thread in which a step is computed: in the caller's thread, or in one thread of its own while the next step is
scheduled.

`Executor` is what the engine core asks of either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from stage_runtime.engines.autoregressive.sampling.model_output import Drafted, DraftMasks, Masks, ModelOutput
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.rules.autoregressive.steps import SchedulerOutput

if TYPE_CHECKING:  # it imports torch, which an engine of another kind need not have
    from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner

T = TypeVar("T")

Mask: TypeAlias = npt.NDArray[np.bool_]  #: ``[vocabulary]``: tokens that may come next.


class Executor(Protocol):
    """The place where steps are computed, in the order in which they are given."""

    @property
    def max_concurrent_batches(self) -> int: ...
    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None: ...
    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        """Call a function with the model runner, after the steps that were given before."""

    def execute_model(
        self, step: SchedulerOutput, hold: bool = False, drafted: Drafted | None = None
    ) -> Future[ModelOutput]:
        """hold: no token is chosen until `sample_tokens`, which gives the output. drafted: gets the step's drafts,
        before the model computes them.
        """

    def sample_tokens(
        self, masks: Mapping[str, Mask], after: Mapping[str, Sequence[Mask]] | None = None
    ) -> Future[ModelOutput]:
        """Choose the tokens of the step that was held. masks: request id -> which tokens it may get. after: behind each
        token of its draft.
        """

    def shutdown(self) -> None: ...


class InlineExecutor:
    """Runs the model in the caller's thread. A second one gains nothing on a CPU: the step's Python part takes 1 %."""

    max_concurrent_batches = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._runner.add(request_id, params, prompt)

    def call(self, function: Callable[[ModelRunner], T]) -> Future[T]:
        return _called(lambda: function(self._runner))

    def execute_model(
        self, step: SchedulerOutput, hold: bool = False, drafted: Drafted | None = None
    ) -> Future[ModelOutput]:
        return _called(lambda: self._runner.execute_model(step, hold, *(() if drafted is None else (drafted,))))

    def sample_tokens(self, masks: Masks, after: DraftMasks | None = None) -> Future[ModelOutput]:
        return _called(lambda: self._runner.sample_tokens(masks, *(() if after is None else (after,))))

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
        self._pool.submit(int)  # the thread starts now: a step for which none could start would end the engine

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._pool.submit(self._runner.keep, request_id, self._runner.state_of(params, prompt))  # after steps under way

    def call(self, function: Callable[[ModelRunner], T]) -> Future[T]:
        return self._pool.submit(function, self._runner)

    def execute_model(
        self, step: SchedulerOutput, hold: bool = False, drafted: Drafted | None = None
    ) -> Future[ModelOutput]:
        return self._pool.submit(self._runner.execute_model, step, hold, *(() if drafted is None else (drafted,)))

    def sample_tokens(self, masks: Masks, after: DraftMasks | None = None) -> Future[ModelOutput]:
        return self._pool.submit(self._runner.sample_tokens, masks, *(() if after is None else (after,)))

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True)
        self._runner.close()
