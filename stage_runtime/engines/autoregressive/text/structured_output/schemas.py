"""A client's JSON schemas before a grammar is made of them: references, and what has no finite value. Pure.

`grammars` compiles them. A part that cannot be read here is left as it is: the compiler refuses it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urldefrag, urljoin

T = TypeVar("T")

_URI: Final = "%:/?#[]@!$&'()*+,;=-._~"  # what a URI may hold beside letters and digits
_FRAGMENT: Final = "%:/?@!$&'()*+,;=-._~"
_VALUES: Final = frozenset({"const", "enum", "default", "examples", "example"})  # JSON of the client's, not schemas
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_JOINING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
#: Keywords beside these that say nothing of a value.
_BESIDE: Final = frozenset(
    {
        "$defs",
        "definitions",
        "$schema",
        "$id",
        "$anchor",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
    }
)
_SCHEMA: Final = re.compile(r"%json\s*")
_JSON: Final = json.JSONDecoder()
_PRUNED: Final = ("properties", "patternProperties", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties")


NOTHING: Final = "no finite value follows it: what it requires has no end, or is not allowed"


MOST_JOINED: Final = 12  # patterns of one text: what llguidance does with several doubles with each
MOST_STEPS: Final = 50_000  # of all ``multipleOf``: an automaton has a state for each remainder
_TOO_MANY_STEPS: Final = f"expected multipleOf to be at most {MOST_STEPS} together, without a decimal point"
MOST_ANDS: Final = 8  # as that, in rules
MOST_PLACES: Final = 1 << 15  # of schemas; one of 64 KiB has a few thousand


class Endless(ValueError):
    """No finite value follows the schema: its references require each other for ever."""


def prepared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as the compiler takes it.

    References are written as URIs (``#/$defs/a b`` becomes ``#/$defs/a%20b``). Parts that no finite value follows are
    false, so that an answer cannot enter them.
    Raises: Endless. ValueError: it is too costly to compile. RecursionError: it is nested too deep.
    """
    made: dict[str, Any] = _with_uris(schema)
    found = _Nodes(made)
    _check_costs(found)
    endless = found.endless()
    if id(made) in endless:
        raise Endless(NOTHING)
    if endless:
        for node in found.nodes:
            _prune(node.schema, endless)
    return made


def check_rules(rules: str) -> None:
    """Rules in Lark's form, which may have schemas in them.

    Raises: ValueError, RecursionError: as of `prepared`.
    """
    if rules.count("&") > MOST_ANDS:
        raise ValueError(f"expected at most {MOST_ANDS} times '&' in a grammar")
    for found in _SCHEMA.finditer(rules):
        try:
            schema, _end = _JSON.raw_decode(rules, found.end())
        except ValueError:
            continue  # the compiler refuses it, if it is a schema
        if isinstance(schema, dict):
            _check_costs(_Nodes(_with_uris(schema)))


def _check_costs(found: _Nodes) -> None:
    """Raises: ValueError: llguidance would take too long, or too much memory."""
    if sum(cost for node in found.nodes for cost in _multiples(node.schema)) > MOST_STEPS:
        raise ValueError(_TOO_MANY_STEPS)
    if not any(map(_joins, found.nodes)):
        return
    if max(map(len, found.at_once(_patterns))) > MOST_JOINED:
        raise ValueError(f"expected at most {MOST_JOINED} patterns and formats that may apply to one text")
    if max(map(math.prod, found.at_once(_multiples))) > MOST_STEPS:
        raise ValueError(_TOO_MANY_STEPS)


def _patterns(schema: dict[str, Any]) -> list[str]:
    return [f"{key} {schema[key]}" for key in ("pattern", "format") if isinstance(schema.get(key), str)]


def _multiples(schema: dict[str, Any]) -> list[int]:
    """The number of remainders by which digits are told to make a multiple of what the schema says."""
    given = schema.get("multipleOf")
    if type(given) is not int and not (isinstance(given, float) and math.isfinite(given)):
        return []
    _sign, digits, exponent = Decimal(repr(given)).as_tuple()
    return [int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)]


