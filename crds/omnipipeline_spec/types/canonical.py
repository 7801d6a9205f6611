"""The canonical form of values, for comparing and hashing.

Here: `canonical` (a value as it comes back from JSON and a Go API server: 1.0 becomes 1, tuples become lists, keys are
sorted), `without_nulls`, paths, encoding and hashing. Not here: which values are refused (`shapes`). Called by
`shapes` and `planning`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from omnipipeline_spec.types.values import to_document

INT_BOUND = 1 << 63  # the API server stores integers in 64 bits
MAX_LEVELS = 128  # of nested lists and maps; each costs a reader of YAML five calls on the stack
POINTLESS_BOUND = 1e21  # below it Go prints an integral float without an exponent; JSON reads an integer


class NotCanonical(ValueError):
    """A value that no resource can hold. ``place`` is its path inside the given value."""

    def __init__(self, place: str, message: str) -> None:
        self.place = place
        self.message = message
        super().__init__(f"{place}: {message}" if place else message)


def canonical(value: Any, place: str = "") -> Any:
    """The value as it comes back from the API server.

    Raises: NotCanonical: an integer beyond 64 bits, NaN, infinity, a key that is not a string, any other type.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return _integer(value, place)
        case float():
            return _number(value, place)
        case list() | tuple():
            return [canonical(item, f"{place}[{index}]") for index, item in enumerate(value)]
        case Mapping():
            keys = sorted(_key(key, place) for key in value)  # as Go writes a map
            return {key: canonical(value[key], join(place, key)) for key in keys}
    raise NotCanonical(place, f"{value!r} is of type {type(value).__name__}; a spec holds JSON values only")


def without_nulls(value: Any) -> Any:
    """A YAML document without null entries of maps, at every depth.

    `kubectl apply` drops null entries; create and server-side apply keep them. Here null means unset in every field.
    """
    match value:
        case Mapping():
            return {key: without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [without_nulls(item) for item in value]
    return value


def join(place: str, key: str) -> str:
    """A path extended by a key. Keys of other characters than letters, digits, - and _ are quoted."""
    plain = key.replace("_", "").replace("-", "").isalnum()
    step = key if plain else f"[{key!r}]"
    return f"{place}.{step}" if place and plain else f"{place}{step}"


def encode(value: Any) -> bytes:
    """JSON of a value; the bytes do not depend on the order of map keys.

    Fields that equal their default are left out, so a field that a later version adds changes no revision. (msgspec's
    own ``omit_defaults`` compares by identity: it would encode a computed number and omit an equal decoded one.)
    """
    return msgspec.json.encode(canonical(to_document(value)), order="sorted")


def short_hash(value: Any) -> str:
    """8 hex digits over the canonical bytes: a revision."""
    return hashlib.sha256(encode(value)).hexdigest()[:8]


def _number(value: float, place: str) -> int | float:
    if not math.isfinite(value):
        raise NotCanonical(place, f"{value} cannot be represented in JSON")
    if not value.is_integer() or abs(value) >= POINTLESS_BOUND:
        return value
    return _integer(int(value), place)


def _integer(value: int, place: str) -> int:
    if not -INT_BOUND <= value < INT_BOUND:
        raise NotCanonical(place, f"{value} is beyond 64 bits; write it as a string")
    return value


def _key(key: Any, place: str) -> str:
    if not isinstance(key, str):
        raise NotCanonical(place, f"the key {key!r} is of type {type(key).__name__}; keys are strings")
    return key
