"""Calls of tools in an answer's text, however it is cut; and what a request may say of tools."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.sampling import parameters
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.prompts import prompting
from stage_runtime.engines.autoregressive.text.prompts.controls import TextEncoder
from stage_runtime.engines.autoregressive.text.prompts.prompting import LONG
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.engines.autoregressive.text.tool_calls import tools
from stage_runtime.engines.autoregressive.text.tool_calls.calls import Call
from stage_runtime.errors import InvalidRequest
from stage_runtime.wire.values import OmniRequest, StagePayload
from tests.engines.call_kit import parsed
from tests.engines.generation_kit import tiny_tokenizer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}

ANSWERS = {
    "plain words": ("plain words", []),
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>': ("", [Call("f", '{"a": 1}')]),
    'so: <tool_call>\n{"name": "f"}\n</tool_call> and <tool_call>{"name": "g", "arguments": "{}"}</tool_call>.': (
        "so:  and .",
        [Call("f", "{}"), Call("g", "{}")],
    ),
    '<tool_call>[{"name": "f", "parameters": {}}, {"name": "g"}]</tool_call>': ("", [Call("f", "{}"), Call("g", "{}")]),
    "<tool_call>nothing</tool_call>": ("<tool_call>nothing</tool_call>", []),
    '<tool_call>{"arguments": {}}</tool_call>': ('<tool_call>{"arguments": {}}</tool_call>', []),
    '<tool_call>{"name": "f", "arguments": {"c": "é"}}': ("", [Call("f", '{"c": "é"}')]),  # cut before its end tag
    '<tool_call>{"name": "f", "arguments": {"h": "a</tool_call>\\"</tool_call>"}}</tool_call>.': (
        ".",
        [Call("f", '{"h": "a</tool_call>\\"</tool_call>"}')],
    ),
    '<tool_call>{"odd"</tool_call>a<tool_call>{"name": "g"}</tool_call>': (
        '<tool_call>{"odd"</tool_call>a',
        [Call("g", "{}")],
    ),
    '<tool_call>{"odd</tool_call>a<tool_call>{"name": "g"}</tool_call>b': (
        '<tool_call>{"odd</tool_call>ab',
        [Call("g", "{}")],
    ),
    '<tool_call>"a</tool_call>b <tool': ('<tool_call>"a</tool_call>b <tool', []),
    '<tool_call>{"a</tool_call>b <tool': ('<tool_call>{"a</tool_call>b <tool', []),
    '<tool_call>{"name": ': ('<tool_call>{"name": ', []),
    "a < b <tool": ("a < b <tool", []),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_calls_are_found_wherever_the_text_is_cut_in_two_and_letter_by_letter(answer: str) -> None:
    for cut in range(len(answer) + 1):
        assert parsed("hermes", answer[:cut], answer[cut:]) == ANSWERS[answer]
    assert parsed("hermes", *answer) == ANSWERS[answer]


@given(st.sampled_from(sorted(ANSWERS)), st.lists(st.integers(0, 90)))
def test_calls_are_found_however_the_text_is_cut(answer: str, cuts: list[int]) -> None:
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    pieces = [answer[begin:end] for begin, end in itertools.pairwise(places)]
    assert parsed("hermes", *pieces) == ANSWERS[answer]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, None),
        ("auto", None),
        ("required", ["weather", "clock"]),
        ({"type": "function", "function": {"name": "clock"}}, ["clock"]),
    ],
)
def test_a_choice_of_tools_becomes_a_grammar_of_their_calls(choice: Any, names: list[str] | None) -> None:
    found = parameters.from_params({"tools": [WEATHER, CLOCK], "tool_choice": choice}, SamplingParams()).grammar
    if names is None:
        assert found is None
        return
    assert found is not None
    assert [name for name in ("weather", "clock") if f'\\"{name}\\"' in found.text] == names


@pytest.mark.parametrize(
    "params",
    [
        {"tools": "weather"},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
        {"tools": [CLOCK] * 129},
        {"tools": [CLOCK], "tool_choice": "sometimes"},
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": "required"},
        {"response_format": "json"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        {"n": 0},
        {"n": 17},
        {"n": 1.5},
        {"prompt_logprobs": 21},
    ],
)
def test_what_no_engine_can_honour_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        parameters.from_params(params, SamplingParams())


def test_response_formats_become_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    assert parameters.from_params({"response_format": wanted}, SamplingParams()).grammar == Grammar("json_schema", text)
    plain = parameters.from_params({"response_format": {"type": "text"}}, SamplingParams())
    assert plain.grammar is None


def test_earlier_calls_are_given_to_templates_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert tools.spoken(call, 0)["function"] == {"name": "f", "arguments": {"a": 1}}
    for broken in ({}, {"function": 3}, {"function": {"name": "f", "arguments": "{"}}):
        with pytest.raises(InvalidRequest, match=r"messages\[2\]"):
            tools.spoken(broken, 2)


#: Messages of roles that it does not name are left out, as by Qwen2.5's.
QWEN = (
    "{% for message in messages %}{% if message.role == 'user' or message.role == 'system' %}"
    "<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [QWEN, QWEN.replace("'user'", "'developer' or message.role == 'user'")])
def test_a_developer_s_message_reaches_a_template_that_knows_the_role_or_not(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template

    def prompt(role: str) -> str:
        messages = [{"role": role, "content": "Answer in French."}, {"role": "user", "content": "hi"}]
        request = OmniRequest(id="r", kind="chat", inputs={"messages": messages})
        tokens, _rows = prompting.encode(
            prompting.default_prompt(StagePayload(request=request)), TextEncoder(tokenizer)
        )
        return str(tokenizer.decode(tokens))

    assert prompt("system") == "<system>Answer in French.<user>hi"
    assert prompt("developer") == prompt("system").replace("system", "developer" if template != QWEN else "system")


def chat_with(calls: Any, content: str = "") -> StagePayload:
    message = {"role": "assistant", "content": [{"type": "text", "text": content}], "tool_calls": calls}
    return StagePayload(request=OmniRequest(id="r", kind="chat", inputs={"messages": [message]}), data=None)


def test_arguments_of_earlier_calls_have_together_as_many_values_as_a_body() -> None:
    def calls(count: int, values: int) -> list[Any]:
        return [{"function": {"name": "f", "arguments": f'{{"a": [{",".join(["[]"] * values)}]}}'}}] * count

    prompt = prompting.default_prompt(chat_with(calls(8, 2000)))
    assert prompt.messages is not None and len(prompt.messages[0]["tool_calls"]) == 8
    for too_many in (calls(1, 140_000), calls(70, 2000)):
        with pytest.raises(InvalidRequest, match="the arguments of earlier calls have more than 131072 values"):
            prompting.default_prompt(chat_with(too_many))


@pytest.mark.parametrize("calls", [3, "f", [3], [{"function": 3}], [{"function": {"name": "f", "arguments": 3}}]])
def test_earlier_calls_that_are_none_are_the_clients_fault(calls: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        prompting.default_prompt(chat_with(calls))


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    "params",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(900)}}]},
        {"chat_template_kwargs": nested(900)},
    ],
)
def test_values_too_deep_for_a_chat_template_are_the_clients_fault(params: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools }}{{ a }}"
    request = OmniRequest(id="r", kind="chat", inputs=chat_with([]).request.inputs, params=params)
    prompt = prompting.default_prompt(StagePayload(request=request))
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        prompting.encode(prompt, TextEncoder(tokenizer))


def test_a_prompt_is_as_long_as_its_calls_and_tools_too() -> None:
    """So one that is long is encoded apart, and no step of others waits for it."""
    call = {"function": {"name": "f", "arguments": msgspec.json.encode({"text": "x" * 9000}).decode()}}
    assert prompting.size(prompting.default_prompt(chat_with([call]))) > LONG
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 9000}}
    request = OmniRequest(id="r", kind="chat", inputs=chat_with([]).request.inputs, params={"tools": [tool]})
    assert prompting.size(prompting.default_prompt(StagePayload(request=request, data=None))) > LONG
    assert prompting.size(prompting.default_prompt(chat_with([], "x" * 5000))) < LONG
