"""Threads of an engine at the limit of threads: one request fails at most, also of those that first need one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from stage_runtime.engines.autoregressive.connectors.watch import Watch
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.core.executors import ThreadExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.model.adapted import AdapterFacts, AdapterRead, AdapterReads, AdapterRefused
from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.prompts.prompting import LONG
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.requests import FinishReason
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits
from tests.engines import external_kit
from tests.engines.engine_kit import PATIENCE_S, running
from tests.engines.external_kit import ends
from tests.engines.generation_kit import VOCABULARY, ScriptedExecutor, alone
from tests.engines.kv_pair_kit import Pair, prompts
from tests.engines.test_kv_folder import Stored, asked

STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start


@contextlib.contextmanager
def no_thread_can_start() -> Iterator[None]:
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_a_long_prompt_without_a_thread_to_encode_it_fails_alone_and_its_stage_ends() -> None:
    client = external_kit.Dictated()
    with running(external_kit.engine(client)) as rig:
        with no_thread_can_start():
            rig.start("one", {"tokens": [1] * (LONG + 1)})
            assert ends(rig, 1) == {"one": ("failed", "RuntimeError: can't start new thread")}
        rig.start("two", {"tokens": [1] * (LONG + 1)})
        client.says(client.added.get(timeout=PATIENCE_S), [1], FinishReason.LENGTH)
        assert ends(rig, 1) == {"two": ("done", ["length", 1])}


class _Counting:
    """`grammars.Matcher`: an answer of one token after the other, from 5 on."""

    ended = False

    def __init__(self) -> None:
        self._next = 5

    def mask(self) -> Any:
        found = np.zeros(VOCABULARY, dtype=np.bool_)
        found[self._next] = True
        return found

    def take(self, token: int) -> bool:
        self._next += 1
        return token == self._next - 1

    def copy(self) -> Any:
        raise AssertionError("nothing is drafted")


class _Masked(ScriptedExecutor):
    """Rows with a grammar get the first token that it allows."""

    def execute_model(self, step: Any, hold: bool = False, drafted: Any = None) -> Future[ModelOutput]:
        self.held = super().execute_model(step, hold)
        return self.held

    def sample_tokens(self, masks: Any, after: Any = None) -> Future[ModelOutput]:
        sampled = self.held.result().sampled
        sampled.update({name: int(mask.nonzero()[0][0]) for name, mask in masks.items()})
        return self.held


def test_grammars_without_a_thread_of_their_own_are_followed_and_other_rows_go_on() -> None:
    scheduler = Scheduler(SchedulerLimits(block_size=4, max_model_len=120), BlockPool(64))
    core = EngineCore(scheduler, _Masked(), ModelFacts(VOCABULARY, grammars=lambda grammar: _Counting()))
    for name, grammar in (("a", Grammar("json_schema", "{}")), ("b", None)):
        params = SamplingParams(grammar=grammar, max_tokens=3)
        core.add_request(EngineCoreRequest(request_id=name, prompt_token_ids=[1], params=params))
    given: dict[str, list[int]] = {"a": [], "b": []}
    with no_thread_can_start():
        outputs = core.step_fn()[0]
    while core.has_work():
        outputs += core.step_fn()[0]
    core.shutdown()
    for output in outputs:
        given[output.request_id] += output.new_token_ids
    assert given == {"a": [5, 6, 7], "b": [2, 3, 4]}


class _Runner:
    """The part of a model runner that an executor of no steps needs."""

    def close(self) -> None: ...


def test_the_thread_of_the_model_is_there_before_the_first_step() -> None:
    executor = ThreadExecutor(cast(Any, _Runner()))
    with no_thread_can_start():
        assert isinstance(executor.call(lambda runner: runner).result(PATIENCE_S), _Runner)
    executor.shutdown()


class _Layers:
    """`adapted.AdapterLayers`."""

    def read(self, path: str) -> AdapterRead:
        return AdapterRead(AdapterFacts(b"", 1), None)

    def keep(self, number: int, read: AdapterRead) -> None: ...
    def drop(self, number: int) -> None: ...
    def applied(self, tokens: Any, count: int) -> Any:
        raise AssertionError("nothing is computed")


def test_an_adapter_without_a_thread_to_read_it_is_refused_when_its_ranks_meet() -> None:
    """Each rank keeps it or refuses it there; one that fails before would end the engine."""
    reads = AdapterReads(_Layers)
    with no_thread_can_start():
        reads.begin(1, "/adapters/a")
    with pytest.raises(AdapterRefused, match="/adapters/a: RuntimeError: can't start new thread"):
        reads.keep(1)
    reads.begin(2, "/adapters/a")
    assert reads.keep(2) == AdapterFacts(b"", 1)


def test_prompts_come_from_prefill_and_silent_ones_are_given_up_where_no_thread_can_start() -> None:
    pair, (prompt, other) = Pair(), prompts(2)
    with no_thread_can_start():
        pair.d.ask("r", prompt)
        pair.run()
        assert (pair.d.tokens["r"], pair.counts["received_blocks"]) == (alone("llama", prompt, 12), 7)
        pair.shipping = lambda room, header, tensors: None
        pair.d.ask("s", other)
        pair.settle()
        pair.decoder.look()  # a post: what it raised would end the engine
        pair.now += 31
        pair.decoder.look()
        pair.run()
    assert (pair.d.tokens["s"], pair.counts["silent"]) == (alone("llama", other, 12), 1)
    pair.close()


def test_blocks_are_written_into_a_folder_and_found_there_where_no_thread_can_start(tmp_path: Path) -> None:
    writer, reader = Stored(tmp_path), Stored(tmp_path)
    with no_thread_can_start():
        asked(writer)
        reader.now += 11  # it looks again
        asked(reader, prompts(1, first=40)[0], "other")
        assert asked(reader) == alone("llama", prompts(1)[0], 12)
    assert reader.received == 28
    for one in (writer, reader):
        one.engine.shutdown()


def test_a_watch_looks_once_each_time_it_is_armed() -> None:
    looks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    count = 0

    def look() -> None:
        nonlocal count
        count += 1

    watch = Watch(look, 0.01, post=looks.put)
    for _ in range(3):
        watch.arm()
        looks.get(timeout=PATIENCE_S)()
    assert count == 3
    watch.close()