def object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of a call's arguments, which are an object whatever ``parameters`` leave open.

    Raises: ValueError: they allow no object.
    """
    schema = dict(parameters or {})
    types = schema.get("type", "object")
    allowed = types if isinstance(types, list | tuple) else [types]
    if "object" not in allowed:
        raise ValueError(f"expected a schema of an object, got the type {types!r}")
    return {**schema, "type": "object"}


def declares(schema: str, names: Sequence[str]) -> bool:
    """Whether an object in a schema, as JSON, has properties of all these names."""
    return any(set(names) <= properties.keys() for properties in _properties(json.loads(schema)))


def _properties(schema: Any) -> Iterator[dict[str, Any]]:
    stack = [schema]
    while stack:
        match stack.pop():
            case dict() as one:
                if isinstance(one.get("properties"), dict):
                    yield one["properties"]
                stack += one.values()
            case list() as several:
                stack += several


def _with_uris(value: Any, *, schema: bool = True) -> Any:
    """A copy in which each ``$ref`` is a URI. schema: whether ``value`` is one, or properties by name."""
    match value:
        case Mapping():
            return {key: _member(key, one, schema) for key, one in value.items()}
        case list() | tuple():
            return [_with_uris(one) for one in value]
        case _:
            return value


def _member(key: str, value: Any, schema: bool) -> Any:
    if schema and key in _VALUES:
        return value
    if schema and key == "$ref" and isinstance(value, str):
        base, mark, fragment = value.partition("#")
        return quote(base, safe=_URI) + mark + quote(fragment, safe=_FRAGMENT)
    return _with_uris(value, schema=not (schema and key in _NAMED))


class _Node(NamedTuple):
    schema: dict[str, Any]
    base: str  #: The URI against which its references are read.


class _Goal:
    """A schema, or a part of what it asks for, that is to have a value. Each part that gets one is counted once."""

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing  #: Values; 0 or fewer: it has one itself.
        self._waiting: list[_Goal] = []

    def needs_all(self, parts: Iterable[_Goal | None]) -> _Goal:
        """parts: None: one that has a value."""
        for part in parts:
            if part is not None:
                part._waiting.append(self)
                self.missing += 1
        return self

    def needs_one(self, parts: Sequence[_Goal | None]) -> None:
        """Any of the parts."""
        if None not in parts:
            one = _Goal(1)
            for part in filter(None, parts):
                part._waiting.append(one)
            self.needs_all([one])

    def reached(self) -> Iterator[_Goal]:
        """The goals that have a value by this one's."""
        for goal in self._waiting:
            goal.missing -= 1
            if goal.missing == 0:
                yield goal


def _reach(goals: list[_Goal]) -> None:
    while goals:
        goals.extend(goals.pop().reached())


