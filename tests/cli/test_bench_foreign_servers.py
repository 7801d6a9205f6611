"""`omni bench` against a server whose events nobody expects: its request fails alone, the others are measured."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from stage_runtime.cli.running import bench
from stage_runtime.cli.running.measuring import bench_options, clients
from stage_runtime.cli.running.measuring.clients import Load
from stage_runtime.cli.running.measuring.flags import SAMPLED
from stage_runtime.cli.running.measuring.prompts import Prompt
from stage_runtime.errors import ConfigurationError

LOAD = Load(endpoint="/v1/chat/completions", model="m")
TOKEN = '{"choices":[{"delta":{"content":"a"}}]}'
DEEP = "[" * 100_000


def client(*events: str) -> httpx.AsyncClient:
    """A server that answers the first request with these events, and later ones with a token."""
    answers = [events]

    def handle(request: httpx.Request) -> httpx.Response:
        lines = "".join(f"data: {event}\n\n" for event in (answers.pop() if answers else (TOKEN,)))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=lines)

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server")


@pytest.mark.parametrize(
    "event",
    [
        '{"usage":[1]}',
        '{"usage":"all of them"}',
        '{"usage":{"prompt_tokens":"many"}}',
        '{"usage":{"completion_tokens":{"a":1}}}',
        '{"choices":3}',
        '{"choices":[null]}',
        '{"error":"no"}',
        DEEP,
    ],
    ids=lambda event: event[:40],
)
async def test_an_event_that_nobody_expects_fails_its_request_alone(event: str) -> None:
    async with client(TOKEN, event) as http:
        outcomes, _ = await clients.run(http, LOAD, [Prompt("x", 1)] * 2, [0.0, 0.0])
    assert [bool(one.error) for one in sorted(outcomes, key=lambda one: not one.error)] == [True, False]


async def test_thinking_is_timed_by_whichever_name_a_server_gives_it() -> None:
    for name in ("reasoning_content", "reasoning"):
        async with client(TOKEN.replace("content", name), TOKEN) as http:
            outcome = await clients.ask(http, LOAD, Prompt("x", 1))
        assert (outcome.error, len(outcome.gaps)) == ("", 1), name


@pytest.mark.parametrize("letter", ["\u0085", "\u2028", "\u2029"])
async def test_no_letter_of_an_answer_ends_its_line(letter: str) -> None:
    async with client(TOKEN.replace('"a"', f'"a{letter}b"')) as http:
        outcome = await clients.ask(http, LOAD, Prompt("x", 1))
    assert (outcome.error, outcome.text) == ("", f"a{letter}b")


@pytest.mark.parametrize("lines", ["data:{}\n\ndata:[DONE]\n\n", "data: {}\r\n\r\ndata: [DONE]\r\n\r\n", "data: {}"])
async def test_each_form_of_an_event_is_read(lines: str) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=lines.replace("{}", TOKEN))

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server") as http:
        outcome = await clients.ask(http, LOAD, Prompt("x", 1))
    assert (outcome.error, outcome.text) == ("", "a")


def test_a_benchmark_names_no_voice_that_a_pipeline_may_not_have() -> None:
    speech = Load(endpoint="/v1/audio/speech", model="m").fields(Prompt("x", 1))
    assert speech == {"model": "m", "input": "x", "response_format": "pcm"}
    given: dict[str, Any] = dict.fromkeys((*SAMPLED, "ignore_eos", "extra_body")) | {"modalities": "text,audio"}
    assert bench_options.body(given) == {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}


async def test_a_usage_without_numbers_is_none() -> None:
    usage: Any = '{"choices":[],"usage":{"prompt_tokens":null,"completion_tokens":null}}'
    async with client(TOKEN, usage) as http:
        outcome = await clients.ask(http, LOAD, Prompt("x", 1))
    assert (outcome.error, outcome.input_tokens, outcome.output_tokens) == ("", 0, 0)


async def test_a_list_of_models_that_nests_without_end_is_refused() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=DEEP))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        with pytest.raises(ConfigurationError, match="expected a list of models"):
            await asyncio.wait_for(bench._model(http, "http://server"), 60.0)
