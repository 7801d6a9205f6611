"""POST /v1/responses over a real socket, judged by the official client and its streaming helper."""

from __future__ import annotations

import base64
import re
from typing import Any

import httpx
import msgspec
import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.wire.values import Finish, Reasoning, Text, ToolCall, Usage
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import Script, chunk, play

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
SERVING = msgspec.structs.replace(ALL, accepts=frozenset({"tools", "response_format"}))
USAGE = Usage(7, 5, 2, reasoning_tokens=1)
SAID: Script = play(chunk(Text("he")), chunk([Text("llo"), USAGE, Finish("stop")], index=1))
CALLED: Script = play(
    chunk(Reasoning("let me ")),
    chunk(Reasoning("see"), index=1),
    chunk(Text("one moment"), index=2),
    chunk(ToolCall("call_1", "f", '{"a": 1}'), index=3),
    chunk([ToolCall("call_2", "f", "{}", 1), USAGE], index=4),
)


def client_of(running: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


async def asked(script: Script, **body: Any) -> tuple[Any, Any]:
    """The response, and what the stages got."""
    async with start(script, SERVING) as running, client_of(running) as client:
        answer = await client.responses.create(**{"model": "m", "input": "hi", **body})
        return answer, running.manager.last.request


def shapes(answer: Response) -> list[dict[str, Any]]:
    return [one.model_dump(exclude={"id"}, exclude_none=True) for one in answer.output]


CALLS = [
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "let me see"}],
     "status": "completed"},
    {"type": "message", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "one moment", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}', "status": "completed"},
    {"type": "function_call", "call_id": "call_2", "name": "f", "arguments": "{}", "status": "completed"},
]  # fmt: skip


async def test_a_text_is_answered_by_a_message_with_the_usage() -> None:
    answer, request = await asked(SAID, instructions="be kind", temperature=0.5, max_output_tokens=9, store=False)
    Response.model_validate(answer.model_dump())
    assert (answer.output_text, answer.status, answer.model) == ("hello", "completed", "org/hello")
    assert answer.usage.model_dump(exclude_none=True) == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 12,
    }
    assert (request.kind, request.params) == ("chat", {"temperature": 0.5, "max_tokens": 9})
    assert request.inputs["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]


async def test_thinking_a_message_and_calls_are_items_whole_and_streamed() -> None:
    whole, request = await asked(CALLED, tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    assert shapes(whole) == CALLS
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert request.params["tools"] == [{"type": "function", "function": function}]
    assert request.params["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    tool: Any = TOOL
    async with start(CALLED, SERVING) as running, client_of(running) as client:
        stream: Any = await client.responses.create(model="m", input="hi", tools=[tool], stream=True)
        events: list[Any] = [event async for event in stream]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [one.type.removeprefix("response.") for one in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["reasoning_text.delta"] * 2,
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        *(one.format("output_text") for one in text),
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    assert shapes(events[-1].response) == CALLS
    places = [one.output_index for one in events if one.type == "response.output_item.done"]
    assert places == [0, 1, 2, 3]


async def test_the_clients_helper_follows_a_stream_and_reads_its_form() -> None:
    class City(pydantic.BaseModel):
        name: str

    script = play(chunk(Text('{"name": ')), chunk([Text('"Paris"}'), USAGE], index=1))
    async with start(script, SERVING) as running, client_of(running) as client:
        async with client.responses.stream(model="m", input="hi", text_format=City) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        request = running.manager.last.request
    assert (deltas, final.output_parsed) == (['{"name": ', '"Paris"}'], City(name="Paris"))
    asked_for = request.params["response_format"]
    assert (asked_for["type"], asked_for["json_schema"]["name"]) == ("json_schema", "City")
    assert asked_for["json_schema"]["schema"]["required"] == ["name"]


async def test_earlier_turns_come_back_as_messages() -> None:
    picture = "data:image/png;base64," + base64.b64encode(b"png").decode()
    whole, _request = await asked(CALLED, tools=[TOOL])
    items: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "look"},
                                     {"type": "input_image", "image_url": picture, "detail": "low"}]},
        *(one.model_dump() for one in whole.output),
        {"type": "function_call_output", "call_id": "call_1", "output": "7"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "8"}]},
    ]  # fmt: skip
    _answer, request = await asked(SAID, input=items, tools=[TOOL])
    told = request.inputs["messages"]
    assert [one["role"] for one in told] == ["developer", "user", "assistant", "tool", "tool"]
    assert told[1]["content"][1] == {"type": "image", "mime": "image/png", "data": b"png"}
    assert (told[2]["reasoning_content"], told[2]["content"]) == (
        "let me see",
        [{"type": "text", "text": "one moment"}],
    )
    assert [(one["id"], one["function"]["arguments"]) for one in told[2]["tool_calls"]] == [
        ("call_1", '{"a": 1}'),
        ("call_2", "{}"),
    ]
    assert [(one["tool_call_id"], one["content"][0]["text"]) for one in told[3:]] == [("call_1", "7"), ("call_2", "8")]


