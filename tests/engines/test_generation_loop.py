"""The busy loop and the core: what has come is taken together, failures end their requests alone, shutdown drains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest

from stage_runtime.engines.autoregressive.core.busy_loop import BusyLoop, RequestType, ShutdownState
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor, ThreadExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.requests import FinishReason, Hold
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits, SchedulerOutput
from tests.engines.generation_kit import END, VOCABULARY, Answers, ScriptedExecutor, alone, core, scripted_core

pytestmark = pytest.mark.usefixtures("each_way")

PATIENCE_S = 100.0  # how long a test waits before it fails, on a machine that others use


class Queue:
    """`busy_loop.InputQueue` of one queue."""

    def __init__(self) -> None:
        self.items: SimpleQueue[tuple[RequestType, Any]] = SimpleQueue()
        self.waits = 0

    def get(self, block: bool) -> tuple[RequestType, Any] | None:
        self.waits += block
        try:
            return self.items.get(block, PATIENCE_S)
        except Empty:
            return None


class Running:
    """A loop on a thread of its own."""

    def __init__(self, executor: ScriptedExecutor, **limits: Any) -> None:
        self.core: EngineCore = scripted_core(executor, **limits)
        self.queue = Queue()
        self.given: SimpleQueue[EngineCoreOutput] = SimpleQueue()
        self.refused: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self.idle = threading.Event()
        self.during_delivery: Callable[[], None] = lambda: None
        self.loop = BusyLoop(
            self.core,
            self.queue,
            self._deliver,
            lambda name, error: self.refused.put((name, str(error))),
            wake=lambda: self.queue.items.put((RequestType.WAKEUP, None)),
            on_idle=(self.idle.set,),
        )
        self.thread = threading.Thread(target=self.loop.run_busy_loop, daemon=True)

    def _deliver(self, outputs: Sequence[EngineCoreOutput]) -> list[str]:
        for one in outputs:
            self.given.put(one)
        self.during_delivery()
        return []

    def ask(self, name: str, prompt: Sequence[int] = (1, 2), hold: Hold | None = None, **params: Any) -> None:
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            params=SamplingParams(**{"max_tokens": 3, **params}),
            hold=hold,
        )
        self.queue.items.put((RequestType.ADD, (request, None)))

    def ends(self, count: int) -> dict[str, tuple[FinishReason, Any]]:
        found: dict[str, tuple[FinishReason, Any]] = {}
        while len(found) < count:
            one = self.given.get(timeout=PATIENCE_S)
            if one.finish is not None:
                found[one.request_id] = (one.finish, one.reason)
        return found

    def join(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        assert self.loop.shutdown_state is ShutdownState.COMPLETED
        assert self.core.scheduler.pool.free == self.core.scheduler.pool.capacity


def test_all_that_has_come_is_in_the_first_step() -> None:
    steps: list[list[str]] = []
    executor = ScriptedExecutor()
    executor.during = lambda step: steps.append([row.request.id for row in step.rows])
    running = Running(executor)
    for name in "abc":
        running.ask(name)
    running.thread.start()
    assert running.ends(3) == dict.fromkeys("abc", (FinishReason.LENGTH, None))
    running.loop.request_shutdown()
    running.join()
    assert steps[0] == ["a", "b", "c"]
    assert executor.closed


def test_an_idle_loop_waits_in_its_queue_and_a_wakeup_ends_it() -> None:
    running = Running(ScriptedExecutor())
    running.thread.start()
    assert running.idle.wait(PATIENCE_S)
    running.loop.request_shutdown()
    running.join()
    assert running.queue.waits <= 2


def test_a_drain_finishes_what_is_under_way_and_an_abort_does_not() -> None:
    for drain, finish in ((True, {"a": (FinishReason.LENGTH, None)}), (False, {})):
        executor = ScriptedExecutor()
        running = Running(executor)

        def ask_to_stop(_step: Any, running: Running = running, drain: bool = drain) -> None:
            running.loop.request_shutdown(drain=drain)

        executor.during = ask_to_stop
        running.ask("a", max_tokens=5)
        running.thread.start()
        running.join()
        assert running.ends(len(finish)) == finish


def test_a_held_request_is_waited_for_without_steps() -> None:
    steps = []
    executor = ScriptedExecutor()
    executor.during = lambda step: steps.append(len(step.rows))
    running = Running(executor)
    running.ask("a", hold=Hold.UPSTREAM_ROWS)
    running.thread.start()
    assert running.idle.wait(PATIENCE_S)
    running.queue.items.put((RequestType.RELEASE, "a"))
    assert running.ends(1) == {"a": (FinishReason.LENGTH, None)}
    running.loop.request_shutdown()
    running.join()
    assert [count for count in steps if count] == [1, 1, 1]


def test_the_release_of_a_request_that_is_not_held_ends_nothing() -> None:
    running = Running(ScriptedExecutor())
    running.ask("a", max_tokens=50)
    running.queue.items.put((RequestType.RELEASE, "a"))
    running.queue.items.put((RequestType.RELEASE, "never seen"))
    running.thread.start()
    assert running.ends(1) == {"a": (FinishReason.LENGTH, None)}
    running.loop.request_shutdown()
    running.join()


def test_an_abort_ends_no_later_request_of_the_same_name() -> None:
    running = Running(ScriptedExecutor())

    def ask_again() -> None:
        """Ask between a step's end and the next look at the queue, as the input thread may."""
        running.during_delivery = lambda: None
        running.core.aborts_queue.put("a")
        running.queue.items.put((RequestType.ABORT, ["a"]))
        running.ask("a", prompt=[7])

    running.during_delivery = ask_again
    running.ask("a", max_tokens=50)
    running.ask("b", max_tokens=50)
    running.thread.start()
    assert running.ends(2) == dict.fromkeys("ab", (FinishReason.LENGTH, None))
    running.loop.request_shutdown()
    running.join()


