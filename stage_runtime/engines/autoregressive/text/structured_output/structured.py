"""The form of an answer that a request asks for: ``response_format`` as OpenAI's, ``structured_outputs`` as vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from stage_runtime.engines.autoregressive.text.structured_output import schemas
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import ANY_OBJECT, MOST, Grammar
from stage_runtime.errors import InvalidRequest

_FORMS: Final = ("json", "regex", "choice", "grammar", "json_object")
_MOST_CHOICES: Final = 4096


def wanted(params: Mapping[str, Any]) -> Grammar | None:
    """None: any text will do. Raises: InvalidRequest: names the place."""
    schema = _response_format(params.get("response_format"))
    found = _structured(params.get("structured_outputs"))
    if schema is not None and found is not None:
        problem = "response_format asks for a form of the answer, too"
        raise InvalidRequest(f"structured_outputs: {problem}", param="structured_outputs")
    return found if schema is None else Grammar("json_schema", schema)


def _response_format(given: Any) -> str | None:
    """The schema of ``response_format``."""
    if given is None or given == {"type": "text"}:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format.type must be 'text', 'json_object' or 'json_schema'", param="response_format"
        )
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequest("response_format.json_schema.schema: required", param="response_format")
    return _dumped(schema, "response_format")


def _structured(given: Any) -> Grammar | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequest("structured_outputs: expected an object", param="structured_outputs")
    for name in given:
        if name not in _FORMS and given[name] not in (None, False):
            there = ", ".join(_FORMS)
            raise InvalidRequest(
                f"structured_outputs.{name}: not known here; there are {there}", param=f"structured_outputs.{name}"
            )
    forms = [name for name in _FORMS if given.get(name) is not None and given[name] is not False]
    if not forms:
        return None
    if len(forms) > 1:
        problem = f"expected one of {', '.join(_FORMS)}, got {' and '.join(forms)}"
        raise InvalidRequest(f"structured_outputs: {problem}", param="structured_outputs")
    [form] = forms
    return _of_form(form, given[form], f"structured_outputs.{form}")


def _of_form(form: str, value: Any, place: str) -> Grammar:
    match form:
        case "json" if isinstance(value, str | Mapping):
            return Grammar("json_schema", _schema(value, place), place)
        case "json_object" if value is True:
            return Grammar("json_schema", ANY_OBJECT, place)
        case "regex" if isinstance(value, str) and value:
            return Grammar("regex", value, place)
        case "grammar" if isinstance(value, str) and value.strip():
            return Grammar("lark", _rules(value, place), place)
        case "choice" if isinstance(value, list | tuple) and 0 < len(value) <= _MOST_CHOICES:
            if all(isinstance(one, str) and one for one in value):
                texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in dict.fromkeys(value))
                return Grammar("lark", f"start: {texts}", place)
    expected = {
        "json": "a JSON schema",
        "json_object": "true or false",
        "regex": "a regular expression",
        "grammar": "a grammar, as a text",
        "choice": f"a list of 1 to {_MOST_CHOICES} texts that are not empty",
    }
    raise InvalidRequest(f"{place}: expected {expected[form]}, got {type(value).__name__}", param=place)


def _schema(value: str | Mapping[str, Any], place: str) -> str:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place}: not JSON: {error}", param=place) from error
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{place}: expected an object, got {type(schema).__name__}", param=place)
    return _dumped(schema, place)


def _dumped(schema: Mapping[str, Any], place: str) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place}: not JSON: {error}", param=place) from error


def _rules(text: str, place: str) -> str:
    """Rules in Lark's form: those in GBNF's (``root ::= …``) are translated. Raises: InvalidRequest."""
    if len(text) > MOST:  # it is refused where it is compiled
        return text
    rules = _translated(text, place)
    try:
        schemas.check_rules(rules)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place}: {error}", param=place) from error
    return rules


def _translated(text: str, place: str) -> str:
    if "::=" not in text:
        return text
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        return text  # it is refused where it is compiled
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:
        raise InvalidRequest(f"{place}: {error}", param=place) from error
