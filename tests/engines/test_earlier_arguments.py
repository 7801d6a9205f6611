"""Arguments of earlier calls: a history has the prompt that the model's answer continued, or says what is broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.text.prompts import prompting
from stage_runtime.engines.autoregressive.text.prompts.controls import TextEncoder
from stage_runtime.engines.autoregressive.text.tool_calls.calls import arguments_of
from stage_runtime.engines.autoregressive.text.tool_calls.verbatim import WrittenChat
from stage_runtime.errors import InvalidRequest
from stage_runtime.wire.values import OmniRequest, StagePayload
from tests.engines.generation_kit import tiny_tokenizer

#: Templates of Hermes and Qwen, Llama 3, templates that look first, and ones that write arguments one by one.
DUMPING = {
    "arguments": "{{ call.function.arguments | tojson }}",
    "looking": "{% set given = call.function.arguments %}{{ given if given is string else given | tojson }}",
    "mapping": "{% if call.function.arguments is mapping %}{{ call.function.arguments | tojson }}{% endif %}",
    "the function": '{{ {"name": call.function.name, "args": call.function.arguments} | tojson }}',
    "the call": "{{ call | tojson }}",
}
ONE_BY_ONE = "{% for name, value in call.function.arguments | items %}<{{ name }}={{ value }}>{% endfor %}"


def encoder(dump: str, **options: Any) -> TextEncoder:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
        "{% for call in message.tool_calls or [] %}" + dump + "{% endfor %}{% endfor %}"
    )
    return TextEncoder(tokenizer, **options)


def prompt(texts: TextEncoder, *arguments: Any, content: str = "hi") -> str:
    calls = [{"type": "function", "function": {"name": "f", "arguments": one}} for one in arguments]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": content}]},
        {"role": "assistant", "content": [], "tool_calls": calls},
    ]
    request = OmniRequest(id="r", kind="chat", inputs={"messages": messages})
    ids, _rows = prompting.encode(prompting.default_prompt(StagePayload(request=request)), texts)
    return str(tiny_tokenizer().decode(ids))


RAW = [
    '{"a": 1.10}',
    '{"a":9007199254740993.0,"b":1e400}',
    '{"a": 1, "a": 2}',
    '{ "a" : "\\u00e9é" }',
    '{"a": "é", "b": [1, 2]}',
    '{"x": "<end>"}',
    '{"x":"<end>\\\\1"}',
    "{}",
]


@pytest.mark.parametrize("dump", DUMPING)
@pytest.mark.parametrize("control_strings", [False, True])
def test_a_history_is_written_as_the_model_wrote_it(dump: str, control_strings: bool) -> None:
    texts = encoder(DUMPING[dump], control_strings=control_strings)
    for raw in RAW:
        found = prompt(texts, raw, raw.replace("x", "y"))
        assert raw in found and raw.replace("x", "y") in found


@given(st.lists(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False) | st.text(max_size=3), max_size=2)))
@settings(max_examples=40, deadline=None)
def test_any_arguments_come_through_compact_or_wide(several: list[dict[str, Any]]) -> None:
    texts = encoder("[{{ call.function.arguments | tojson }}]")
    for options in ({}, {"separators": (",", ":")}, {"ensure_ascii": False}):
        raw = [json.dumps(one, **options).replace("Infinity", "1e999") for one in several]
        assert prompt(texts, *raw).endswith("<assistant>" + "".join(f"[{one}]" for one in raw))


def test_a_users_text_that_looks_like_arguments_is_left_as_it_is() -> None:
    found = prompt(encoder(DUMPING["arguments"]), '{"a":1.10}', content='{"a": 1.1} {"a":1.10}')
    assert found == '<user>{"a": 1.1} {"a":1.10}<assistant>{"a":1.10}'


def test_a_template_that_writes_arguments_one_by_one_gets_an_object() -> None:
    assert prompt(encoder(ONE_BY_ONE), '{"a":1.5,"b":"x"}') == "<user>hi<assistant><a=1.5><b=x>"


def test_no_arguments_are_an_empty_object() -> None:
    empty: list[Any] = [None, "", " ", "null", "{}", {}]
    for nothing in empty:
        assert prompt(encoder(DUMPING["arguments"]), nothing) == "<user>hi<assistant>{}"


@pytest.mark.parametrize("broken", ["5", "[1]", "not json", '{"a": NaN}', "{", '"{}"', 3, [1], True, '{"a": 1} x'])
def test_broken_arguments_are_refused_by_a_sentence_with_their_place(broken: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt(encoder(DUMPING["arguments"]), "{}", broken)
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"
    assert str(caught.value).startswith(f"{caught.value.param}: expected the text of a JSON object, got ")


class Searched(str):
    """A text that counts how often it is searched."""

    searches = 0

    def count(self, *given: Any) -> int:
        self.searches += 1
        return super().count(*given)


def test_a_text_is_searched_once_for_the_arguments_of_any_number_of_calls() -> None:
    """A body may have tens of thousands of calls: a search for each took minutes."""
    raw = [f'{{"a":{number}.10}}' for number in range(300)]
    calls = [{"function": {"name": "f", "arguments": arguments_of(one, "")}} for one in raw]

    def write(messages: Any) -> str:
        return "".join(json.dumps(call["function"]["arguments"]) for call in messages[0]["tool_calls"])

    chat = WrittenChat([{"role": "assistant", "tool_calls": calls}], stand_in=True)
    text = Searched(write(chat.messages))
    assert (chat.has_dumped(text), text.searches) == (True, 1)
    assert chat.filled(text) == "".join(raw)
