"""The canonical form of values, for comparing and hashing.

Here: `canonical` (a value as it comes back from JSON and a Go API server: 1.0 becomes 1, tuples become lists, keys are
sorted), the bounds of what may be walked (`check_bounds`), `without_nulls`, paths, encoding and hashing. Not here: what
else is refused (`shapes`). Called by `shapes`, `topology`, `loading` and `planning`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from omnipipeline_spec.types.errors import quoted
from omnipipeline_spec.types.values import fields_of, is_ours, to_document

INT_BOUND = 1 << 63  # the API server stores integers in 64 bits
MAX_LEVELS = 128  # of nested lists and maps; each costs a reader of YAML five calls on the stack
MAX_VALUES = 200_000  # of one pipeline: a value that is in many places counts each time
POINTLESS_BOUND = 1e21  # below it Go prints an integral float without an exponent; JSON reads an integer


Steps = tuple[Any, str | int] | None  #: Way from a value to one inside it, innermost step first; text for faults only.


class NotCanonical(ValueError):
    """A value that no resource can hold. ``place`` is its path inside the given value."""

    def __init__(self, place: str, message: str) -> None:
        self.place = place
        self.message = message
        super().__init__(f"{place}: {message}" if place else message)


def canonical(value: Any, place: str = "") -> Any:
    """The value as it comes back from the API server.

    Raises: NotCanonical: an integer beyond 64 bits, NaN, infinity, half of a surrogate pair, a key that is not a
        string, more than `MAX_LEVELS` levels, any other type.
    """
    return _canonical(value, place, None, 1)


def _canonical(value: Any, place: str, steps: Steps, level: int) -> Any:
    match value:
        case None | bool():
            return value
        case str():
            return _text(value, place, steps)
        case int():
            return _integer(value, place, steps)
        case float():
            return _number(value, place, steps)
    if level > MAX_LEVELS:
        raise _too_deep(place, steps)
    match value:
        case list() | tuple():
            return [_canonical(item, place, (steps, index), level + 1) for index, item in enumerate(value)]
        case Mapping():
            plain = {_key(key, place, steps): item for key, item in value.items()}
            return {key: _canonical(plain[key], place, (steps, key), level + 1) for key in sorted(plain)}  # as in Go
    raise _no_json(value, place, steps)


def check_bounds(value: Any) -> None:
    """Refuse what may not be walked: call it before anything else is done with a value that Python code made.

    Raises: NotCanonical: more than `MAX_LEVELS` levels, or a list or map that contains itself; more than `MAX_VALUES`
        values; a Struct that is not of the contract.
    """
    left = MAX_VALUES

    def walk(value: Any, steps: Steps, level: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise NotCanonical(_path("", steps), f"the pipeline has more than {MAX_VALUES} values up to here")
        if level > MAX_LEVELS:
            raise _too_deep("", steps)
        for step, child in _children(value, steps):
            walk(child, (steps, step), level + 1)

    walk(value, None, 1)


def _children(value: Any, steps: Steps) -> Iterator[tuple[str | int, Any]]:
    match value:
        case msgspec.Struct() if not is_ours(type(value)):
            raise _no_json(value, "", steps)
        case msgspec.Struct():
            yield from ((field.encode_name, getattr(value, field.name)) for field in fields_of(is_ours(type(value))))
        case list() | tuple():
            yield from enumerate(value)
        case Mapping():
            yield from ((key if isinstance(key, str) else quoted(key), item) for key, item in value.items())


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


# A subclass (an enum's member, a scalar of numpy) gives its plain value, without a call of what it defines.


def _text(value: str, place: str, steps: Steps) -> str:
    if has_surrogate(value):
        raise NotCanonical(_path(place, steps), f"{value[:40]!a} contains half of a surrogate pair")
    return str.__str__(value)


def _number(value: float, place: str, steps: Steps) -> int | float:
    number = float.__float__(value)
    if not math.isfinite(number):
        raise NotCanonical(_path(place, steps), f"{number} cannot be represented in JSON")
    if not number.is_integer() or abs(number) >= POINTLESS_BOUND:
        return number
    return _integer(int(number), place, steps)


def _integer(value: int, place: str, steps: Steps) -> int:
    number = int.__int__(value)
    if not -INT_BOUND <= number < INT_BOUND:
        raise NotCanonical(_path(place, steps), f"{quoted(number)} is beyond 64 bits; write it as a string")
    return number


def _key(key: Any, place: str, steps: Steps) -> str:
    if not isinstance(key, str):
        message = f"the key {quoted(key)} is of type {type(key).__name__}; keys are strings"
        raise NotCanonical(_path(place, steps), message)
    if has_surrogate(key):
        raise NotCanonical(_path(place, steps), f"the key {key[:40]!a} contains half of a surrogate pair")
    return str.__str__(key)


def has_surrogate(text: str) -> bool:
    """Whether a text contains half of a surrogate pair, which neither files nor JSON can hold."""
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def _no_json(value: Any, place: str, steps: Steps) -> NotCanonical:
    kind = type(value).__name__
    return NotCanonical(_path(place, steps), f"{quoted(value)} is of type {kind}; a spec holds JSON values only")


def _too_deep(place: str, steps: Steps) -> NotCanonical:
    return NotCanonical(_path(place, steps), f"is nested deeper than {MAX_LEVELS} levels, or contains itself")


def _path(place: str, steps: Steps) -> str:
    way: list[str | int] = []
    while steps is not None:
        steps, step = steps
        way.append(step)
    for step in reversed(way):
        place = f"{place}[{step}]" if isinstance(step, int) else join(place, step)
    return place
