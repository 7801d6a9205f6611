"""Answers with calls of tools, as a client gets them: cut, stopped, beside schemas and thinking; streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engines.call_kit import parsed
from tests.engines.writing_kit import Answer, Writing
from tests.thoroughness import rows

FORMS = ("hermes", "json", "mistral")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ARGUMENTS = '{"city": "a}b, ]c"}'
#: Texts by form: a call of each tool, and both in one answer.
WRITTEN = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    ),
    "json": (f'{{"name": "weather", "parameters": {ARGUMENTS}}}', '{"name": "clock", "parameters": {}}'),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
    ),
}
CALLS = [("weather", ARGUMENTS), ("clock", "{}")]


def schema(**properties: Any) -> dict[str, Any]:
    wanted = {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False
    }  # fmt: skip
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}


ANSWER = schema(colour={"enum": ["red", "blue"]})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stop", ["\n", "}", "arguments", "weather", '"', "{", "_call", "TOOL", "name", ["]", "<"]])
def test_stop_strings_do_not_cut_calls(form: str, stop: str | list[str]) -> None:
    first, second = WRITTEN[form]
    forced = {"type": "function", "function": {"name": "weather"}}
    [found] = Writing(first.removeprefix("[TOOL_CALLS]"), form=form)(tools=TOOLS, tool_choice=forced, stop=stop)
    assert found == Answer("", CALLS[:1], "tool_calls", [])
    between = "; " if form == "json" else "\n"
    [found] = Writing(first + between + second, form=form)(tools=TOOLS, stop=["never", "city"])
    assert found.calls == CALLS


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_a_stop_string_beside_calls_ends_the_answer_there(form: str) -> None:
    first, second = WRITTEN[form]
    [found] = Writing(f"so {first} and }} then {second}", form=form)(tools=TOOLS, stop="}")
    assert found == Answer("so  and ", CALLS[:1], "tool_calls", [])
    [found] = Writing(f"so {{}} {first}", form=form)(tools=TOOLS, stop="}")
    assert found == Answer("so {", [], "stop", [])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_is_cut_is_never_text_and_whole_calls_are_kept(form: str, choice: str) -> None:
    first, second = WRITTEN[form]
    if choice == "required" and form == "mistral":
        first = first.removeprefix("[TOOL_CALLS]")
    before = "so " if choice == "auto" and form != "json" else ""
    text = before + first + ("" if choice == "required" else (";" if form == "json" else "") + second)
    writing = Writing(text, form=form)
    closing = {"hermes": len("\n</tool_call>"), "json": 0, "mistral": len("]")}[form]
    first_ends = len(before + first) - closing
    for count in rows(range(1, len(text)), each_run=40):
        [found] = writing(tools=TOOLS, tool_choice=choice, max_tokens=count)
        assert found.finish == "length"
        assert str(found.content) == before[:count]
        whole = found.calls
        assert whole == CALLS[: len(whole)]
        if count >= len(before + first):
            assert whole[:1] == CALLS[:1]
        if count < first_ends:
            assert not whole


def test_a_call_counts_where_the_answer_ends_inside_its_end_tag() -> None:
    first, _second = WRITTEN["hermes"]
    for count in range(len(first) - len("</tool_call>"), len(first)):
        [found] = Writing(first)(tools=TOOLS, max_tokens=count)
        assert found == Answer("", CALLS[:1], "length", [])


PIECES = ["so ", "<", "[1]", "{", "}", '{"a": 1}', "\n", "é", "<think>", "</think>", "A", "B"]


@pytest.mark.parametrize("form", FORMS)
@given(pieces=st.lists(st.sampled_from(PIECES)), count=st.integers(1, 300))
@example(pieces=["{", "A", "}"], count=2)
@example(pieces=["{", "A", "}"], count=20)
@example(pieces=["{", "B"], count=49)
@settings(max_examples=60)
def test_a_cut_answer_is_a_beginning_of_the_whole_one(form: str, pieces: list[str], count: int) -> None:
    first, second = WRITTEN[form]
    text = "".join({"A": first, "B": second}.get(piece, piece) for piece in pieces)
    names = frozenset({"weather", "clock"})
    whole, calls = parsed(form, text, names=names)
    cut = text[:count]
    shown, found = parsed(form, cut, cut=True, names=names)
    assert parsed(form, *cut, cut=True, names=names) == (shown, found)
    assert whole.startswith(shown) or shown.startswith(whole.rstrip())
    assert calls[: len(found)] == found


@pytest.mark.parametrize("form", FORMS)
def test_beside_a_schema_an_answer_is_one_of_it_or_a_call(form: str) -> None:
    first, second = WRITTEN[form]
    for text, expected in (
        ('{"colour": "blue"}', Answer('{"colour": "blue"}', [], "stop", [])),
        (first, Answer("", CALLS[:1], "tool_calls", [])),
        (second, Answer("", CALLS[1:], "tool_calls", [])),
    ):
        [found] = Writing(text, form=form)(tools=TOOLS, response_format=ANSWER)
        assert found == expected


def test_several_calls_follow_each_other_beside_a_schema_unless_one_is_asked_for() -> None:
    for form, between in (("hermes", "\n"), ("json", "; ")):
        text = between.join(WRITTEN[form])
        [found] = Writing(text, form=form)(tools=TOOLS, response_format=ANSWER)
        assert found == Answer("", CALLS, "tool_calls", [])
        [found] = Writing(text, form=form)(tools=TOOLS, response_format=ANSWER, parallel_tool_calls=False)
        assert found == Answer("", CALLS[:1], "tool_calls", [])


@pytest.mark.parametrize("form", FORMS)
def test_without_parallel_calls_an_answer_ends_with_its_first(form: str) -> None:
    first, second = WRITTEN[form]
    text = first + ("; " if form == "json" else " and ") + second
    [found] = Writing(text, form=form)(tools=TOOLS, parallel_tool_calls=False)
    assert found == Answer("", CALLS[:1], "tool_calls", [])
    [found] = Writing(text, form=form)(tools=TOOLS, parallel_tool_calls=True)
    assert found.calls == CALLS
    if form != "json":
        listed = WRITTEN["mistral"][0][len("[TOOL_CALLS][") : -1]
        both = f"[{listed}, {listed}]"
        marked = f"<tool_call>{both}</tool_call>" if form == "hermes" else f"[TOOL_CALLS]{both}"
        [found] = Writing(marked, form=form)(tools=TOOLS, parallel_tool_calls=False)
        assert found == Answer("", CALLS[:1], "tool_calls", [])


def test_an_answer_of_the_clients_schema_is_no_call_though_it_looks_like_one() -> None:
    wanted = schema(name={"type": "string"}, parameters={"type": "object"})
    text = '{"name": "clock", "parameters": {}}'
    [found] = Writing(text, form="json")(tools=TOOLS, response_format=wanted)
    assert found == Answer(text, [], "stop", [])
    [found] = Writing(text, form="json")(tools=TOOLS, response_format={"type": "json_object"})
    assert found == Answer("", CALLS[1:], "tool_calls", [])
    [found] = Writing(text, form="json")(tools=TOOLS, response_format=wanted, tool_choice="required")
    assert found.calls == CALLS[1:]
    [found] = Writing(text, form="json")(tools=TOOLS, response_format=wanted, tool_choice="none")
    assert found.content == text


@pytest.mark.parametrize("form", FORMS)
def test_tags_inside_an_answer_of_the_clients_schema_are_its_text(form: str) -> None:
    first, _second = WRITTEN[form]
    text = json.dumps({"html": f"x {first} y"})
    [found] = Writing(text, form=form)(tools=TOOLS, response_format=schema(html={"type": "string"}))
    assert found == Answer(text, [], "stop", [])


def test_a_list_of_the_clients_schema_is_no_call() -> None:
    wanted = {"type": "array", "items": {"type": "object"}}
    text = '[{"name": "clock", "arguments": {}}]'
    named = {"type": "json_schema", "json_schema": {"name": "list", "schema": wanted}}
    [found] = Writing(text, form="mistral")(tools=TOOLS, response_format=named)
    assert found == Answer(text, [], "stop", [])


@pytest.mark.parametrize("form", FORMS)
def test_calls_inside_thinking_are_not_calls(form: str) -> None:
    first, second = WRITTEN[form]
    thought = f"<think>\nI may {first} or not.\n</think>\n\n"
    [found] = Writing(thought + second, form=form)(tools=TOOLS)
    assert (found.calls, found.finish) == (CALLS[1:], "tool_calls")
    assert str(found.content).strip() == thought.strip()
    [found] = Writing(thought + "done", form=form)(tools=TOOLS)
    assert found == Answer(thought + "done", [], "stop", [])
    [found] = Writing(f"<think>{first}", form=form)(tools=TOOLS)
    assert found == Answer(f"<think>{first}", [], "stop", [])


@pytest.mark.parametrize("form", FORMS)
def test_thinking_that_the_prompt_has_begun_is_thinking(form: str) -> None:
    first, second = WRITTEN[form]
    [found] = Writing(f"I may {first}</think>\n{second}", form=form, prompt="<assistant><think>\n")(tools=TOOLS)
    assert (found.calls, str(found.content).strip()) == (CALLS[1:], f"I may {first}</think>")
    [found] = Writing(second, form=form, prompt="<think>\n\n</think>\n\n")(tools=TOOLS)
    assert found.calls == CALLS[1:]


@pytest.mark.parametrize("form", FORMS)
def test_the_word_think_inside_a_call_is_an_argument(form: str) -> None:
    text = WRITTEN[form][0].replace("a}b", "<think>")
    [found] = Writing(text, form=form)(tools=TOOLS)
    assert found.calls == [("weather", ARGUMENTS.replace("a}b", "<think>"))]


# --- arguments ----------------------------------------------------------------------------------------------------

RAW = '{"a": 1.10, "b": 9007199254740993.0, "c": 1e400, "d": 1, "d":2,  "e":"\\u00e9é", "f": -0, "g": 1E5}'


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_the_models_own_text(form: str) -> None:
    name = "parameters" if form == "json" else "arguments"
    for arguments, expected in (
        (RAW, RAW),
        ("{}", "{}"),
        ("null", "{}"),
        (json.dumps(RAW), RAW),
        (json.dumps(""), "{}"),
        ('{ "a":[1 ,2] }', '{ "a":[1 ,2] }'),
    ):
        call = f'{{"name": "clock", "{name}": {arguments}}}'
        text = {"hermes": f"<tool_call>{call}</tool_call>", "json": call, "mistral": f"[TOOL_CALLS][{call}]"}[form]
        [found] = Writing(text, form=form)(tools=TOOLS)
        assert found == Answer("", [("clock", expected)], "tool_calls", [])
    [found] = Writing(f"[TOOL_CALLS]clock{RAW}", form="mistral")(tools=TOOLS)
    assert found.calls == [("clock", RAW)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arguments", ["5", "[1]", "true", '"not json"', '"5"', '"[1]"', "1.10"])
def test_arguments_that_are_not_an_object_are_not_given_out_as_a_call(form: str, arguments: str) -> None:
    name = "parameters" if form == "json" else "arguments"
    call = f'{{"name": "clock", "{name}": {arguments}}}'
    text = {"hermes": f"<tool_call>{call}</tool_call>", "json": call, "mistral": f"[TOOL_CALLS][{call}]"}[form]
    [found] = Writing(text, form=form)(tools=TOOLS)
    assert found == Answer(text, [], "stop", [])


# --- schemas of tools ---------------------------------------------------------------------------------------------

CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["Rome"]}},
    "required": ["name"],
    "additionalProperties": False,
}


def referring(reference: str, **parts: Any) -> dict[str, Any]:
    needed = {"type": "object", "properties": {"c": {"$ref": reference}}, "required": ["c"]}
    return {**needed, "additionalProperties": False, **parts}


#: Schemas of arguments, each with an answer that follows it.
REFERRING: dict[str, tuple[dict[str, Any], str]] = {
    "$defs": (referring("#/$defs/City", **{"$defs": {"City": CITY}}), '{"c": {"name": "Rome"}}'),
    "definitions": (referring("#/definitions/City", definitions={"City": CITY}), '{"c": {"name": "Rome"}}'),
    "nested": (
        referring("#/$defs/A", **{"$defs": {"A": {"$ref": "#/$defs/B/$defs/C"}, "B": {"$defs": {"C": CITY}}}}),
        '{"c": {"name": "Rome"}}',
    ),
    "a property": (
        {
            "type": "object",
            "properties": {"a": CITY, "b": {"$ref": "#/properties/a"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        '{"a": {"name": "Rome"}, "b": {"name": "Rome"}}',
    ),
    "itself": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        '{"a": {"a": {}}}',
    ),
    "recursive": (
        referring(
            "#/$defs/List",
            **{
                "$defs": {
                    "List": {
                        "type": "object",
                        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/List"}, {"type": "null"}]}},
                        "required": ["next"],
                        "additionalProperties": False,
                    }
                }
            },
        ),
        '{"c": {"next": {"next": null}}}',
    ),
    "$id": (
        referring("city.json", **{"$id": "https://a.example/root.json", "$defs": {"C": {**CITY, "$id": "city.json"}}}),
        '{"c": {"name": "Rome"}}',
    ),
    "$anchor": (referring("#city", **{"$defs": {"C": {**CITY, "$anchor": "city"}}}), '{"c": {"name": "Rome"}}'),
    "~1": (referring("#/$defs/a~1b", **{"$defs": {"a/b": CITY}}), '{"c": {"name": "Rome"}}'),
    "~0": (referring("#/$defs/a~0b", **{"$defs": {"a~b": CITY}}), '{"c": {"name": "Rome"}}'),
    "percent": (referring("#/$defs/a%20b%25", **{"$defs": {"a b%": CITY}}), '{"c": {"name": "Rome"}}'),
    "a blank": (referring("#/$defs/a b", **{"$defs": {"a b": CITY}}), '{"c": {"name": "Rome"}}'),
    "brackets": (referring("#/$defs/List[int]", **{"$defs": {"List[int]": CITY}}), '{"c": {"name": "Rome"}}'),
    "an umlaut": (referring("#/$defs/Städte", **{"$defs": {"Städte": CITY}}), '{"c": {"name": "Rome"}}'),
    "the root": ({"$ref": "#/$defs/C", "$defs": {"C": CITY}}, '{"name": "Rome"}'),
    "a property $ref": (
        {
            "type": "object",
            "properties": {"$ref": {"enum": ["#/x y"]}},
            "required": ["$ref"],
            "additionalProperties": False,
        },
        '{"$ref": "#/x y"}',
    ),
}


def check(arguments: str, wanted: dict[str, Any]) -> None:
    """Raises: what jsonschema says of arguments that do not follow the client's schema."""
    validating = pytest.importorskip("jsonschema", reason="jsonschema is missing: pip install -e '.[dev]'")
    validating.validate(json.loads(arguments), wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", REFERRING)
def test_references_stay_those_of_the_tools_schema(form: str, case: str) -> None:
    wanted, answer = REFERRING[case]
    check(answer, wanted)
    other = {"type": "object", "properties": {"c": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"const": 1}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": one}}
        for name, one in (("f", wanted), ("g", other))
    ]
    name = "parameters" if form == "json" else "arguments"
    call = f'{{"name": "f", "{name}": {answer}}}'
    text = {"hermes": f"<tool_call>\n{call}\n</tool_call>", "json": call, "mistral": f"[{call}]"}[form]
    choice: Any
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        [found] = Writing(text, form=form)(tools=tools, tool_choice=choice)
        assert found == Answer("", [("f", answer)], "tool_calls", [])
    [found] = Writing("~", form=form)(
        tools=tools, tool_choice={"type": "function", "function": {"name": "f"}}, max_tokens=300
    )
    for _name, arguments in found.calls:
        check(arguments, wanted)


def test_arguments_are_an_object_whatever_the_schema_leaves_open() -> None:
    for open_schema in ({}, None, {"description": "any"}, {"type": ["object", "null"]}):
        tool = {"type": "function", "function": {"name": "f", "parameters": open_schema}}
        [found] = Writing("5", form="json")(tools=[tool], tool_choice="required", max_tokens=200)
        assert [type(json.loads(arguments)) for _name, arguments in found.calls] in ([dict], [])
        assert found.content == ""


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"$ref": "#"}, "no finite value"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite value"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "no finite value"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]}, "/$defs/none"),
        ({"type": "string"}, "expected a schema of an object, got the type 'string'"),
        ({"type": "object", "properties": {"a": {"type": "nonsense"}}, "required": ["a"]}, "nonsense"),
    ],
)
def test_an_error_in_a_tools_schema_names_the_tool(parameters: dict[str, Any], problem: str) -> None:
    tools = [CLOCK, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    [found] = Writing("x")(tools=tools, tool_choice="required")
    assert found.error.startswith("tools[1].function.parameters: ")
    assert problem in found.error
    [found] = Writing('{"colour": "red"}')(tools=tools, response_format=ANSWER)
    assert found.content == '{"colour": "red"}'
