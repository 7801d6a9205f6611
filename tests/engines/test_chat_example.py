"""examples/chat as it stands, with a tiny model: OpenAI's client, streams, many users at once."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.e2e.test_called_tools import check_calls
from tests.engines import http_prompts
from tests.engines.generation_kit import alone, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLE = Path(__file__).parents[2] / "examples/chat/pipeline.yaml"
USERS = 16


def expected(question: str, count: int) -> str:
    """The text until the end token, as far as ``count`` goes."""
    messages = [{"role": "user", "content": question}]
    prompt = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return str(tiny_tokenizer().decode(alone("llama", prompt, count), skip_special_tokens=True))


async def ask(client: openai.AsyncOpenAI, user: int) -> tuple[str, str | None, int]:
    stream: Any = await client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": f"user {user % 5}: hello"}],
        max_tokens=8 + user % 3,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, finish, tokens = "", None, 0
    async for event in stream:
        tokens = event.usage.completion_tokens if event.usage else tokens
        for choice in event.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish, tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[LocalPipeline]:
    """The example with the tiny model. Its template reads tools and the template's arguments, if there are any."""
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        tiny_model("llama").save_pretrained(f"{folder}/model")
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{% if tools %}T{% endif %}{{ style }}" + tokenizer.chat_template
        tokenizer.save_pretrained(f"{folder}/model")
        overrides = [f"endpoints.basePath={folder}", f"stages.chat.factoryArgs.model={folder}/model"]
        overrides += ["stages.chat.factoryArgs.threads=1"]
        async with LocalPipeline(EXAMPLE, overrides=overrides, options=LocalOptions(port=0)) as running:
            yield running


async def test_sixteen_users_of_a_chat_server_in_one_file_get_the_answers_of_each_alone(server: LocalPipeline) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(*(ask(client, user) for user in range(USERS)))
    assert answers == [
        (expected(f"user {user % 5}: hello", 8 + user % 3), "length", 8 + user % 3) for user in range(USERS)
    ]
    async with httpx.AsyncClient(base_url=server.url) as http:
        metrics = ""
        async with asyncio.timeout(60):  # an engine's numbers come with its process's next beat
            while "omnipipeline_engine_kv_blocks{" not in metrics:
                metrics = (await http.get("/metrics")).text
        refused = await http.post("/v1/chat/completions", json={"model": "chat", "messages": []})
    assert 'stage="chat"' in metrics
    assert refused.status_code == 400


CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"utc": {"type": "boolean"}},
            "required": ["utc"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


async def test_the_chat_server_calls_tools_writes_json_and_gives_several_answers_with_probabilities(
    server: LocalPipeline,
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        await _check_fields(client)


async def test_prompts_errors_and_usage_reach_a_client_as_documented(server: LocalPipeline) -> None:
    await http_prompts.reach_a_client(server.url)


@pytest.mark.long
async def test_calls_with_references_and_schemas_reach_a_client_whole_and_streamed(server: LocalPipeline) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        await check_calls(client)


async def _check_fields(client: openai.AsyncOpenAI) -> None:
    create: Any = client.chat.completions.create
    ask: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 90}
    answers: Any = await asyncio.gather(
        create(**ask, tools=[CLOCK], tool_choice="required"),
        create(**ask, tools=[CLOCK], tool_choice="required", stream=True),
        create(**ask, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        create(**{**ask, "max_tokens": 4}, n=2, logprobs=True, top_logprobs=2, extra_body={"prompt_logprobs": 1}),
        create(**ask, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}),
        return_exceptions=True,
    )
    called, stream, written, several, refused = answers
    [choice] = called.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "clock")
    assert set(json.loads(call.function.arguments)) == {"utc"}
    deltas = [choice async for event in stream for choice in event.choices]
    [streamed] = [one.delta.tool_calls for one in deltas if one.delta.tool_calls]
    assert (streamed[0].index, streamed[0].function.name) == (0, "clock")
    assert streamed[0].function.arguments == call.function.arguments
    assert deltas[-1].finish_reason == "tool_calls"
    assert set(json.loads(written.choices[0].message.content)) == {"a"}
    assert [one.index for one in several.choices] == [0, 1]
    assert several.usage.completion_tokens == 8
    assert [len(one.logprobs.content) for one in several.choices] == [4, 4]
    assert len(several.choices[0].logprobs.content[0].top_logprobs) == 2
    assert several.notes[0]["name"] == "prompt_logprobs"
    assert isinstance(refused, openai.BadRequestError)
    # The result of a call goes back, and the template's own arguments with it.
    messages = [
        *ask["messages"],
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "9"},
    ]
    body = {"chat_template_kwargs": {"style": "S"}, "min_tokens": 3, "stop_token_ids": [10]}
    again = await create(**{**ask, "messages": messages, "max_tokens": 5}, extra_body=body)
    assert again.usage.completion_tokens >= 3