def test_a_request_that_the_executor_refuses_is_not_scheduled() -> None:
    class Refusing(ScriptedExecutor):
        def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None:
            if request_id == "wrong":
                raise ValueError("no such row")

    running = Running(Refusing())
    running.ask("wrong")
    running.ask("a")
    running.thread.start()
    assert running.ends(1) == {"a": (FinishReason.LENGTH, None)}
    assert running.refused.get(timeout=PATIENCE_S) == ("wrong", "no such row")
    running.loop.request_shutdown()
    running.join()
    assert running.given.empty()


def test_what_cannot_be_added_is_refused_alone() -> None:
    running = Running(ScriptedExecutor())
    running.ask("long", prompt=[1] * 120)
    running.ask("unknown token", prompt=[VOCABULARY])
    running.ask("unknown stop token", stop_token_ids=(VOCABULARY,))
    running.ask("bias of an unknown token", logit_bias={VOCABULARY: 1.0})
    running.ask("empty", prompt=[])
    running.ask("a", max_tokens=50)
    running.ask("a")
    running.thread.start()
    assert running.ends(1) == {"a": (FinishReason.LENGTH, None)}
    refused = [running.refused.get(timeout=PATIENCE_S) for _ in range(6)]
    assert [name for name, _why in refused] == [
        "long",
        "unknown token",
        "unknown stop token",
        "bias of an unknown token",
        "empty",
        "a",
    ]
    assert "120 tokens" in refused[0][1]
    running.loop.request_shutdown()
    running.join()


class OnceMasked:
    """A grammar of one token, and a model whose pass ends only after the mask was asked for."""

    ended = False

    def __init__(self) -> None:
        self.masked = threading.Event()
        self.overlapped: list[bool] = []

    def mask(self) -> Any:
        self.masked.set()
        allowed = np.zeros(VOCABULARY, dtype=np.bool_)
        allowed[77] = True
        return allowed

    def take(self, token: int) -> bool:
        return token == 77

    def copy(self) -> Any:
        raise AssertionError("nothing is drafted")

    def execute_model(self, step: SchedulerOutput, hold: bool = False, drafted: Any = None) -> ModelOutput:
        if hold:
            self.overlapped.append(self.masked.wait(PATIENCE_S))
        return ModelOutput({}, {}, {})

    def sample_tokens(self, masks: Mapping[str, Any], after: Any = None) -> ModelOutput:
        return ModelOutput({name: int(mask.nonzero()[0][0]) for name, mask in masks.items()}, {}, {})

    def add(self, *_request: Any) -> None: ...

    def state_of(self, *_request: Any) -> None: ...

    def keep(self, *_request: Any) -> None: ...

    def close(self) -> None: ...


def test_a_request_that_is_aborted_before_its_step_is_computed_fails_no_step() -> None:
    """The next step may be scheduled and not begun where steps overlap."""
    engine = core()
    for name in ("aborted", "other"):
        engine.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=[*name.encode()], params=SamplingParams())
        )
    step = engine.scheduler.schedule()
    engine.abort_requests(["aborted"])
    output = engine.executor.execute_model(step).result()
    assert (output.failed, sorted(output.sampled)) == ({}, ["aborted", "other"])
    engine.shutdown()


@pytest.mark.parametrize("executor", [InlineExecutor, ThreadExecutor])
def test_the_grammar_s_mask_is_made_while_the_model_computes(executor: Any) -> None:
    model: Any = OnceMasked()
    scheduler = Scheduler(SchedulerLimits(block_size=4, max_model_len=120), BlockPool(64))
    core = EngineCore(scheduler, executor(model), ModelFacts(VOCABULARY, grammars=lambda grammar: model))
    answers = Answers(core)
    answers.ask("a", [1], SamplingParams(max_tokens=1, grammar=Grammar("json_schema", "{}")))
    answers.run()
    core.shutdown()
    assert answers.tokens == {"a": [77]}
    assert model.overlapped == [True]