async def test_all_thoughts_before_an_answer_come_back_with_it_and_with_no_later_one() -> None:
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]} for text in "abc"
    ]
    said = {"role": "assistant", "content": "one moment"}
    items: Any = [*thoughts[:2], said, thoughts[2], {"role": "user", "content": "go on"}, said]
    _answer, request = await asked(SAID, input=items)
    told = request.inputs["messages"]
    assert [one.get("reasoning_content") for one in told] == ["ab", None, None]


@pytest.mark.parametrize(
    ("end", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter"), ("stop", None)]
)
async def test_an_answer_that_was_cut_is_incomplete(end: str, reason: str | None) -> None:
    answer, _request = await asked(play(chunk([Text("he"), Finish(end)])))
    status = "completed" if reason is None else "incomplete"
    assert (answer.status, answer.output[0].status) == (status, status)
    assert (answer.incomplete_details and answer.incomplete_details.reason) == reason


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "computer_call"}]}, "input[1].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}]},
         "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}],
          "instructions": "x"}, "input[0].content[0].image_url.url"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"temperature": 7}, "temperature"),
        ({"extra_body": {"max_tokens": 7}}, "max_tokens"),
    ],
)  # fmt: skip
async def test_what_cannot_be_had_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    async with start(SAID, SERVING) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "m", "input": "hi", **body})
        assert not running.manager.handles
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


async def test_hints_for_caches_and_bills_are_taken() -> None:
    hints: dict[str, Any] = {"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_key": "k", "user": "u"}
    async with start(SAID, SERVING) as running, client_of(running) as client:
        answer = await client.responses.create(model="m", input="hi", safety_identifier="s", **hints)
    assert answer.status == "completed"


async def test_tools_and_forms_need_a_pipeline_that_has_them() -> None:
    async with start(SAID, msgspec.structs.replace(ALL, accepts=frozenset())) as running, client_of(running) as client:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"tools": [TOOL]}, "tools"),
            ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ]
        for body, param in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**{"model": "m", "input": "hi", **body})
            assert caught.value.param == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("response_format.json_schema.schema", "text.format.schema"),
        ("messages[0].content", "input.content"),
        ("messages", "input"),
        ("tools[0].function.parameters", "tools[0].function.parameters"),
    ],
)
async def test_a_stage_s_refusal_names_the_client_s_own_field(theirs: str, ours: str, stream: bool) -> None:
    refusal = InvalidRequest(f"{theirs}: expected another", param=theirs)
    async with start(play(refusal), SERVING) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError, match=re.escape(f"{ours}: expected another")) as caught:
            await client.responses.create(model="m", input="hi", stream=stream)
    assert caught.value.param == ours


async def test_a_stream_that_breaks_off_ends_with_failed_and_an_earlier_fault_has_a_status() -> None:
    fault = RequestError("stage_failed", "no", stage="talk")
    async with start(play(chunk(Text("he")), fault)) as running, client_of(running) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        events: list[Any] = [event async for event in stream]
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.code == "server_error"
    async with start(play(fault)) as running, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        answer = await http.post(f"{running.url}/v1/responses", json={"input": "hi", "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "stage_failed")
