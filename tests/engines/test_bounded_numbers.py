"""Numbers of an answer by a schema have an end, where the schema sets none; what it sets itself stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.text.structured_output.bounded_numbers import bounded
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import WRITTEN, Grammar, SchemaPart
from stage_runtime.engines.autoregressive.text.structured_output.grammars import Grammars
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
        {"default": {"type": "number"}, "type": "object", "additionalProperties": False},
        {"type": "object", "allOf": [{"properties": {"a": {}}}, {"additionalProperties": True}]},
        {"$id": "https://a.example/x.json", "properties": {"a": {}}},
        {"$defs": [], "properties": {"a": {}}},
        {"type": "integer", "minimum": "odd"},
        {"type": 5},
        {"type": [["integer"]]},
        {"properties": [{"type": "integer"}]},
        True,
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


OPEN_VALUES = ["5", "-2.5", '"x"', "null", "true", '[1, "a", {"b": 2.5}]', '{"b": {"c": []}}']


@pytest.mark.parametrize(
    ("schema", "form"),
    [
        ({}, "{}"),
        ({"description": "any"}, "{}"),
        ({"type": "object"}, '{{"a": {}}}'),
        ({"type": ["object", "null"]}, '{{"a": {}}}'),
        ({"type": "object", "properties": {"a": {}}}, '{{"a": {}}}'),
        ({"type": "object", "properties": {"a": True}, "additionalProperties": False}, '{{"a": {}}}'),
        ({"type": "object", "properties": {"a": {"title": "A"}}, "additionalProperties": False}, '{{"a": {}}}'),
        ({"type": "object", "properties": {"a": {"type": "object"}}}, '{{"a": {{"b": {}}}}}'),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, '{{"a": "x", "c": {}}}'),
        ({"type": "object", "additionalProperties": True}, '{{"a": {}}}'),
        ({"type": "array"}, "[1, {}]"),
        ({"type": "array", "items": {}}, "[{}]"),
        ({"anyOf": [{"type": "null"}, {"type": "array"}]}, "[{}]"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}}, '{{"a": {}}}'),
    ],
)
def test_where_a_schema_leaves_a_value_open_numbers_end(schema: Any, form: str) -> None:
    made = bounded(schema)
    assert [one for one in OPEN_VALUES if not follows(made, form.format(one))] == []
    assert [one for one in (LONG, f"[{LONG}]", f'{{"z": [-{LONG}]}}') if follows(made, form.format(one))] == []


def test_items_of_a_tuple_have_bounds() -> None:
    made = bounded({"type": "array", "items": [{"type": "integer"}], "additionalItems": False})
    assert follows(made, "[5]") and not follows(made, f"[{LONG}]")


def test_any_object_has_numbers_that_end() -> None:
    made = bounded({"type": "object"})
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
