"""Stages whose prompts grow by chunks of upstream stages: held without steps, answered when the streams have ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stage_runtime as omni
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.stage.thread_engine import AutoregressiveEngine
from tests.engines.engine_kit import Rig, running
from tests.engines.generation_kit import (
    ScriptedExecutor,
    alone,
    rows_of,
    scripted_core,
    tiny_model,
    tiny_tokenizer,
)

SOURCES = ("a", "b")


def prompt(payload: omni.StagePayload) -> omni.Prompt:
    assert payload.data is None
    return omni.Prompt(tokens=[3], params={"max_tokens": 3, "temperature": 0})


def stream(chunk: omni.Chunk) -> Any:
    if isinstance(chunk.data, Exception):
        raise chunk.data
    return chunk.data


def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    if generation.finish is not None:
        yield omni.Result([generation.prompt_tokens, generation.completion_tokens])


class Stage:
    """The answer to a prompt is the tokens after its last one."""

    def __init__(self, **limits: Any) -> None:
        self.executor = ScriptedExecutor()
        self.steps: list[list[tuple[str, int, int]]] = []
        self.executor.during = lambda step: self.steps.append(
            [(row.request.id, row.start, row.count) for row in step.rows]
        )
        self.core: EngineCore = scripted_core(self.executor, **limits)
        spec = omni.Autoregressive(model="", prompt=prompt, stream=stream, deliver=deliver)
        self.engine = AutoregressiveEngine(spec, self.core, tiny_tokenizer(), None, SOURCES)

    def at_rest(self, rig: Rig) -> None:
        pool = self.core.scheduler.pool
        assert pool.free == pool.capacity
        assert not self.core.scheduler.has_unfinished_requests()
        assert rig.inbox.parking.all == 0


def test_a_prompt_of_chunks_is_answered_when_all_streams_have_ended() -> None:
    stage = Stage()
    with running(stage.engine) as rig:
        rig.chunk("x", [10, 11, 12], "a", 0)
        rig.chunk("x", None, "b", 0)
        rig.done("x", "b")
        rig.chunk("x", [13], "a", 1)
        rig.start("x", "a payload, which is not used")
        rig.done("x", "a")
        rig.start("y", "no chunks at all")
        rig.done("y", "a")
        rig.done("y", "b")
        ends = sorted(rig.outbox.several(2))
        assert rig.outbox.taken == [("x", "a"), ("x", "b"), ("x", "a")]
    assert ends == [("x", "done", [5, 3]), ("y", "done", [1, 3])]
    stage.at_rest(rig)


def test_a_request_that_waits_for_chunks_takes_no_steps_and_is_woken_by_one() -> None:
    stage = Stage()
    with running(stage.engine) as rig:
        rig.chunk("x", [10, 11, 12], "a", 0)
        rig.done("x", "b")
        rig.start("other", None)
        rig.done("other", "a")
        rig.done("other", "b")
        assert rig.outbox.next() == ("other", "done", [1, 3])  # x has been computed as far as it goes
        computed = [row for step in stage.steps for row in step if row[0] == "x"]
        assert sum(count for _name, _start, count in computed) == 3
        rig.chunk("x", [13], "a", 1)
        rig.done("x", "a")
        assert rig.outbox.next() == ("x", "done", [5, 3])
    assert sum(count for step in stage.steps for name, _start, count in step if name == "x") == 5 + 2  # each once
    assert sum(not step for step in stage.steps) <= 2  # by which the model learns of ends
    stage.at_rest(rig)


def test_a_stage_that_ends_fails_requests_whose_streams_have_not_ended() -> None:
    stage = Stage()
    with running(stage.engine) as rig:
        rig.chunk("x", [10, 11], "a", 0)
        rig.chunk("y", [10], "a", 0)
        rig.done("y", "a")
        rig.done("y", "b")
        assert rig.outbox.next() == ("y", "done", [2, 3])
        rig.inbox.close()
        name, what, message = rig.outbox.next()
        assert (name, what) == ("x", "failed")
        assert message.startswith("RequestError: the stage ends")
    stage.at_rest(rig)


def test_what_is_wrong_with_a_stream_fails_its_request_alone_wherever_it_is() -> None:
    stage = Stage()
    with running(stage.engine) as rig:
        for name, data in (
            ("raises", KeyError("no such chunk")),
            ("words", "some text"),
            ("unknown", [9999]),
            ("rows", torch.zeros(1, 32)),
            ("long", [1] * 150),
        ):
            rig.chunk(name, [10], "a", 0)
            rig.chunk(name, data, "a", 1)
        rig.chunk("grows", [1] * 100, "a", 0)
        rig.chunk("grows", [1] * 100, "b", 0)
        rig.chunk("failed", [10], "a", 0)
        rig.failed("failed", "b", "its model is gone")
        rig.chunk("aborted", [10, 11], "a", 0)
        rig.abort("aborted")
        rig.chunk("sound", [10], "a", 0)
        rig.done("sound", "a")
        rig.done("sound", "b")
        found = {one[0]: one[1:] for one in rig.outbox.several(8)}
    assert found.pop("sound") == ("done", [2, 3])
    assert {name: output[0] for name, output in found.items()} == dict.fromkeys(
        ["raises", "words", "unknown", "rows", "long", "grows", "failed"], "failed"
    )
    blamed = {name: output[1].partition(":")[0] for name, output in found.items()}
    assert blamed == {
        "raises": "KeyError",
        "failed": "RequestError",
        **dict.fromkeys(["words", "unknown", "rows"], "InvalidRequest"),
        **dict.fromkeys(["long", "grows"], "ContextLengthExceeded"),
    }
    stage.at_rest(rig)


@pytest.mark.parametrize(  # which of two engines a request is of: test_process_stage.py
    "where", [{}, {"own_process": True}, pytest.param({"data_parallel_size": 2}, marks=pytest.mark.nightly)]
)
def test_rows_in_chunks_give_the_tokens_of_their_ids(tmp_path: Path, where: dict[str, Any]) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    start, *parts = [3, 5], list(range(40, 60)), [7], list(range(90, 99))

    def tokens(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
        if generation.tokens:
            yield omni.Chunk([list(generation.tokens), generation.hidden_rows])
        if generation.finish is not None:
            yield omni.Result(generation.prompt_tokens)

    def factory(**settings: Any) -> omni.Autoregressive:
        return omni.Autoregressive(
            model=str(tmp_path),
            prompt=lambda payload: omni.Prompt(parts=[start]),
            stream=lambda chunk: chunk.data,
            deliver=tokens,
            params={"temperature": 0, "max_tokens": 12, "ignore_eos": True},
            hidden_rows=True,
            max_chunk=5,
            block_size=4,
            threads=1,
            **where,
        )

    requests = [omni.OmniRequest(id="one"), omni.OmniRequest(id="two")]
    chunks = {
        "one": [rows_of("llama", parts[0]), parts[1], rows_of("llama", parts[2])],
        "two": [rows_of("llama", parts[2])],
    }
    one, two = omni.testing.run_stage(factory, requests, chunks)
    for found, ids in ((one, [*start, *parts[0], *parts[1], *parts[2]]), (two, [*start, *parts[2]])):
        assert [token for some, _rows in found.data for token in some] == alone("llama", ids, 12)
        assert torch.cat([rows for _some, rows in found.data]).shape == (12, 32)
        assert found.result == len(ids)
