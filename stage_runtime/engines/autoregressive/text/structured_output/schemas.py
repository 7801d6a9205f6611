"""A client's JSON schemas before a grammar is made of them: references, and what has no finite value. Pure.

`grammars` compiles them. A part that cannot be read here is left as it is: the compiler refuses it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin

_URI: Final = "%:/?#[]@!$&'()*+,;=-._~"  # what a URI may hold beside letters and digits
_FRAGMENT: Final = "%:/?@!$&'()*+,;=-._~"
_VALUES: Final = frozenset({"const", "enum", "default", "examples", "example"})  # JSON of the client's, not schemas
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_PRUNED: Final = ("properties", "patternProperties", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties")


NOTHING: Final = "no finite value follows it: what it requires has no end, or is not allowed"


class Endless(ValueError):
    """No finite value follows the schema: its references require each other for ever."""


def prepared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as the compiler takes it.

    References are written as URIs (``#/$defs/a b`` becomes ``#/$defs/a%20b``). Parts that no finite value follows are
    false, so that an answer cannot enter them.
    Raises: Endless. RecursionError: it is nested too deep.
    """
    made: dict[str, Any] = _with_uris(schema)
    found = _Nodes(made)
    endless = found.endless()
    if id(made) in endless:
        raise Endless(NOTHING)
    if endless:
        for node in found.nodes:
            _prune(node.schema, endless)
    return made


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
        waiting: dict[int, list[_Node]] = defaultdict(list)  #: Nodes by the schema whose value is missing.
        found: set[int] = set()
        todo = list(reversed(self.nodes))
        while todo:
            node = todo.pop()
            if id(node.schema) in found:
                continue
            missing = self._missing(node, found)
            if missing is None:
                found.add(id(node.schema))
                todo += waiting.pop(id(node.schema), ())
            else:
                for one in missing:
                    waiting[one].append(node)
        return {id(node.schema) for node in self.nodes} - found

    def _missing(self, node: _Node, found: set[int]) -> list[int] | None:
        """The schemas for one of whose values the node waits. None: it has a value."""
        schema = node.schema

        def lacks(child: Any) -> bool:
            return child is False or (isinstance(child, dict) and id(child) in self._base and id(child) not in found)

        needed = [self._target(schema["$ref"], node.base)] if isinstance(schema.get("$ref"), str) else []
        needed += _list(schema.get("allOf"))
        for child in needed:
            if lacks(child):
                return [id(child)]
        for name in ("anyOf", "oneOf"):
            several = _list(schema.get(name))
            if several and all(map(lacks, several)):
                return [id(one) for one in several]
        stuck = [[child for child in way if lacks(child)] for way in _ways(schema)]
        if stuck and all(stuck):
            return [id(lacking[0]) for lacking in stuck]
        return None

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
    for one in types if isinstance(types, list) else [types]:
        match one:
            case "object":
                properties = schema.get("properties")
                known = properties if isinstance(properties, dict) else {}
                required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
                yield [known[name] for name in required if name in known]
            case "array":
                least = schema.get("minItems")
                items = schema.get("items")
                first = _list(schema.get("prefixItems")) or _list(items)
                count = least if isinstance(least, int) else 0
                more = [items] if count > len(first) and isinstance(items, dict) else []
                yield first[:count] + more
            case _:
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
