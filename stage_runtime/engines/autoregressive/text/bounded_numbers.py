"""Bounds for numbers of a JSON schema that has none: a small model may write digits until its answer is cut. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MOST_DIGITS: Final = 15  #: Before a point: what every reader of JSON keeps exactly.
MOST_DECIMALS: Final = 9  #: After it: more is too much for llguidance's multiples beside a number of 15 digits.
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTED: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE: Final = frozenset({"items", "additionalProperties", "if", "then", "else", "contains"})
_LOW: Final = ("minimum", "exclusiveMinimum")
_HIGH: Final = ("maximum", "exclusiveMaximum")

#: Any object, as of the ``response_format`` ``json_object``, whose numbers can be bounded.
ANY_OBJECT: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": {"$ref": "#/$defs/value"},
    "$defs": {
        "value": {
            "anyOf": [
                {"type": ["string", "boolean", "null"]},
                {"type": "number"},
                {"type": "array", "items": {"$ref": "#/$defs/value"}},
                {"type": "object", "additionalProperties": {"$ref": "#/$defs/value"}},
            ]
        }
    },
}


def bounded(schema: Any, digits: int | None = MOST_DIGITS) -> Any:
    """The schema, in which integers and numbers have at most so many digits where it sets no bound itself.

    digits: before a point; None: the schema as it is. What is not of the form of a schema is left as it is: the
    compiler refuses it. Raises: RecursionError: it is nested too deep.
    """
    if digits is None or not isinstance(schema, Mapping):
        return schema
    made = {key: _inside(key, value, digits) for key, value in schema.items()}
    kinds = made.get("type")
    named = kinds if isinstance(kinds, list | tuple) else [kinds]
    if "const" in made or "enum" in made or not {"integer", "number"} & {one for one in named if isinstance(one, str)}:
        return made
    return {**made, **_bounds(made, named, digits)}


def _inside(key: str, value: Any, digits: int) -> Any:
    if key in _NAMED and isinstance(value, Mapping):
        return {name: bounded(one, digits) for name, one in value.items()}
    if key in _LISTED and isinstance(value, list | tuple):
        return [bounded(one, digits) for one in value]
    if key in _SINGLE:
        return bounded(value, digits)
    return value


def _bounds(schema: Mapping[str, Any], kinds: Any, digits: int) -> dict[str, Any]:
    """What the schema lacks. Nothing where it has a bound beyond ours: both could exclude each other."""
    most = 10**digits - 1
    given = [schema[name] for name in (*_LOW, *_HIGH) if name in schema]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and abs(one) <= most for one in given):
        return {}
    found: dict[str, Any] = {}
    if not any(name in schema for name in _LOW):
        found["minimum"] = -most
    if not any(name in schema for name in _HIGH):
        found["maximum"] = most
    if "number" in kinds and "multipleOf" not in schema and not _is_narrow(schema):
        found["multipleOf"] = 10.0**-MOST_DECIMALS
    return found


def _is_narrow(schema: Mapping[str, Any]) -> bool:
    """Whether its bounds need more decimals than ours, or leave less room than a step."""
    given = [schema[name] for name in (*_LOW, *_HIGH) if name in schema]
    return any(one != round(one, MOST_DECIMALS) for one in given)
