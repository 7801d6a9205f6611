"""A call of a tool as JSON text: read from a model's answer, and from a history. Pure.

Arguments are the model's own text, in which numbers have the digits that it wrote. They are read to be checked only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from stage_runtime.errors import InvalidRequest

_UNREADABLE: Final = (msgspec.DecodeError, UnicodeEncodeError, RecursionError)


class Call(NamedTuple):
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class _Written(msgspec.Struct):
    """A call as models write it. Other keys are skipped."""

    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_WRITTEN: Final = msgspec.json.Decoder(_Written | list[_Written])
_TEXT_OR_OBJECT: Final = msgspec.json.Decoder(str | dict[str, msgspec.Raw] | None)
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def calls_in(body: str) -> list[Call]:
    """The calls of a JSON value. Empty: it is not JSON, or a part of it is not a call whose arguments are an object."""
    try:
        found = _WRITTEN.decode(body)
        return [_call(one) for one in (found if isinstance(found, list) else [found])]
    except _UNREADABLE:
        return []


def named_call(name: str, arguments: str) -> list[Call]:
    """The same as `calls_in`, for a call whose name stands before its arguments."""
    try:
        return [Call(name, _object_text(arguments))]
    except _UNREADABLE:
        return []


def _call(written: _Written) -> Call:
    raw = written.parameters if isinstance(written.arguments, msgspec.UnsetType) else written.arguments
    return Call(written.name, "{}" if isinstance(raw, msgspec.UnsetType) else _object_text(bytes(raw).decode()))


def _object_text(text: str) -> str:
    """The text of an object, which may be JSON inside of a string; of null, that of an empty one.

    Raises: msgspec.DecodeError, UnicodeEncodeError, RecursionError: it is something else.
    """
    found = _TEXT_OR_OBJECT.decode(text)
    if isinstance(found, str):
        text = found.strip() or "{}"
        found = _OBJECT.decode(text)
    return "{}" if found is None else text.strip()


class Arguments(dict[str, Any]):
    """The arguments of an earlier call as templates read them. text: as the model wrote them."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


def arguments_of(given: Any, place: str) -> Arguments:
    """The arguments of an earlier call, as a client sends them.

    Raises: InvalidRequest: they are not JSON object; it names ``place``.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return Arguments({}, "{}")
    if isinstance(given, Mapping):
        return Arguments(given, json.dumps(given, ensure_ascii=False))
    if not isinstance(given, str):
        raise _broken(place, f"a {type(given).__name__}")
    try:
        found = json.loads(given, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise _broken(place, f"{_short(given)} ({error})") from error
    if found is None:
        return Arguments({}, "{}")
    if not isinstance(found, dict):
        raise _broken(place, _short(given))
    return Arguments(found, given.strip())


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON value")


def _broken(place: str, got: str) -> InvalidRequest:
    return InvalidRequest(f"{place}: expected the text of a JSON object, got {got}", param=place)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
