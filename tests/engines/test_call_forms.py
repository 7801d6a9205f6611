"""The forms of tool calls beside Hermes': found however the text is cut, forced by grammars that give the same form."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.sampling import parameters
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.decoding import decoder
from stage_runtime.engines.autoregressive.text.prompts import prompting
from stage_runtime.engines.autoregressive.text.prompts.controls import TextEncoder
from stage_runtime.engines.autoregressive.text.structured_output.grammars import Grammars
from stage_runtime.engines.autoregressive.text.tool_calls import tools
from stage_runtime.engines.autoregressive.text.tool_calls.call_forms import FORMS, form_of
from stage_runtime.engines.autoregressive.text.tool_calls.call_parsers import MARK
from stage_runtime.engines.autoregressive.text.tool_calls.calls import Call
from stage_runtime.wire.values import OmniRequest, StagePayload
from tests.engines.call_kit import NAMES, parsed, parser_of
from tests.engines.generation_kit import END, VOCABULARY, tiny_tokenizer

F, G = Call("f", '{"a": "}]"}'), Call("g", "{}")
CALL_F, CALL_G = '{"name": "f", "parameters": {"a": "}]"}}', '{"name": "g", "arguments": {}}'

#: (form, text) -> the text beside calls, and the calls.
ANSWERS: dict[tuple[str, str], tuple[str, list[Call]]] = {
    ("json", "plain {words}"): ("plain {words}", []),
    ("json", CALL_F): ("", [F]),
    ("json", f" \n{CALL_F}; {CALL_G}\n"): ("", [F, G]),
    ("json", f"{CALL_F} done {CALL_G}"): (f" done {CALL_G}", [F]),
    ("json", '{"name": "other", "parameters": {}}'): ('{"name": "other", "parameters": {}}', []),
    ("json", '{"answer": 42} and more'): ('{"answer": 42} and more', []),
    ("json", '{"name": "f", "parameters": {'): ('{"name": "f", "parameters": {', []),
    ("json", "  "): ("  ", []),
    ("json", '{"name": "f", ]} x'): ('{"name": "f", ]} x', []),
    ("json", f"{MARK}[{CALL_F}]"): (f"{MARK}[{CALL_F}]", []),
    ("mistral", "plain [1] words"): ("plain [1] words", []),
    ("mistral", f"{MARK} [{CALL_F}, {CALL_G}]"): ("", [F, G]),
    ("mistral", f"[{CALL_F}]"): ("", [F]),
    ("mistral", f"so: {MARK}[{CALL_F}] and {MARK}[{CALL_G}]"): ("so:  and ", [F, G]),
    ("mistral", f'{MARK}f{{"a": "}}]"}}{MARK}g[ARGS]{{}}'): ("", [F, G]),
    ("mistral", f'{MARK}f [ARGS {{"a": 1}}'): (f'{MARK}f [ARGS {{"a": 1}}', []),
    ("mistral", f'{MARK}other{{"a": 1}} x'): (f'{MARK}other{{"a": 1}} x', []),
    ("mistral", f"{MARK}f says"): (f"{MARK}f says", []),
    ("mistral", MARK): (MARK, []),
    ("mistral", "[TOOL_C"): ("[TOOL_C", []),
    ("mistral", "[TOOL] x"): ("[TOOL] x", []),
    ("mistral", "[1] see above"): ("[1] see above", []),
    ("mistral", f"[1] see {MARK}[{CALL_G}]"): ("[1] see ", [G]),
    ("mistral", "[never closed"): ("[never closed", []),
}


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
def test_calls_of_a_form_are_found_wherever_the_text_is_cut_in_two_and_letter_by_letter(form: str, answer: str) -> None:
    for cut in range(len(answer) + 1):
        assert parsed(form, answer[:cut], answer[cut:]) == ANSWERS[form, answer]
    assert parsed(form, *answer) == ANSWERS[form, answer]


@given(st.sampled_from(["json", "mistral"]), st.lists(st.sampled_from([*'{}[]"\\ ;fx', MARK, CALL_F, CALL_G, '{"a"'])))
def test_whatever_a_model_writes_is_text_or_calls_however_it_is_cut(form: str, pieces: list[str]) -> None:
    whole = "".join(pieces)
    text, calls = parsed(form, whole)
    assert parsed(form, *whole) == (text, calls)
    assert {call.name for call in calls} <= set(NAMES)
    if not calls:
        assert text == whole


def test_text_that_is_no_call_is_not_held_back() -> None:
    parser = parser_of("json")
    assert [parser.feed(piece).spans for piece in ("Hel", "lo {", "}")] == [[(0, 3)], [(3, 7)], [(7, 8)]]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_follows_a_forced_call_s_grammar_is_read_as_that_call(form: str) -> None:
    schema = {
        "type": "object",
        "properties": {"utc": {"const": True}},
        "required": ["utc"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    found = parameters.from_params({"tools": [tool], "tool_choice": "required"}, SamplingParams(), FORMS[form])
    assert found.grammar is not None
    tokenizer = tiny_tokenizer()
    matcher = Grammars(tokenizer, VOCABULARY, frozenset({END})).compile(found.grammar)
    text = ""
    while not matcher.ended:
        token = int(matcher.mask().nonzero()[0][0])
        assert matcher.take(token)
        text += "" if token == END else tokenizer.decode([token])
    assert parsed(form, text) == ("", [Call("f", '{"utc": true}')])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %} [TOOL_CALLS]", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name}', "json"),
        ("{{ '<|python_tag|>' }}", "json"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_chat_template_says_which_form_a_model_writes(template: str | None, form: str) -> None:
    assert form_of("auto", template) is FORMS[form]
    assert form_of("json", template) is FORMS["json"]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_whose_template_takes_no_tools_is_prompted_with_the_form_that_is_read(form: str) -> None:
    sample = FORMS[form].sample
    name = "function's name"
    _text, [call] = tools_of(form, sample, name)
    assert (call.name, json.loads(call.arguments)) == (name, {"argument": "value"})
    tokenizer = tiny_tokenizer()
    tool = {"type": "function", "function": {"name": "f"}}
    request = OmniRequest(
        id="r", kind="chat", inputs={"messages": [{"role": "user", "content": "hi"}]}, params={"tools": [tool]}
    )
    prompt = prompting.default_prompt(StagePayload(request=request))
    tokens, _rows = prompting.encode(prompt, TextEncoder(tokenizer), form=FORMS[form])
    assert sample in tokenizer.decode(tokens)
    assert tools.names(prompt.template["tools"]) == {"f"}


def tools_of(form: str, text: str, *names: str) -> tuple[str, list[Call]]:
    return parsed(form, text, names=frozenset(names))


def test_a_special_token_that_begins_calls_is_kept_in_the_text() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    ids: Any = tokenizer(f"so {MARK}[{CALL_G}]<end>")["input_ids"]
    assert decoder(tokenizer)(ids) == f"so [{CALL_G}]"
    assert decoder(tokenizer, (MARK,))(ids) == f"so {MARK}[{CALL_G}]"
    assert decoder(tiny_tokenizer(), (MARK,))([*b"hi"]) == decoder(tiny_tokenizer())([*b"hi"])
    for begin, end in itertools.combinations(range(len(ids) + 1), 2):
        kept = decoder(tokenizer, (MARK,))(ids[begin:end])
        assert kept in f"so {MARK}[{CALL_G}]"
