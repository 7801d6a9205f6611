"""Calls of tools, schemas and log probabilities of a small model, by HTTP as clients ask for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import openai
import pytest

from omnipipeline_spec.pipeline import ChatParameter, PipelineConfig, StageConfig
from tests.e2e.local_pipelines import PATIENCE_S, running
from tests.engines.generation_kit import tiny_model, tiny_tokenizer

CITY = {"type": "object", "properties": {"c": {"enum": ["Rome"]}}, "required": ["c"], "additionalProperties": False}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": CITY},
}
CALLED = [("weather", '{"city": {"c": "Rome"}}')]


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "parameters": parameters}}


def pipeline_of(model: Path, form: str, *, own_process: bool) -> PipelineConfig:
    stage = StageConfig(
        name="talk",
        process="talk",
        factory="language_stages:chat_model",
        factory_args={"model": str(model), "tool_calls": form, "own_process": own_process},
        terminal=True,
    )
    return PipelineConfig(name="chat", stages=[stage], serves=["chat"], accepts=[*get_args(ChatParameter)])


async def ask(client: openai.AsyncOpenAI, **options: Any) -> tuple[str, list[tuple[str, str]], str, bytes]:
    """Content, calls, the reason of the end, and the bytes of the shown tokens: the same whole and streamed."""
    given: Any = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, **options}
    [choice] = (await client.chat.completions.create(**given)).choices
    shown = choice.logprobs.content if choice.logprobs else []
    whole = (
        choice.message.content or "",
        [(one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()],
        choice.finish_reason,
        b"".join(bytes(one.bytes) for one in shown),
    )
    content, calls, reason, data = "", list[tuple[str, str]](), "", b""
    async for chunk in await client.chat.completions.create(stream=True, **given):
        for piece in chunk.choices:
            content += piece.delta.content or ""
            calls += [(one.function.name, one.function.arguments) for one in piece.delta.tool_calls or ()]
            reason = piece.finish_reason or reason
            data += b"".join(bytes(one.bytes) for one in (piece.logprobs.content if piece.logprobs else ()))
    assert (content, calls, reason, data) == whole
    assert data.decode(errors="replace") == content
    return whole


async def check_calls(client: openai.AsyncOpenAI) -> None:
    forced = {"tools": [tool(PARAMETERS)], "tool_choice": "required"}
    assert await ask(client, **forced) == ("", CALLED, "tool_calls", b"")
    for stop in ("\n", "}"):
        assert await ask(client, **forced, stop=stop) == ("", CALLED, "tool_calls", b"")
    for most in (1, 22):
        assert await ask(client, **forced, max_tokens=most) == ("", [], "length", b"")
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    content, calls, reason, _bytes = await ask(client, tools=[tool(PARAMETERS)], response_format=schema)
    assert (calls, reason) == (CALLED, "tool_calls") or json.loads(content) == {"c": "Rome"}
    assert (await ask(client, max_tokens=30))[2] in ("length", "stop")
    for refused, place in (
        ({"tools": [tool({"$ref": "#"})], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"response_format": {**schema, "json_schema": {"name": "x", "schema": {"$ref": "#"}}}}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, **refused)
        assert (caught.value.param, place in caught.value.message) == (place, True)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "[1]"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].tool_calls\[0\].function.arguments: expected"):
        await ask(client, messages=[{"role": "assistant", "tool_calls": [call]}])


# Each time: engines/test_chat_example.py asks a server, engines/test_call_answers.py has every form.
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("form", "own_process"), [("hermes", False), ("json", True), ("mistral", False)])
async def test_a_client_gets_calls_and_answers_as_it_asks_for_them(
    base: Path, tmp_path: Path, form: str, own_process: bool
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if tools %}<end>{% endif %}" + tokenizer.chat_template  # it takes tools
    tokenizer.save_pretrained(tmp_path)
    spec = pipeline_of(tmp_path, form, own_process=own_process)
    async with (
        running(spec, base, cpu=True) as pipeline,
        openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        await check_calls(client)