class Counting:
    """A grammar of 1, 2, 3 and so on: each mask needs the token before."""

    ended = False

    def __init__(self) -> None:
        self.taken = 0

    def mask(self) -> Any:
        allowed = np.zeros(VOCABULARY, dtype=np.bool_)
        allowed[self.taken + 1] = True
        return allowed

    def take(self, token: int) -> bool:
        self.taken += 1
        return token == self.taken

    def copy(self) -> Any:
        raise AssertionError("nothing is drafted")


def test_overlapping_steps_follow_a_grammar_whose_masks_need_the_token_before() -> None:
    engine = core(overlapping=True, grammars=lambda grammar: Counting())
    answers, sizes = Answers(engine), list[int]()
    engine.on_scheduled = lambda step: sizes.append(len(step.rows))
    answers.ask("free", [5, 6, 7])
    answers.ask("counts", [1], SamplingParams(max_tokens=9, grammar=Grammar("json_schema", "{}")))
    answers.run()
    engine.shutdown()
    assert answers.tokens == {"free": alone("llama", [5, 6, 7], 12), "counts": [*range(1, 10)]}
    assert sizes[:9] == [2] * 9, "both are in each step until the shorter one ends"


class Following(ScriptedExecutor):
    """Chooses the first token that a request's mask allows."""

    def execute_model(self, step: SchedulerOutput, hold: bool = False, drafted: Any = None) -> Future[ModelOutput]:
        self.step = step
        return super().execute_model(step)

    def sample_tokens(self, masks: Mapping[str, Any], after: Any = None) -> Future[ModelOutput]:
        future = super().execute_model(self.step)
        future.result().sampled.update({name: int(mask.nonzero()[0][0]) for name, mask in masks.items()})
        return future


class Breaking:
    """A grammar of one token, in which a call raises: as those that outgrow a parser's limits."""

    ended = False

    def __init__(self, call: str) -> None:
        self.call = call

    def mask(self) -> Any:
        if self.call == "mask":
            raise ValueError("too many states")
        allowed = np.zeros(VOCABULARY, dtype=np.bool_)
        allowed[77] = True
        return allowed

    def take(self, token: int) -> bool:
        if self.call == "take":
            raise ValueError("too many states")
        return token == 77

    def copy(self) -> Any:
        raise AssertionError("nothing is drafted")


@pytest.mark.parametrize("call", ["mask", "take"])
def test_a_grammar_that_raises_ends_its_request_alone(call: str) -> None:
    scheduler = Scheduler(SchedulerLimits(block_size=4, max_model_len=120), BlockPool(64))
    core = EngineCore(scheduler, Following(), ModelFacts(VOCABULARY, grammars=lambda grammar: Breaking(grammar.text)))
    answers = Answers(core)
    for name, grammar in (("bad", Grammar("lark", call)), ("good", Grammar("lark", "sound")), ("free", None)):
        answers.ask(name, [1], SamplingParams(max_tokens=2, grammar=grammar))
    answers.run()
    assert answers.finish.pop("bad")[0] is FinishReason.ERROR
    assert answers.finish == dict.fromkeys(("good", "free"), (FinishReason.LENGTH, None))
    assert answers.tokens == {"bad": [], "good": [77, 77], "free": [2, 3]}
    assert scheduler.pool.free == scheduler.pool.capacity


def test_a_failed_step_fails_its_rows_and_the_next_one_is_computed() -> None:
    executor = ScriptedExecutor()
    executor.step_errors = [MemoryError("no room")]
    answers = Answers(scripted_core(executor))
    answers.ask("a", [1])
    answers.run()
    answers.ask("b", [1])
    answers.run()
    assert answers.finish["a"][0] is FinishReason.ERROR
    assert "no room" in answers.finish["a"][1]
    assert answers.tokens["b"] == list(range(2, 14))


def test_a_failed_row_ends_its_request_alone_and_gives_its_blocks_back() -> None:
    executor = ScriptedExecutor()
    executor.row_errors = {"bad": "NaN"}
    answers = Answers(scripted_core(executor))
    answers.ask("good", [1])
    answers.ask("bad", [2])
    answers.run()
    assert answers.finish == {"good": (FinishReason.LENGTH, None), "bad": (FinishReason.ERROR, "NaN")}
    assert answers.engine.scheduler.pool.free == answers.engine.scheduler.pool.capacity


def test_an_abort_during_a_step_is_seen_before_its_result() -> None:
    executor = ScriptedExecutor()
    answers = Answers(scripted_core(executor))
    executor.during = lambda step: answers.engine.aborts_queue.put("a")
    answers.ask("a", [1])
    answers.ask("b", [5])
    assert [one.request_id for one in answers.step()] == ["b"]
    answers.run()
    assert answers.tokens["a"] == []


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_token_ends_an_answer_unless_it_is_ignored(ignored: bool) -> None:
    answers = Answers(scripted_core(ScriptedExecutor(lambda tokens: END)))
    answers.ask("a", [1], SamplingParams(max_tokens=3, ignore_eos=ignored))
    answers.run()
    assert answers.finish["a"] == ((FinishReason.LENGTH, None) if ignored else (FinishReason.STOP, None))
