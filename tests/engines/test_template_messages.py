"""Messages reach every chat template: system messages where it takes them, text and parts as it takes them."""

from __future__ import annotations

from typing import Any

import pytest

from stage_runtime.api import Prompt
from stage_runtime.engines.autoregressive.text.prompts import prompting
from stage_runtime.engines.autoregressive.text.prompts.controls import TextEncoder
from stage_runtime.engines.autoregressive.text.tool_calls import tools
from stage_runtime.engines.autoregressive.text.tool_calls.call_forms import FORMS
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.wire.values import OmniRequest, StagePayload
from tests.engines.tokenizer_kit import tokenizer

ANY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
#: Messages of Llama 2's and Qwen3.5's: one system message, at the beginning.
ONE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
#: One system message at the beginning; others are left out without an error.
SILENT = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
#: Messages of Gemma's: none, and users and assistants take turns.
NONE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
IGNORING = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATES = {"any": ANY, "one": ONE, "silent": SILENT, "none": NONE, "ignoring": IGNORING}
TOOL = {"type": "function", "function": {"name": "f"}}


def written(template: str, messages: list[dict[str, Any]], **params: Any) -> str:
    made = tokenizer("byte-level", "plain", template)
    request = OmniRequest(id="r", kind="chat", inputs={"messages": messages}, params=params)
    tokens, _rows = prompting.encode(prompting.default_prompt(StagePayload(request=request)), TextEncoder(made))
    return str(made.decode(tokens))


def said(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize("message", [{"content": "hi"}, {"role": None, "content": "hi"}, {"role": 5, "content": "hi"}])
def test_a_pipeline_s_message_without_a_role_is_the_client_s_fault(message: dict[str, Any]) -> None:
    request = OmniRequest(id="r", inputs={"messages": [{"role": "user", "content": "a"}, message]})
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]\.role: expected a text$"):
        prompting.default_prompt(StagePayload(request=request))


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("any", "[system]a[system]b[user]c"),
        ("one", "[system]a\n\nb[user]c"),
        ("silent", "[system]a\n\nb[user]c"),
        ("none", "[user]a\n\nb\n\nc"),
        ("ignoring", "[user]a\n\nb\n\nc"),
    ],
)
def test_a_developers_message_beside_the_systems_reaches_every_template(template: str, prompt: str) -> None:
    assert written(TEMPLATES[template], said(("system", "a"), ("developer", "b"), ("user", "c"))) == prompt
    assert written(TEMPLATES[template], said(("system", "a"), ("system", "b"), ("user", "c"))) == prompt


@pytest.mark.parametrize("template", TEMPLATES)
def test_instructions_for_tools_stand_beside_the_clients_system_message(template: str) -> None:
    prompt = written(TEMPLATES[template], said(("system", "be brief"), ("user", "hello")), tools=[TOOL])
    instructions = tools.instructions([TOOL], FORMS["hermes"].sample)
    assert prompt.index(instructions) < prompt.index("be brief") < prompt.index("hello")
    assert prompt.count("[system]") == {"any": 2, "one": 1, "silent": 1}.get(template, 0)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("any", "[user]a[assistant]b[system]c[user]d"),
        ("one", "[user]a[assistant]b[user]c\n\nd"),
        ("silent", "[user]a[assistant]b[user]c\n\nd"),
        ("none", "[user]a[assistant]b[user]c\n\nd"),
    ],
)
def test_a_later_system_message_is_given_to_the_next_user_where_none_may_stand(template: str, prompt: str) -> None:
    assert (
        written(TEMPLATES[template], said(("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"))) == prompt
    )


def test_a_system_message_at_the_end_is_left_out_by_no_template() -> None:
    assert written(NONE, said(("user", "a"), ("system", "b"))) == "[user]a\n\nb"
    assert written(NONE, said(("system", "b"))) == "[user]b"


@pytest.mark.parametrize("template", TEMPLATES)
def test_messages_that_a_template_takes_stay_as_they_are(template: str) -> None:
    assert (
        written(TEMPLATES[template], said(("user", "a"), ("assistant", "b"), ("user", "c")))
        == "[user]a[assistant]b[user]c"
    )
    if template in ("any", "one", "silent"):
        assert written(TEMPLATES[template], said(("system", "a"), ("user", "c"))) == "[system]a[user]c"


def test_what_the_template_itself_refuses_is_the_clients_fault() -> None:
    with pytest.raises(InvalidRequest, match="alternate"):
        written(NONE, said(("user", "a"), ("user", "b")))


def test_an_authors_prompt_of_the_requests_own_messages_is_written_as_the_default_is() -> None:
    """``omni.Prompt(messages=payload.request.messages())``: contents are lists of parts, arguments are texts."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ '' + m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    made = tokenizer("byte-level", "plain", template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": [], "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    request = OmniRequest(id="r", kind="chat", inputs={"messages": messages})
    own, _rows = prompting.encode(Prompt(messages=request.messages()), TextEncoder(made))
    default, _rows = prompting.encode(prompting.default_prompt(StagePayload(request=request)), TextEncoder(made))
    assert own == default
    assert made.decode(own) == "[user]hello[assistant]Rome[tool]sunny"


@pytest.mark.parametrize("part", [{"type": "image", "data": b""}, {"type": "text"}, "text", {"text": 5}])
def test_a_part_that_is_not_text_fails_the_request_and_names_its_message(part: Any) -> None:
    made = tokenizer("byte-level", "plain", ANY)
    with pytest.raises(InvalidRequest, match=r"messages\[0\]"):
        prompting.encode(Prompt(messages=[{"role": "user", "content": [part]}]), TextEncoder(made))


def test_a_template_that_reads_parts_alone_gets_parts() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}"
    assert written(template, said(("user", "hello"))) == "[user]hello"


def test_a_model_without_a_chat_template_is_the_stages_fault_and_the_cure_is_named() -> None:
    made = tokenizer("byte-level", "plain", "")
    with pytest.raises(RequestError, match=r"omni\.Prompt\(text=…\)") as raised:
        prompting.encode(Prompt(messages=said(("user", "a"))), TextEncoder(made))
    assert raised.value.code == "stage_failed"
