"""POST /v1/completions, judged by the official client: prompts, choices, log probabilities, streams, refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai import AsyncOpenAI

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Finish, Text, Usage
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import Event, ScriptedHandle, chunk, play

TEXTS = msgspec.structs.replace(ALL, accepts=frozenset({"n", "logprobs", "echo", "min_tokens"}))
ENTRIES = [
    {"token": "a", "logprob": None, "bytes": [97], "top_logprobs": []},
    {"token": " b", "logprob": -0.5, "bytes": [32, 98], "top_logprobs": [
        {"token": " b", "logprob": -0.5, "bytes": [32, 98]}, {"token": " c", "logprob": -1.5, "bytes": [32, 99]}]},
]  # fmt: skip


def client_of(running: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


async def repeat(handle: ScriptedHandle) -> AsyncIterator[Event]:
    """Two choices that repeat the prompt."""
    inputs = handle.request.inputs
    said = inputs.get("text") or str(inputs["tokens"])
    yield chunk([Text(f"{said}!", 0), Text(f"{said}?", 1)])
    end = [Usage(3, 2), Finish("length", 0), Finish("stop", 1)]
    yield ResultEvent(stage="talk", data=end)


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("hi", [{"text": "hi"}]),
        ([5, 6], [{"tokens": [5, 6]}]),
        (["hi", "ho"], [{"text": "hi"}, {"text": "ho"}]),
        ([[5], [6, 7]], [{"tokens": [5]}, {"tokens": [6, 7]}]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_is_a_request_and_each_choice_has_its_index(prompt: Any, inputs: Any, stream: bool) -> None:
    async with start(repeat, TEXTS) as running, client_of(running) as client:
        options: Any = {"stream_options": {"include_usage": True}} if stream else {}
        answer: Any = await client.completions.create(model="m", prompt=prompt, n=2, stream=stream, **options)
        chunks = [one async for one in answer] if stream else [answer]
        requests = sorted((one.request for one in running.manager.handles), key=lambda one: one.id)
    assert [one.inputs for one in requests] == inputs
    assert {one.kind for one in requests} == {"completion"}
    assert {one.params["max_tokens"] for one in requests} == {16}
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for one in chunks:
        for choice in one.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    said = [one.get("text") or str(one["tokens"]) for one in inputs]
    assert texts == {2 * at + way: text + "!?"[way] for at, text in enumerate(said) for way in (0, 1)}
    assert reasons == {at: ("length", "stop")[at % 2] for at in texts}
    assert chunks[-1].usage.total_tokens == 5 * len(inputs)


async def test_the_tokens_of_all_prompts_are_counted() -> None:
    async with start(repeat, TEXTS) as running, client_of(running) as client:
        await client.completions.create(model="m", prompt=["a", "b", "c"])
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http:
            shown = (await http.get("/metrics")).text
    counted = [line for line in shown.splitlines() if "completions" in line and "tokens_total{" in line]
    assert sorted(float(line.rpartition(" ")[2]) for line in counted) == [6.0, 9.0]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_lists_with_offsets(stream: bool) -> None:
    script = play(chunk(Text("a b", 0, ENTRIES)), chunk(Text(" b", 0, ENTRIES[1:]), index=1))
    async with start(script, TEXTS) as running, client_of(running) as client:
        answer: Any = await client.completions.create(model="m", prompt="a b", echo=True, logprobs=1, stream=stream)
        chunks = [one async for one in answer] if stream else [answer]
        params = running.manager.last.request.params
    assert (params["echo"], params["logprobs"]) == (True, 1)
    found = [one.choices[0].logprobs.to_dict() for one in chunks if one.choices[0].logprobs]
    joined = {name: [value for one in found for value in one[name]] for name in found[0]}
    assert joined == {
        "tokens": ["a", " b", " b"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {" b": -0.5, " c": -1.5}, {" b": -0.5, " c": -1.5}],
        "text_offset": [0, 1, 3],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([{"token": "a"}], r"missing required field `logprob` - at `omni.Text.logprobs\[0\]`"),
        ([None], r"at `omni.Text.logprobs\[0\]`"),
        ([{"token": 5, "logprob": -0.5}], r"at `omni.Text.logprobs\[0\].token`"),
        ([{"token": "a", "logprob": -0.5, "top_logprobs": [7]}], r"logprobs\[0\].top_logprobs\[0\]`"),
    ],
)
async def test_a_stage_whose_log_probabilities_have_another_form_is_named(
    given: Any, problem: str, stream: bool
) -> None:
    script = play(chunk(Text("a", 0, given)))
    async with start(script, TEXTS) as running, client_of(running) as client:
        with pytest.raises(openai.InternalServerError, match=f"stage 'talk': .*{problem}") as caught:
            await client.completions.create(model="m", prompt="a b", logprobs=1, stream=stream)
        assert caught.value.body["stage"] == "talk"  # type: ignore[index]
        await client.completions.create(model="m", prompt="a b")  # who asks for none is answered


async def test_one_prompt_that_fails_fails_all_and_the_others_end() -> None:
    async def script(handle: ScriptedHandle) -> AsyncIterator[Event]:
        yield chunk(Text("x"))
        if handle.request.inputs["text"] == "bad":
            raise RequestError("stage_failed", "lost", stage="talk")
        await handle.ended.wait()

    async with start(script, TEXTS) as running, client_of(running) as client:
        with pytest.raises(openai.InternalServerError, match="lost"):
            await client.completions.create(model="m", prompt=["good", "bad", "good"])
        assert not running.manager.in_flight
        assert sorted(one.outcome or "" for one in running.manager.handles) == [
            "cancelled",
            "cancelled",
            "stage_failed",
        ]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"suffix": "x"}, "suffix: this server continues prompts"),
        ({"best_of": 3}, "best_of: expected the value of n"),
        ({"prompt": []}, "prompt: expected 1 to 128 prompts, got 0"),
        ({"prompt": ""}, "prompt: expected a text or a list of token ids"),
        ({"prompt": ["a", []]}, r"prompt\[1\]: expected a text"),
        ({"prompt": [[1, -2]]}, r"prompt\[0\]: expected a text"),
        ({"prompt": [1, "a"]}, r"prompt\[0\]: expected a text"),
        ({"prompt": ["a"] * 129}, "got 129"),
        ({"logprobs": 21}, "logprobs"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos: stages end where their model does"),
        ({"extra_body": {"messages": []}}, "messages: unknown parameter"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_name(given: dict[str, Any], problem: str) -> None:
    async with start(play(chunk(Text("ok"))), TEXTS) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError, match=problem):
            await client.completions.create(**{"model": "m", "prompt": "hi", **given})
        assert not running.manager.handles


async def test_without_accepts_neither_logprobs_nor_echo_is_taken() -> None:
    async with start(play(chunk(Text("ok")))) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError, match="logprobs: stages give no"):
            await client.completions.create(model="m", prompt="hi", logprobs=0)
        with pytest.raises(openai.BadRequestError, match="echo: stages do not repeat"):
            await client.completions.create(model="m", prompt="hi", echo=True)
        answer = await client.completions.create(model="m", prompt="hi", echo=False, best_of=1, suffix="")
        assert answer.choices[0].text == "ok"
