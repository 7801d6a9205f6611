"""The log probabilities of a long prompt that begins an answer: made in pieces, while other requests are computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines.autoregressive.core.output import choices
from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput, TokenLogprobs
from stage_runtime.engines.autoregressive.stage.thread_engine import AutoregressiveEngine
from stage_runtime.rules.autoregressive.steps import SchedulerOutput
from tests.engines.engine_kit import Rig
from tests.engines.generation_kit import ScriptedExecutor, scripted_core, tiny_tokenizer

TEXT = "a prompt of forty letters is echoed here"
PROMPT = tiny_tokenizer()(TEXT)["input_ids"]
A = PROMPT[0]
ANSWERS = {"one": 3, "two": 60}


class _Likely(ScriptedExecutor):
    """Each token of a prompt was the likeliest one but one."""

    def execute_model(self, step: SchedulerOutput, hold: bool = False, drafted: Any = None) -> Future[ModelOutput]:
        output = super().execute_model(step, hold).result()
        for row in step.rows:
            if row.samples and not row.place:
                found = [TokenLogprobs(-2.0, ((A, -1.0), (token, -2.0))) for token in row.request.tokens[1:]]
                output.prompt_logprobs[row.request.id] = tuple(found)
        future: Future[ModelOutput] = Future()
        future.set_result(output)
        return future


def _prompt(payload: omni.StagePayload) -> omni.Prompt:
    shown = {"echo": True, "logprobs": 2} if payload.data == "one" else {}
    count = ANSWERS[payload.data]
    return omni.Prompt(tokens=PROMPT, params={"max_tokens": count, "temperature": 0, "ignore_eos": True, **shown})


def _answered(*, aborts: bool = False) -> dict[str, Any]:
    """The echo of one request, and at which step it came; what follows, and whether the other one is answered."""
    found: dict[str, Any] = {}

    def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
        if generation.echo is not None:
            found.update(echo=generation.echo, step=core.steps, tokens=list(generation.tokens))
        if aborts and payload.data == "two" and generation.completion_tokens == 5:
            rig.abort("one")
        if generation.finish is not None:
            yield omni.Result(generation.answer)

    core = scripted_core(_Likely(), blocks=200, max_model_len=200, max_chunk=64, max_batched_tokens=128)
    spec = omni.Autoregressive(model="", prompt=_prompt, deliver=deliver)
    rig = Rig(AutoregressiveEngine(spec, core, tiny_tokenizer(), None))
    for name in ("one", "two"):  # both are there before the first step
        rig.start(name, name)
    rig.thread.start()
    given = rig.outbox.several(1 if aborts else 2)
    rig.close()
    assert rig.crash is None
    assert core.scheduler.pool.free == core.scheduler.pool.capacity
    return {**found, "ended": sorted((name, len(text)) for name, _kind, text in given)}


def test_steps_go_on_while_a_long_echo_is_made_and_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _answered()
    assert [entry["token"] for entry in whole["echo"].logprobs] == [*TEXT]
    assert (whole["echo"].logprobs[0]["logprob"], whole["echo"].logprobs[1]["top_logprobs"][0]["token"]) == (None, "a")
    assert (whole["step"], whole["tokens"]) == (1, [PROMPT[-1] + 1])
    monkeypatch.setattr(choices, "PIECE", 6)  # two tokens at once
    pieces = _answered()
    assert pieces["echo"] == whole["echo"] and pieces["ended"] == whole["ended"] == [("one", 3), ("two", 60)]
    assert (pieces["step"] >= 10, len(pieces["tokens"])) == (True, 3)  # its other tokens came meanwhile


def test_an_abort_while_an_echo_is_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "PIECE", 1)
    assert _answered(aborts=True) == {"ended": [("two", 60)]}
