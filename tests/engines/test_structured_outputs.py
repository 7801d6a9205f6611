"""vLLM's forms of an answer (``structured_outputs``) are followed, or refused with their place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.engines.autoregressive.text.structured_output.grammars import Grammars
from tests.engines.generation_kit import END, VOCABULARY, tiny_tokenizer
from tests.engines.writing_kit import Writing

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    ("form", "wanted", "text"),
    [
        ({"regex": "[0-9]{3}(a|b)/"}, "123b/ and more", "123b/"),
        ({"choice": ["yes", 'n"o', "é"]}, 'n"o', 'n"o'),
        ({"choice": ["yes", "no", "é"]}, "é?", "é"),
        ({"grammar": 'start: "a" word\nword: /[x-z]+/ "."'}, "axyz. then", "axyz."),
        ({"grammar": 'root ::= "a" word\nword ::= [x-z]+ "."'}, "azz. then", "azz."),
        ({"json": SCHEMA}, '{"a": 7} then', '{"a": 7}'),
        ({"json": json.dumps(SCHEMA), "disable_fallback": False}, '{"a": 7}', '{"a": 7}'),
        ({"json_object": True, "regex": None}, '{"b": "c"}', '{"b": "c"}'),
    ],
)
def test_an_answer_follows_its_form_and_ends_with_it(form: dict[str, Any], wanted: str, text: str) -> None:
    [found] = Writing(wanted)(structured_outputs=form)
    assert (found.error, found.content, found.finish) == ("", text, "stop")


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"regex": "(", "choice": None}, "structured_outputs.regex: it cannot be followed"),
        ({"regex": ""}, "structured_outputs.regex: expected a regular expression, got str"),
        ({"regex": 5}, "structured_outputs.regex: expected a regular expression, got int"),
        ({"choice": []}, "structured_outputs.choice: expected a list of 1 to 4096 texts that are not empty, got list"),
        ({"choice": ["a", ""]}, "structured_outputs.choice: expected a list"),
        ({"grammar": "start: nowhere"}, "structured_outputs.grammar: "),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar: "),
        ({"grammar": "a" * 70_000}, "structured_outputs.grammar: expected at most 65536 characters, got 70000"),
        ({"json": "{"}, "structured_outputs.json: not JSON: "),
        ({"json": "[]"}, "structured_outputs.json: expected an object, got list"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json: "),
        (
            {"regex": "a", "choice": ["a"]},
            "structured_outputs: expected one of json, regex, choice, grammar, json_obje",
        ),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag: not known here; there are json, regex"),
        ("a", "structured_outputs: expected an object"),
    ],
)
def test_what_is_not_a_form_is_refused_with_its_place(form: Any, problem: str) -> None:
    [found] = Writing("x")(structured_outputs=form)
    assert found.error.startswith(problem)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start',  # no end, and nothing to choose: the library writes it until it gives up
        'start: "ab" | "a" b\nb: "c" b',
        'root ::= "a" root',
        "start: x\nx: y\ny: x",
        "start: /[^\\s\\S]/",
    ],
)
def test_a_grammar_without_an_end_is_refused_with_its_place_and_the_next_request_is_answered(grammar: str) -> None:
    write = Writing("acccccc")
    [found] = write(structured_outputs={"grammar": grammar}, max_tokens=20)
    assert found.error.startswith("structured_outputs.grammar: it cannot be followed: ")
    assert write()[0].error == ""


def test_only_one_form_of_an_answer_can_be_asked_for() -> None:
    [found] = Writing("x")(structured_outputs={"regex": "a"}, response_format={"type": "json_object"})
    assert found.error == "structured_outputs: response_format asks for a form of the answer, too"


def test_beside_tools_an_answer_is_a_call_or_json() -> None:
    [found] = Writing('{"a": 7}')(structured_outputs={"json": SCHEMA}, tools=[TOOL])
    assert (found.content, found.calls) == ('{"a": 7}', [])
    [refused] = Writing("a")(structured_outputs={"regex": "a"}, tools=[TOOL])
    assert refused.error == "structured_outputs.regex: no form but JSON goes with tools that may be called"
    [plain] = Writing("ab")(structured_outputs={"regex": "a"}, tools=[TOOL], tool_choice="none")
    assert plain.content == "a"


@pytest.mark.parametrize(("shown", "text"), [(True, "say stop"), (False, "say "), (None, "say ")])
def test_a_stop_string_is_shown_where_that_is_asked_for(shown: bool | None, text: str) -> None:
    [found] = Writing("say stop and go")(stop="stop", include_stop_str_in_output=shown, logprobs=True)
    assert (found.content, found.finish) == (text, "stop")
    assert "".join(one["token"] for one in found.shown) == text


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "hi!"),
        ({"skip_special_tokens": False}, "hi<user>!"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hi<user>!<end>"),
        ({"include_stop_str_in_output": True}, "hi!"),
        ({"include_stop_str_in_output": True, "stop_token_ids": [33]}, "hi"),
    ],
)
def test_special_tokens_are_shown_where_that_is_asked_for(params: dict[str, Any], text: str) -> None:
    writing = Writing("hi<user>!")
    [found] = writing(**params)
    assert found.content in (text, text + "!")


def test_a_token_that_is_not_allowed_is_not_taken_for_a_fault_of_the_grammar() -> None:
    tokenizer = tiny_tokenizer()
    [a, b] = tokenizer("ab", add_special_tokens=False)["input_ids"]
    for rules in ('start: "a"', "start: /[ac]/"):
        matcher = Grammars(tokenizer, VOCABULARY, frozenset({END})).compile(Grammar("lark", rules))
        assert matcher.mask()[a] and not matcher.take(b)