class _Nodes:
    """All schemas inside of one, and which of them no finite value follows."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.nodes: list[_Node] = []
        self._resources: dict[str, Any] = {"": root}  #: Resources by URI.
        self._anchors: dict[str, dict[str, Any]] = {}  #: Anchors by URI with its fragment.
        self._base: dict[int, str] = {}
        self._collect(root, "")
        for node in self.nodes:  # it grows: a reference may lead where no schema is expected
            if isinstance(reference := node.schema.get("$ref"), str):
                self._target(reference, node.base)

    def _collect(self, schema: Any, base: str) -> None:
        if not isinstance(schema, dict) or id(schema) in self._base:
            return
        name = schema.get("$id")
        if isinstance(name, str):
            if name.startswith("#"):  # an anchor, before draft 2019
                self._anchors[base + name] = schema
            else:
                base = urldefrag(urljoin(base, name)).url
                self._resources.setdefault(base, schema)
        if isinstance(anchor := schema.get("$anchor"), str):
            self._anchors[f"{base}#{anchor}"] = schema
        self._base[id(schema)] = base
        self.nodes.append(_Node(schema, base))
        for child in _children(schema):
            self._collect(child, base)

    def endless(self) -> set[int]:
        """Ids of the schemas that no finite value follows: all but those that are found to have one, inside out."""
        goals = {id(node.schema): _Goal() for node in self.nodes}

        def goal_of(child: Any) -> _Goal | None:
            """None: a value follows it for certain, as far as is known here."""
            return _Goal(1) if child is False else goals.get(id(child)) if isinstance(child, dict) else None

        for node in self.nodes:
            schema, goal = node.schema, goals[id(node.schema)]
            target = [self._target(schema["$ref"], node.base)] if isinstance(schema.get("$ref"), str) else []
            goal.needs_all(map(goal_of, [*target, *_list(schema.get("allOf"))]))
            for several in filter(None, (_list(schema.get("anyOf")), _list(schema.get("oneOf")))):
                goal.needs_one([goal_of(child) for child in several])
            if ways := [_Goal().needs_all(map(goal_of, way)) for way in _ways(schema)]:
                goal.needs_one([way if way.missing else None for way in ways])
        _reach([goal for goal in goals.values() if not goal.missing])
        return {number for number, goal in goals.items() if goal.missing}

    def at_once(self, facts: Callable[[dict[str, Any]], Iterable[T]]) -> Iterator[set[T]]:
        """The facts of all schemas that may apply to one value at once, of each value that can be told apart: by the
        property that it is, so that alternatives for one property count together.

        Raises: ValueError: there are too many.
        """
        bases = {id(node.schema): node.base for node in self.nodes}
        found: dict[str | None, set[T]] = {}
        seen = set[tuple[int, str | None]]()
        places: list[tuple[Any, str | None]] = [(self.nodes[0].schema, "")]
        while places:
            schema, name = places.pop()
            if not isinstance(schema, dict) or id(schema) not in bases or (id(schema), name) in seen:
                continue
            seen.add((id(schema), name))
            if len(seen) > MOST_PLACES:
                raise ValueError("its schemas refer to each other too often")
            found.setdefault(name, set()).update(facts(schema))
            if isinstance(reference := schema.get("$ref"), str):
                places.append((self._target(reference, bases[id(schema)]), name))
            places += _places(schema, name)
        anywhere = found.get(None, set[T]())
        return (some | anywhere for some in found.values())

    def _target(self, reference: str, base: str) -> Any:
        """The schema that is referred to; True, which anything follows, where it is not found."""
        place, _mark, fragment = urljoin(base, reference).partition("#")
        if reference.startswith("#"):
            place, fragment = base, reference[1:]
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(f"{place}#{fragment}", True)
        value = self._resources.get(place, True)
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = value[int(name)] if name.isdecimal() and int(name) < len(value) else True
            else:
                value = value.get(name, True) if isinstance(value, dict) else True
        self._collect(value, place)
        return value


def _joins(node: _Node) -> bool:
    """Whether a value follows several schemas at once there."""
    schema, keys = node.schema, node.schema.keys()
    several = len(_list(schema.get("allOf"))) > 1
    return several or bool(keys & _JOINING and keys - _BESIDE - {next(iter(keys & _JOINING))})


def _places(schema: dict[str, Any], name: str | None) -> Iterator[tuple[Any, str | None]]:
    """The schemas inside of one, and the properties that their values are: ``name`` itself, items of any list (empty),
    or any property (None).
    """
    for key in ("allOf", "anyOf", "oneOf"):
        yield from ((one, name) for one in _list(schema.get(key)))
    properties = schema.get("properties")
    if isinstance(properties, dict):
        yield from ((one, key) for key, one in properties.items())
    further = schema.get("patternProperties")
    yield from ((one, None) for one in (further.values() if isinstance(further, dict) else ()))
    yield schema.get("additionalProperties"), None
    for one in (schema.get("items"), *_list(schema.get("prefixItems")), *_list(schema.get("items"))):
        yield one, ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _children(schema: dict[str, Any]) -> Iterator[Any]:
    for name in _NAMED:
        named = schema.get(name)
        if isinstance(named, dict):
            yield from named.values()
    for name in _LISTED:
        yield from _list(schema.get(name))
    for name in _SINGLE:
        one = schema.get(name)
        yield from one if isinstance(one, list) else [one]


def _ways(schema: dict[str, Any]) -> Iterator[list[Any]]:
    """The schemas of which a value needs values, one list for each type that it may have."""
    types = schema.get("type")
    if types is None or "const" in schema or "enum" in schema:
        return
    kinds = types if isinstance(types, list) else [types]
    if "object" in kinds:
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        yield [known[name] for name in required if name in known]
    if "array" in kinds:
        least = schema.get("minItems")
        items = schema.get("items")
        first = _list(schema.get("prefixItems")) or _list(items)
        count = least if isinstance(least, int) else 0
        more = [items] if count > len(first) and isinstance(items, dict) else []
        yield first[:count] + more
    if any(one not in ("object", "array") for one in kinds):
        yield []


def _prune(schema: dict[str, Any], endless: set[int]) -> None:
    for name in _PRUNED:
        match schema.get(name):
            case dict() as one if name in ("items", "additionalProperties"):
                schema[name] = False if id(one) in endless else one
            case dict() as named:
                schema[name] = {key: False if id(one) in endless else one for key, one in named.items()}
            case list() as several:
                schema[name] = [False if id(one) in endless else one for one in several]
