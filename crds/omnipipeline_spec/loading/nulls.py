"""Null entries of a document's free-form maps, which are dropped: a warning for each.

Here: finding them, whether fields are spelt as in the resource or in Python, and what to write instead. Not here:
dropping them (`canonical.without_nulls`), a null at a known field, which unsets it. Called by `reading` and
`overrides`. The API server drops such entries too, so a factory never gets None from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import inspect

from omnipipeline_spec.types.canonical import join
from omnipipeline_spec.types.errors import Fault, quoted
from omnipipeline_spec.types.values import fields_of, is_list, without_none

SHOWN: Final = 20  # of one document; a file of 3 MiB may hold many thousands
_MESSAGE: Final = (
    "null sets nothing here: the entry is dropped, as on a cluster. Leave it out where the default is meant; else "
    "write a value that its reader takes for none, such as false, {} or 'none'"
)


def places(given: Any, kind: inspect.Type, path: str) -> Iterator[str]:
    """The path of each null entry of a map that has no fields of its own, at every depth.

    given: a value of that type. A value of another form is looked at no further; `shapes` refuses it.
    """
    inner = without_none(kind)
    match inner, given:
        case inspect.StructType(cls=struct), Mapping():
            fields = fields_of(struct)
            by_key = {key: field for field in fields for key in (field.name, field.encode_name)}
            for key, value in given.items():
                if (field := by_key.get(key)) is not None and value is not None:
                    yield from places(value, field.type, join(path, field.encode_name))
        case inspect.StructType(), _:
            return
        case _, Mapping():
            item = inner.value_type if isinstance(inner, inspect.DictType) else inspect.AnyType()
            for key, value in given.items():
                place = join(path, key if isinstance(key, str) else quoted(key))
                if value is None:
                    yield place
                else:
                    yield from places(value, item, place)
        case _, list():
            item = getattr(inner, "item_type", inspect.AnyType()) if is_list(inner) else inspect.AnyType()
            for index, value in enumerate(given):
                yield from places(value, item, f"{path}[{index}]")


def warnings(found: Sequence[Fault]) -> tuple[Fault, ...]:
    """The first of them, and how many more there are."""
    more = len(found) - SHOWN
    rest = (Fault(path="", message=f"{more} more null entries are dropped"),) if more > 0 else ()
    return (*found[:SHOWN], *rest)


def dropped(path: str, *, line: int | None = None, source: str = "") -> Fault:
    """The warning of one entry. source: the override that has it."""
    return Fault(path=path, message=f"{_MESSAGE} (from {source})" if source else _MESSAGE, line=line)
