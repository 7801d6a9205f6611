"""Numbers of an answer by a schema have an end, where the schema sets none; what it sets itself stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.text.bounded_numbers import ANY_OBJECT, bounded
from stage_runtime.engines.autoregressive.text.grammar_texts import WRITTEN, Grammar, SchemaPart
from stage_runtime.engines.autoregressive.text.grammars import Grammars
from tests.engines.generation_kit import END, VOCABULARY, tiny_tokenizer

llguidance = pytest.importorskip("llguidance")
BYTES = llguidance.LLTokenizer("byte")
LONG = "1" * 16
FINE = "0." + "3" * 10


def follows(schema: Any, text: str) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=WRITTEN)
    matcher = llguidance.LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "some", "none"),
    [
        ({"type": "integer"}, ["0", "-7", "9" * 15], [LONG, "-" + LONG]),
        ({"type": "number"}, ["0", "1.5", "-3.25", "9" * 15, "0.000000001"], [LONG, FINE, "1.5" + "0" * 20]),
        ({"type": ["integer", "null"]}, ["null", "5"], [LONG]),
        ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]"], [f"[{LONG}]"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "5"], [LONG]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "number"}}}, ["1.5"], [LONG, FINE]),
        ({"type": "number", "minimum": 0, "maximum": 1}, ["0.5", "1"], [FINE, "2"]),
        ({"type": "integer", "minimum": 5}, ["5", "9" * 15], ["4", LONG]),
        ({"type": "number", "multipleOf": 0.01}, ["1.25"], [LONG, "1.255"]),
    ],
)
def test_a_number_without_bounds_ends(schema: Any, some: list[str], none: list[str]) -> None:
    made = bounded(schema)
    assert [text for text in some if not follows(made, text)] == []
    assert [text for text in none if follows(made, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1, "maximum": 10},
        {"type": "integer", "enum": [1, 2]},
        {"type": "integer", "const": int("9" * 17)},
        {"type": "integer", "minimum": 10**16, "maximum": 10**17},
        {"type": "string"},
        {"enum": [{"type": "integer"}]},
        {"properties": {"type": {"const": "integer"}}},
        {"default": {"type": "number"}, "type": "object"},
        {"type": "integer", "minimum": "odd"},
        {"type": 5},
        {"type": [["integer"]]},
        {"properties": [{"type": "integer"}]},
        True,
        {},
    ],
)
def test_what_a_schema_sets_itself_or_cannot_mean_stays_as_it_is(schema: Any) -> None:
    assert bounded(schema) == schema


def test_a_property_named_as_a_keyword_is_a_schema_like_others() -> None:
    made = bounded({"type": "object", "properties": {"items": {"type": "integer"}, "enum": {"type": "integer"}}})
    assert {one["maximum"] for one in made["properties"].values()} == {10**15 - 1}


def test_a_stage_may_have_fewer_digits_or_no_bound() -> None:
    assert follows(bounded({"type": "integer"}, 3), "999") and not follows(bounded({"type": "integer"}, 3), "1000")
    assert bounded({"type": "number"}, None) == {"type": "number"}


def test_any_object_has_numbers_that_end() -> None:
    made = bounded(ANY_OBJECT)
    assert follows(made, '{"a": 1.5, "b": [1, {"c": null, "d": "x", "e": true}], "f": {}}')
    assert not follows(made, f'{{"a": [{LONG}]}}')


@given(st.integers(-(10**14), 10**14), st.integers(0, 10**14))
def test_bounds_of_a_schema_are_kept(low: int, width: int) -> None:
    made = bounded({"type": "integer", "minimum": low, "maximum": low + width})
    assert (made["minimum"], made["maximum"]) == (low, low + width)


@pytest.mark.parametrize(
    ("grammar", "some", "none"),
    [
        (Grammar("json_schema", '{"type": "integer"}'), "7", "1" * 16),
        (Grammar("json_schema", '{"type": "object"}'), '{"a": 7}', '{"a": ' + "1" * 16),
        (Grammar("lark", "start: part", parts=(SchemaPart("part", "tools[0]", '{"type": "integer"}'),)), "7", "1" * 16),
    ],
)
def test_every_grammar_of_an_answer_is_bounded_unless_the_stage_says_otherwise(
    grammar: Grammar, some: str, none: str
) -> None:
    def takes(text: str, **settings: Any) -> bool:
        matcher = Grammars(tiny_tokenizer(), VOCABULARY, frozenset({END}), **settings).compile(grammar)
        return all(matcher.take(token) for token in tiny_tokenizer()(text)["input_ids"])

    assert takes(some) and not takes(none)
    assert takes(none, number_digits=None)
