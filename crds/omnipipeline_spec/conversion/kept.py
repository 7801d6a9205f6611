"""Values of an object that another version cannot express, kept in an annotation while it is shown in that one.

Here: the differences between two documents, putting them back, and the annotation. Not here: which versions there are
(`versions`), what a field means. An entry names a place, the value there, and what the other version's document gives
in its stead: when it gives something else, it has been edited, and the edit wins. Two values of one version may give
the same in the other, so beside kept values stand those that the shown version had of its own: when one of them has
changed since, the kept values of the same field are stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import UNSET

from omnipipeline_spec.types.resource import GROUP

ANNOTATION: Final = f"{GROUP}/kept"


class Item(msgspec.Struct, frozen=True):
    """The item of a list of objects that has this name."""

    name: str


Place: TypeAlias = tuple[str | Item, ...]


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One difference. A value that is UNSET is not in the document."""

    at: Place
    value: Any = UNSET
    instead: Any = UNSET


#: Version -> what it has and the present one cannot express; `beside` -> what the other had of its own at that time.
Notes: TypeAlias = Mapping[str, tuple[Entry, ...]]


def beside(version: str, other: str) -> str:
    """The key of the values that ``other`` had of its own when those of ``version`` were kept."""
    return f"{version}/{other}"


def read(metadata: Mapping[str, Any]) -> Notes:
    """The entries of an object. An annotation that anybody may have written in another form counts as none: an object
    that cannot be converted would make every list of its kind fail.
    """
    text = (metadata.get("annotations") or {}).get(ANNOTATION, "{}")
    try:
        return msgspec.json.decode(text, type=dict[str, tuple[Entry, ...]])
    except (msgspec.MsgspecError, RecursionError, TypeError, UnicodeError):
        return {}


def write(metadata: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """The metadata with these entries instead of those that it has."""
    rest = {key: value for key, value in metadata.items() if key != "annotations"}
    annotations = {key: text for key, text in (metadata.get("annotations") or {}).items() if key != ANNOTATION}
    entries = {version: each for version, each in notes.items() if each}
    if entries:
        annotations[ANNOTATION] = msgspec.json.encode(entries, order="deterministic").decode()
    return {**rest, "annotations": annotations} if annotations else rest


def differences(was: Any, reads: Any, at: Place = ()) -> Iterator[Entry]:
    """Entries with which `restored` turns ``reads`` into ``was``."""
    if isinstance(was, Mapping) and isinstance(reads, Mapping):
        for key in {**was, **reads}:
            yield from differences(was.get(key, UNSET), reads.get(key, UNSET), (*at, key))
    elif (names := _names(was)) and names == _names(reads):
        for name, one, other in zip(names, was, reads, strict=True):
            yield from differences(one, other, (*at, Item(name)))
    elif not same(was, reads):
        yield Entry(at=at, value=was, instead=reads)


def restored(document: Any, entries: Sequence[Entry]) -> Any:
    """The document with the values of the entries that still fit it; it shares what did not change."""
    for each in entries:
        document = _put(document, each.at, each)
    return document


def changed(own: Sequence[Entry], before: Sequence[Entry]) -> set[Place]:
    """The places at which a document's own values are others than before."""
    now, then = ({each.at: each for each in entries} for entries in (own, before))
    return {at for at in {*now, *then} if at not in now or at not in then or not same(now[at].value, then[at].value)}


def fresh(entries: Sequence[Entry], places: set[Place]) -> tuple[Entry, ...]:
    """The entries that have nothing to do with what is at these places, or within, or around them."""
    return tuple(each for each in entries if not any(_overlap(each.at, place) for place in places))


def removed(document: Any, at: Place) -> Any:
    """The document without what is there; it shares what did not change."""
    if not at:
        return document
    first, rest = at[0], at[1:]
    if isinstance(first, str) and isinstance(document, Mapping) and first in document:
        others = {key: each for key, each in document.items() if key != first}
        return {**others, first: removed(document[first], rest)} if rest else others
    if isinstance(first, Item) and first.name in (_names(document) or ()):
        return [removed(each, rest) if each["name"] == first.name else each for each in document]
    return document


def same(one: Any, other: Any) -> bool:
    """Whether two documents are equal as JSON: unlike in Python, 1 is neither 1.0 nor true."""
    if one is UNSET or other is UNSET:
        return one is other
    return one is other or _text(one) == _text(other)


def _put(value: Any, at: Place, entry: Entry) -> Any:
    if not at:
        return entry.value if same(value, entry.instead) else value
    first, rest = at[0], at[1:]
    if isinstance(first, str) and isinstance(value, Mapping):
        before = value.get(first, UNSET)
        now = _put(before, rest, entry)
        if now is before:
            return value
        others = {key: each for key, each in value.items() if key != first}
        return others if now is UNSET else {**others, first: now}
    if isinstance(first, Item) and first.name in (_names(value) or ()):
        return [_put(each, rest, entry) if each["name"] == first.name else each for each in value]
    return value


def _overlap(one: Place, other: Place) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _names(value: Any) -> list[str] | None:
    """The names of a list's items, if each item is an object with a name of its own."""
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        return None
    names = [each.get("name") for each in value]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        return None
    return names


def _text(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
