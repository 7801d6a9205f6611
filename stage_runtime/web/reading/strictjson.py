"""Checks of a client's JSON that msgspec lacks: duplicate keys, too many values, too many levels. Pure.

A duplicate key means one thing to a proxy that checks and another one here. Millions of empty lists in a few
mebibytes cost the loop a second for everybody. Numbers, text and syntax are msgspec's; called by `schemas`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from stage_runtime.errors import InvalidRequest

Decoded = TypeVar("Decoded")

MAX_VALUES: Final = 1 << 17  # checking, decoding and sending so many takes about 0.1 s
SMALL: Final = 64 << 10  # bytes that cannot hold so many values
_LONG: Final = 256  # bytes of a string that is not looked into again
_QUOTES: Final = 4 * MAX_VALUES  # of so many keys and strings
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def decode(raw: bytes, decoder: msgspec.json.Decoder[Decoded]) -> Decoded:
    """A body as ``decoder`` reads it, and nothing that others would read otherwise.

    Raises: InvalidRequest: no JSON, or one of the above. msgspec.ValidationError: not of the decoder's type.
    """
    (skeleton,) = _skeletons([raw], "the body")
    return _decoded(raw, skeleton, decoder, "the body", None)


def decode_fields(fields: Mapping[str, bytes], decoder: msgspec.json.Decoder[Decoded]) -> dict[str, Decoded]:
    """The fields of a form, each a JSON of its own. They have together as many values as one body.

    Raises: as `decode`.
    """
    skeletons = _skeletons(list(fields.values()), "the form")
    both = zip(fields.items(), skeletons, strict=True)
    return {name: _decoded(raw, skeleton, decoder, name, name) for (name, raw), skeleton in both}


def _skeletons(raws: list[bytes], where: str) -> list[bytes]:
    """The skeletons that `_CHECK` reads.

    Raises: InvalidRequest: they have too many values together.
    """
    if sum(map(len, raws)) <= SMALL:
        return raws
    if sum(raw.count(b'"') for raw in raws) > _QUOTES:
        raise _too_many(where)
    skeletons = [_skeleton(raw) for raw in raws]
    if _have_too_many(skeletons):
        raise _too_many(where)
    return skeletons


def _decoded(
    raw: bytes, skeleton: bytes, decoder: msgspec.json.Decoder[Decoded], where: str, param: str | None
) -> Decoded:
    try:
        decoded = decoder.decode(raw)
        _CHECK.decode(skeleton.decode())
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "; \\u escapes of surrogates come in pairs" if _SURROGATE.search(raw) else ""
        raise InvalidRequest(f"{where} is not JSON: {error}{hint}", param=param) from None
    except RecursionError:
        raise InvalidRequest(f"{where} is nested too deeply", param=param) from None
    except _KeyTwice:
        _refuse_key(skeleton, where, param)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON: {error.msg}", param=param) from None
    return decoded


def _skeleton(raw: bytes) -> bytes:
    """The same JSON with its long strings emptied: media as base64 is most of what a large body has."""
    pieces: list[bytes] = []
    begun = 0
    opening = raw.find(b'"')
    while opening >= 0:
        closing = _closing_quote(raw, opening + 1)
        if closing < 0:  # it is not JSON: without what follows, in which each quote would be tried as a string's begin
            return b"".join([*pieces, raw[begun:opening]])
        if closing - opening > _LONG:
            pieces.append(raw[begun : opening + 1])
            begun = closing
        opening = raw.find(b'"', closing + 1)
    pieces.append(raw[begun:])
    return b"".join(pieces)


def _closing_quote(raw: bytes, start: int) -> int:
    """The place where the string ends that begins at ``start``; -1: nowhere."""
    while True:
        quote = raw.find(b'"', start)
        if quote < 0:
            return -1
        before = raw[start:quote]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:  # pairs of backslashes escape each other, not the quote
            return quote
        start = quote + 1


def _too_many(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} has more than {MAX_VALUES} values: send tensors and media as files of a form")


def _have_too_many(skeletons: list[bytes]) -> bool:
    if sum(map(_values, skeletons)) <= MAX_VALUES:
        return False
    # a comma in a text separates no values
    return sum(_values(_STRING.sub(b'""', each)) for each in skeletons) > MAX_VALUES


def _values(text: bytes) -> int:
    """An upper bound of the values in a JSON text: each follows a comma or an opening bracket."""
    empty = text.count(b"[]") + text.count(b"{}")
    return 1 + text.count(b",") + text.count(b"[") + text.count(b"{") - empty


class _KeyTwice(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _KeyTwice
    return made


#: Numbers are msgspec's business; ``float`` reads an integer of any length without a limit of its own.
_CHECK: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_int=float, strict=False)


class _Pairs(list[tuple[str, Any]]):
    """An object with all of its pairs."""


def _refuse_key(skeleton: bytes, where: str, param: str | None) -> NoReturn:
    try:
        place = _twice(json.loads(skeleton, object_pairs_hook=_Pairs, parse_int=float, strict=False), "")
    except RecursionError:
        place = None
    raise InvalidRequest(f"{place or where}: the key occurs twice", param=place or param)


def _twice(value: Any, place: str) -> str | None:
    """The first key that an object has twice, as clients name places."""
    if isinstance(value, _Pairs):
        seen: set[str] = set()
        for key, inner in value:
            here = f"{place}.{key}" if place else key
            if key in seen:
                return here
            seen.add(key)
            if (found := _twice(inner, here)) is not None:
                return found
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if (found := _twice(inner, f"{place}[{index}]")) is not None:
                return found
    return None
