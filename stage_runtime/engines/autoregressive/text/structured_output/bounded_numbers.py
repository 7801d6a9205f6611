"""Bounds for numbers of a JSON schema that has none: a small model may write digits until its answer is cut. Pure.

A schema leaves values open, too: of ``{}``, of an object's further properties, of a list's items. There any value may
stand, whose numbers have these bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MOST_DIGITS: Final = 15  #: Digits before a point: what every reader of JSON keeps exactly.
MOST_DECIMALS: Final = 9  #: Digits after it: more is too much for llguidance's multiples beside a number of 15 digits.
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTED: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE: Final = frozenset({"items", "additionalProperties", "if", "then", "else", "contains"})
_LOW: Final = ("minimum", "exclusiveMinimum")
_HIGH: Final = ("maximum", "exclusiveMaximum")

_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"}
)
#: Keywords with which the schema of one value is made of several, or has a place of its own for references.
_MERGING: Final = frozenset({"allOf", "if", "not", "$id", "$dynamicRef", "$recursiveRef", "dependentSchemas"})
_CHOOSING: Final = frozenset({"anyOf", "oneOf"})
_OPEN: Final = "any-value-of-the-server"  #: The name of its definition.

_ANY: Final[dict[str, Any]] = {"$ref": f"#/$defs/{_OPEN}"}
_VALUE: Final[list[dict[str, Any]]] = [
    {"type": ["string", "boolean", "null"]},
    {"type": "number"},
    {"type": "array", "items": _ANY},
    {"type": "object", "additionalProperties": _ANY},
]


def bounded(schema: Any, digits: int | None = MOST_DIGITS) -> Any:
    """The schema, in which integers and numbers have at most so many digits where it sets no bound itself.

    digits: before a point; None: the schema as it is. A part that is not of the form of a schema is left as it is: the
    compiler refuses it. Raises: RecursionError: it is nested too deep.
    """
    if digits is None or not isinstance(schema, Mapping):
        return schema
    definitions = schema.get("$defs", {})
    if not isinstance(definitions, Mapping) or _OPEN in definitions or _merges(schema):
        return _closed(schema, digits)
    made = _closed(_opened(schema), digits)
    if not _refers(made):
        return made
    value = _closed({"anyOf": _VALUE}, digits)
    return {**made, "$defs": {**made.get("$defs", {}), _OPEN: value}}


def _merges(schema: Any) -> bool:
    """Whether a value follows several schemas at once somewhere: a compiler may not join them with any value's."""
    if isinstance(schema, list | tuple):
        return any(map(_merges, schema))
    if not isinstance(schema, Mapping):
        return False
    keys = set(schema)
    if keys & _MERGING or (keys & _CHOOSING and keys - _CHOOSING - _ANNOTATIONS - {"$defs", "definitions"}):
        return True
    return any(map(_merges, schema.values()))


def _opened(schema: Any) -> Any:
    """The schema in which a value that may be any refers to `_OPEN`."""
    if schema is True:
        return _ANY
    if not isinstance(schema, Mapping):
        return schema
    if not set(schema) - _ANNOTATIONS - {"$defs", "definitions"}:
        return {**schema, **_ANY}
    made = {key: _opened_inside(key, value) for key, value in schema.items()}
    if set(schema) & {"$ref", "const", "enum"}:
        return made
    kinds = schema.get("type")
    named = kinds if isinstance(kinds, list | tuple) else [kinds]
    if "object" in named and "unevaluatedProperties" not in schema:
        made.setdefault("additionalProperties", _ANY)
    if "array" in named and not isinstance(schema.get("items"), list | tuple) and "unevaluatedItems" not in schema:
        made.setdefault("items", _ANY)
    return made


def _opened_inside(key: str, value: Any) -> Any:
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _opened(one) for name, one in value.items()}
    if key in _LISTED and isinstance(value, list | tuple):
        return [_opened(one) for one in value]
    if key in _SINGLE:
        return [_opened(one) for one in value] if isinstance(value, list | tuple) else _opened(value)
    return value


def _refers(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return schema.get("$ref") == _ANY["$ref"] or any(map(_refers, schema.values()))
    return isinstance(schema, list | tuple) and any(map(_refers, schema))


def _closed(schema: Any, digits: int) -> Any:
    """Each number with bounds."""
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _inside(key, value, digits) for key, value in schema.items()}
    kinds = made.get("type")
    named = kinds if isinstance(kinds, list | tuple) else [kinds]
    if "const" in made or "enum" in made or not {"integer", "number"} & {one for one in named if isinstance(one, str)}:
        return made
    return {**made, **_bounds(made, named, digits)}


def _inside(key: str, value: Any, digits: int) -> Any:
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _closed(one, digits) for name, one in value.items()}
    if key in _LISTED and isinstance(value, list | tuple):
        return [_closed(one, digits) for one in value]
    if key in _SINGLE:
        return [_closed(one, digits) for one in value] if isinstance(value, list | tuple) else _closed(value, digits)
    return value


def _bounds(schema: Mapping[str, Any], kinds: Any, digits: int) -> dict[str, Any]:
    """The bounds that the schema lacks. Nothing where it has a bound beyond ours: both could exclude each other."""
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
