"""A grammar is followed to its end, or refused with its place before the answer begins; a client's never gives 500."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
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
            raise GrammarRefused("response_format", "it cannot be followed: too many items")
        return np.ones(VOCABULARY, dtype=np.bool_)

    def take(self, token: int) -> bool:
        return True

    def copy(self) -> Any:
        raise AssertionError("there are no drafts")


class _Masked(ScriptedExecutor):
    def sample_tokens(self, masks: Any, after: Any = None) -> Any:
        return self.execute_model(self.held)

    def execute_model(self, step: Any, hold: bool = False, drafted: Any = None) -> Any:
        self.held = step
        return super().execute_model(step, hold)


def test_a_grammar_that_fails_in_mid_answer_is_the_clients_fault_and_names_its_field() -> None:
    scheduler = Scheduler(SchedulerLimits(block_size=4, max_model_len=120), BlockPool(64))
    core = EngineCore(scheduler, _Masked(), vocab_size=VOCABULARY, grammars=lambda grammar: _Broken(2))
    params = SamplingParams(grammar=Grammar("json_schema", "{}"), max_tokens=9)
    core.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], params=params))
    core.add_request(EngineCoreRequest(request_id="b", prompt_token_ids=[1], params=SamplingParams(max_tokens=4)))
    outputs = []
    while core.has_work():
        outputs += core.step_fn()[0]
    core.shutdown()
    [failed] = [one for one in outputs if one.request_id == "a" and one.finish is not None]
    assert failed.refused == "response_format"
    assert failed.reason == "response_format: it cannot be followed: too many items"
    assert len([one for one in outputs if one.request_id == "b"]) == 4
