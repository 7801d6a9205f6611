"""A grammar is followed to its end, or refused with its place before the answer begins; a client's never gives 500."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.structured_output import schemas
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar, GrammarRefused
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits
from tests.engines.generation_kit import END, VOCABULARY, ScriptedExecutor
from tests.engines.writing_kit import Writing


def formatted(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def optional(count: int) -> dict[str, Any]:
    properties = {f"p{index}": {"const": index} for index in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.parametrize("count", [600, 1500])
@pytest.mark.parametrize("nested", [False, True])
def test_many_optional_properties_are_served(count: int, nested: bool) -> None:
    schema = optional(count)
    text = json.dumps({f"p{index}": index for index in range(0, count, 97)})
    if nested:
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
        text = json.dumps({"x": json.loads(text)})
    [found] = Writing(text)(response_format=formatted(schema))
    assert (found.error, found.content, found.finish) == ("", text, "stop")


@pytest.mark.parametrize("nested", [False, True])
def test_more_than_the_parser_takes_are_refused_with_the_place(nested: bool) -> None:
    schema = optional(2900)
    if nested:
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for params in ({"response_format": formatted(schema)}, {"tools": [tool], "tool_choice": "required"}):
        [found] = Writing("{")(**params)
        place = "response_format" if "response_format" in params else "tools"
        assert found.error.startswith(f"{place}")


ENDLESS: list[Any] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {"anyOf": [{"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]},
    {"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"allOf": [{"$ref": "#"}]}}},
    {
        "type": "object",
        "properties": {"a": {"$ref": "#n"}},
        "required": ["a"],
        "$defs": {"n": {"$anchor": "n", "type": "array", "items": {"$ref": "#n"}, "minItems": 2}},
    },
    {"$ref": "#/components/a", "components": {"a": {"$ref": "#/components/a"}}},
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_what_has_no_finite_value_is_refused_with_the_place(schema: Any) -> None:
    [found] = Writing('{"a": ' * 200)(response_format=formatted(schema), max_tokens=300)
    assert found.error == f"response_format: {schemas.NOTHING}"


ENDING: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a": {"a": {}}}'),
    ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
    (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"const": 1}},
            "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
            "additionalProperties": False,
        },
        '{"b": 1}',
    ),
    ({"anyOf": [{"$ref": "#"}, {"const": 1}]}, "1"),
    ({"$ref": "#/components/a", "components": {"a": {"const": 1}}}, "1"),
    ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, '{"a": {"a": null}}'),
]


@pytest.mark.parametrize(("schema", "text"), ENDING)
def test_recursion_that_may_end_is_served(schema: Any, text: str) -> None:
    [found] = Writing(text)(response_format=formatted(schema))
    assert (found.error, found.content, found.finish) == ("", text, "stop")


def test_an_answer_cannot_enter_a_part_that_has_no_end() -> None:
    schema, _text = ENDING[2]
    [found] = Writing('{"a": {"n": {"n": ')(response_format=formatted(schema), max_tokens=60)
    assert (found.content, found.finish) in (("{}", "stop"), ('{"b": 1}', "stop"))


def test_a_reference_chain_of_thousands_is_read_soon() -> None:
    count = 2500
    chain = {f"a{index}": {"$ref": f"#/$defs/a{index + 1}"} for index in range(count)}
    assert schemas.prepared({"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"const": 1}}})
    with pytest.raises(schemas.Endless):
        schemas.prepared({"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"$ref": "#"}}})


def _many(count: int) -> dict[str, Any]:
    """A schema that requires ``count`` others at once, each in three ways, and says its type as often."""
    names = [f"p{index}" for index in range(count)]
    return {
        "allOf": [{"type": "null"} for _ in names],
        "type": ["object"] * count,
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in names},
        "required": names,
        "$defs": {name: {"anyOf": [{"type": "null"}]} for name in names},
    }


def _calls(schema: dict[str, Any]) -> int:
    """The number of calls of functions that reading it takes."""
    calls, before = 0, sys.getprofile()

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        schemas.prepared(schema)
    finally:
        sys.setprofile(before)
    return calls


def test_twice_as_many_schemas_in_one_take_twice_as_many_calls() -> None:
    few, many = _calls(_many(200)), _calls(_many(400))
    assert few < many < 2.1 * few


def _patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"a.*{index}"} for index in range(count)]


#: Schemas whose texts follow so many patterns at once. The time that llguidance takes doubles with each.
JOINED: dict[str, Callable[[int], Any]] = {
    "allOf": lambda count: {"allOf": _patterns(count)},
    "items": lambda count: {"allOf": [{"type": "array", "items": one} for one in _patterns(count)]},
    "a property": lambda count: {"allOf": [{"type": "object", "properties": {"a": one}} for one in _patterns(count)]},
    "alternatives": lambda count: {"allOf": [{"anyOf": [one, {"type": "null"}]} for one in _patterns(count)]},
    "references": lambda count: {
        "$ref": "#/$defs/0",
        "$defs": {
            **{str(at): {**one, "$ref": f"#/$defs/{at + 1}"} for at, one in enumerate(_patterns(count))},
            str(count): {"type": "string"},
        },
    },
}


@pytest.mark.parametrize("name", JOINED)
def test_many_patterns_of_one_text_are_refused_before_they_are_compiled(name: str) -> None:
    problem = f"expected at most {schemas.MOST_JOINED} patterns and formats that may apply to one text"
    schema = JOINED[name](40)
    [found] = Writing("{")(response_format=formatted(schema))
    assert found.error == f"response_format: {problem}"
    [found] = Writing("{")(structured_outputs={"grammar": f"start: %json {json.dumps(schema)}"})
    assert found.error == f"structured_outputs.grammar: {problem}"
    assert schemas.prepared(JOINED[name](schemas.MOST_JOINED))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99_999_989},
        {"type": "integer", "multipleOf": 10**400},
        {"type": "integer", "multipleOf": 1234.5678},
        {"type": "integer", "multipleOf": 10**8, "minimum": 0, "maximum": 10**9},
        {"allOf": [{"type": "integer", "multipleOf": one} for one in (9973, 9967)]},
        {"type": "object", "properties": {f"p{at}": {"type": "integer", "multipleOf": 9901 + at} for at in range(9)}},
    ],
)
def test_multiples_that_take_too_much_memory_are_refused_before_they_are_compiled(schema: Any) -> None:
    [found] = Writing("1")(response_format=formatted(schema))
    assert found.error == (
        f"response_format: expected multipleOf to be at most {schemas.MOST_STEPS} together, without a decimal point"
    )


@pytest.mark.parametrize("multiple", [0.01, 5, 3600, 10_000, 1e-9])
def test_usual_multiples_are_served(multiple: float) -> None:
    schema = {"type": "integer" if multiple >= 1 else "number", "multipleOf": multiple, "minimum": 0, "maximum": 10**9}
    [found] = Writing("0")(response_format=formatted(schema), max_tokens=20)
    assert found.error == ""


def test_rules_that_join_many_expressions_are_refused_before_they_are_compiled() -> None:
    rules = "start: A\nA: " + " & ".join(f"/.*a.*{index}.*/" for index in range(40))
    [found] = Writing("a")(structured_outputs={"grammar": rules})
    assert found.error == f"structured_outputs.grammar: expected at most {schemas.MOST_ANDS} times '&' in a grammar"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{index}": one for index, one in enumerate(_patterns(40))}},
        {"anyOf": _patterns(40)},
        {
            "allOf": [{"type": "object"}, {"type": "object"}],
            "properties": {f"p{index}": one for index, one in enumerate(_patterns(40))},
        },
    ],
)
def test_many_patterns_of_different_texts_are_served(schema: Any) -> None:
    [found] = Writing("{")(response_format=formatted(schema), max_tokens=20)
    assert found.error == ""


def test_stop_tokens_that_leave_none_for_min_tokens_are_refused() -> None:
    everything = [*range(VOCABULARY)]
    [found] = Writing("abc")(stop_token_ids=everything, min_tokens=1)
    assert found.error == "stop_token_ids: no token is left for the min_tokens before the end"
    [found] = Writing("abc")(stop_token_ids=everything)
    assert (found.content, found.finish) == ("", "stop")
    without_end = [token for token in everything if token != END]
    [found] = Writing("abc")(stop_token_ids=without_end, min_tokens=1)
    assert "min_tokens" in found.error


class _Broken:
    """`grammars.Matcher` that is followed for some tokens."""

    ended = False

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def mask(self) -> Any:
        self._left -= 1
        if self._left < 0:
            raise GrammarRefused("response_format", "it cannot be followed: too many items \ud800")
        return np.ones(VOCABULARY, dtype=np.bool_)

    def take(self, token: int) -> bool:
        return True

    def copy(self) -> Any:
        raise AssertionError("nothing is drafted")


class _Masked(ScriptedExecutor):
    def sample_tokens(self, masks: Any, after: Any = None) -> Any:
        return self.execute_model(self.held)

    def execute_model(self, step: Any, hold: bool = False, drafted: Any = None) -> Any:
        self.held = step
        return super().execute_model(step, hold)


def test_a_grammar_that_fails_in_mid_answer_is_the_clients_fault_and_names_its_field() -> None:
    scheduler = Scheduler(SchedulerLimits(block_size=4, max_model_len=120), BlockPool(64))
    core = EngineCore(scheduler, _Masked(), ModelFacts(VOCABULARY, grammars=lambda grammar: _Broken(2)))
    params = SamplingParams(grammar=Grammar("json_schema", "{}"), max_tokens=9)
    core.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], params=params))
    core.add_request(EngineCoreRequest(request_id="b", prompt_token_ids=[1], params=SamplingParams(max_tokens=4)))
    outputs = []
    while core.has_work():
        outputs += core.step_fn()[0]
    core.shutdown()
    [failed] = [one for one in outputs if one.request_id == "a" and one.finish is not None]
    assert failed.refused == "response_format"
    assert failed.reason == r"response_format: it cannot be followed: too many items \ud800"  # it can be sent
    assert len([one for one in outputs if one.request_id == "b"]) == 4
