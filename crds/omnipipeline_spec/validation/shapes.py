"""Checks the form of a document against the types, and reports all faults at once, each with its path.

Here: one walk over a document and the types: unknown keys with the nearest known one, missing keys, wrong types,
bounds, patterns, duplicates. It returns the document in the resource's spelling. Not here: reading files (`loading`),
rules that span fields (`topology`). Called by `loading` and `topology`. msgspec's own conversion stops at the first
fault and suggests nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import inspect

from omnipipeline_spec.types import quantities
from omnipipeline_spec.types.canonical import NotCanonical, canonical, has_surrogate, join, without_nulls
from omnipipeline_spec.types.errors import Fault, quoted
from omnipipeline_spec.types.values import extra_of, fields_of, is_list, is_optional, may_be_empty, unwrap, without_none

#: ``resource``: camelCase and lists, as the API server accepts; null entries of free-form values are dropped.
#: ``plain``: also snake_case and single values; None is a value in Python (`respell` drops a file's nulls).
Spelling = Literal["resource", "plain"]


def check(document: Any, struct: type[msgspec.Struct], *, spelling: Spelling) -> tuple[Any, tuple[Fault, ...]]:
    """The document in the resource's form, and its faults. Use the document only if it has no faults.

    None if a list or a map has more entries than its bound: its entries are not checked.
    """
    walk = _ShapeWalk(spelling)
    cleaned = walk.struct(document, struct, "")
    return None if walk.is_oversized else cleaned, tuple(walk.faults)


def respell(document: Any, struct: type[msgspec.Struct]) -> Any:
    """The document of a plain file with known fields in the resource's spelling, and without null entries in
    free-form values. Its faults are left for `check`.
    """
    if not isinstance(document, Mapping):
        return document
    by_name = {field.name: field for field in fields_of(struct)}
    by_key = {field.encode_name: field for field in fields_of(struct)} | by_name
    spelt: dict[Any, Any] = {}
    for key, value in document.items():
        field = by_key.get(key)
        if field is None:
            spelt[key] = value
            continue
        both = field.name != field.encode_name and field.name in document and field.encode_name in document
        spelt[key if both else field.encode_name] = respell_value(value, field.type)
    return spelt


def respell_value(value: Any, kind: inspect.Type) -> Any:
    """The same as `respell`, for the value of one field."""
    inner = without_none(kind)
    if isinstance(inner, inspect.StructType):
        return respell(value, inner.cls)
    if is_list(inner) and isinstance(value, list | tuple):
        return [respell_value(item, getattr(inner, "item_type", inspect.AnyType())) for item in value]
    return without_nulls(value)


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key that was probably meant."""
    folded = {_fold(candidate): candidate for candidate in known}
    close = difflib.get_close_matches(_fold(key), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def _storable(text: str) -> bool:
    """Whether files, environment variables and JSON can hold the text."""
    return "\0" not in text and not has_surrogate(text)


def _fold(key: str) -> str:
    return re.sub(r"[-_]", "", key).lower()


_QUANTITY: Final = inspect.StrType(max_length=20)


class _ShapeWalk:
    def __init__(self, spelling: Spelling) -> None:
        self.plain = spelling == "plain"
        self.faults: list[Fault] = []
        self.is_oversized = False  #: A list or a map has more entries than its bound.

    def refuse(self, path: str, message: str, *names: str) -> None:
        self.faults.append(Fault(path=path, message=message, names=names))

    def struct(self, given: Any, struct: type[msgspec.Struct], path: str) -> Any:
        if not isinstance(given, Mapping):
            return self.mistyped(given, "a map", path)
        fields = [field for field in fields_of(struct) if self.plain or "outside_resource" not in extra_of(field.type)]
        by_key = {field.encode_name: field for field in fields}
        if self.plain:
            by_key |= {field.name: field for field in fields}
        cleaned: dict[str, Any] = {}
        for key, value in given.items():
            field = by_key.get(key)
            if field is None:
                self.unknown(_spelt(key), struct, fields, path)
            elif field.encode_name in cleaned:
                self.refuse(join(path, field.encode_name), f"is written twice, as {field.encode_name} and {field.name}")
            else:
                self.field(value, field, cleaned, join(path, field.encode_name))
        for field in fields:
            if field.required and field.encode_name not in cleaned:
                self.refuse(join(path, field.encode_name), "is required")
        return {key: value for key, value in cleaned.items() if value is not None}

    def unknown(self, key: str, struct: type[msgspec.Struct], fields: list[inspect.Field], path: str) -> None:
        hidden = {field.encode_name for field in fields_of(struct)} - {field.encode_name for field in fields}
        if key in hidden:
            cure = (
                "in the resource the name is metadata.name" if key == "name" else "only Python and plain files have it"
            )
            return self.refuse(join(path, key), f"is not a field of the resource: {cure}", key)
        near = nearest(key, [field.encode_name for field in fields])
        meant = f"; did you mean {near}?" if near else f"; known are {', '.join(sorted(f.encode_name for f in fields))}"
        self.refuse(join(path, key), f"unknown key{meant}", key)

    def field(self, value: Any, field: inspect.Field, cleaned: dict[str, Any], path: str) -> None:
        optional = is_optional(unwrap(field.type)[0])
        unset = value is None or (isinstance(value, str) and value == "" and optional and may_be_empty(field.type))
        if unset:
            if field.required:
                self.refuse(path, "is required")
            cleaned[field.encode_name] = None
            return
        kind, extra = without_none(field.type), extra_of(field.type)
        if is_list(kind) and not isinstance(value, list | tuple):
            value = self.single(value, extra, path)
            if value is None:
                return
        cleaned[field.encode_name] = self.value(value, kind, extra, path)

    def single(self, value: Any, extra: dict[str, Any], path: str) -> list[Any] | None:
        if "scalar" not in extra or not isinstance(value, str | int):
            self.mistyped(value, "a list", path)
            return None
        if not self.plain:
            self.refuse(path, f"is a single value; the resource takes a list: write [{value}]")
        return [] if value == "" else [value]

    def value(self, given: Any, kind: inspect.Type, extra: dict[str, Any], path: str) -> Any:
        if "quantity" in extra and not isinstance(kind, inspect.DictType):
            return self.quantity(given, path)
        match kind:
            case inspect.StructType():
                return self.struct(given, kind.cls, path)
            case inspect.ListType() | inspect.VarTupleType() | inspect.CollectionType():
                return self.items(given, kind, extra, path)
            case inspect.DictType():
                return self.mapping(given, kind, path)
            case inspect.StrType():
                return self.string(given, kind, path)
            case inspect.BoolType():
                return given if isinstance(given, bool) else self.mistyped(given, "true or false", path)
            case inspect.IntType() | inspect.FloatType():
                return self.number(given, kind, path)
            case inspect.LiteralType():
                return self.choice(given, kind, path)
            case _:
                return self.free(given, path)

    def items(self, given: Any, kind: Any, extra: dict[str, Any], path: str) -> Any:
        if not isinstance(given, list | tuple):
            return self.mistyped(given, "a list", path)
        if not self.fits(given, kind, path):
            return None
        item, item_extra = without_none(kind.item_type), extra_of(kind.item_type)
        cleaned = [self.value(each, item, item_extra, f"{path}[{index}]") for index, each in enumerate(given)]
        if "unique" in extra:
            self.unique([(f"{path}[{index}]", each) for index, each in enumerate(cleaned)])
        if "map_key" in extra:
            key = extra["map_key"]
            self.unique([(f"{path}[{i}].{key}", e.get(key)) for i, e in enumerate(cleaned) if isinstance(e, dict)])
        return cleaned

    def unique(self, found: list[tuple[str, Any]]) -> None:
        first: dict[Any, str] = {}
        for path, value in found:
            if isinstance(value, str | int) and first.setdefault(value, path) != path:
                self.refuse(path, f"{value!r} is already at {first[value]}", str(value))

    def mapping(self, given: Any, kind: inspect.DictType, path: str) -> Any:
        if not isinstance(given, Mapping):
            return self.mistyped(given, "a map", path)
        if isinstance(without_none(kind.value_type), inspect.AnyType):
            return self.free(given, path)
        if not self.fits(given, kind, path):
            return None
        key_kind, value_kind = without_none(kind.key_type), without_none(kind.value_type)
        value_extra = extra_of(kind.value_type)
        return {
            self.value(key, key_kind, {}, join(path, _spelt(key))): self.value(
                value, value_kind, value_extra, join(path, _spelt(key))
            )
            for key, value in given.items()
            if value is not None
        }

    def string(self, given: Any, kind: inspect.StrType, path: str) -> Any:
        if not isinstance(given, str):
            scalar = {bool: "boolean", int: "number", float: "number"}.get(type(given))
            cure = f"a string; YAML reads this as a {scalar}: put it in quotes"
            return self.mistyped(given, cure if scalar else "a string", path)
        if not _storable(given):
            self.refuse(
                path, f"{given[:40]!a} contains NUL or half of a surrogate pair, which no file or process accepts"
            )
        fits = self.length(len(given), kind, "characters", path)
        if fits and kind.pattern and not _matches(kind.pattern, given):
            self.refuse(path, _pattern_message(kind.pattern, given), given)
        return str.__str__(given)  # of a subclass the plain text

    def number(self, given: Any, kind: inspect.IntType | inspect.FloatType, path: str) -> Any:
        whole = isinstance(kind, inspect.IntType)
        number = self.free(given, path) if isinstance(given, int | float) and not isinstance(given, bool) else None
        if number is None or (whole and not isinstance(number, int)):
            return self.mistyped(given, "a whole number" if whole else "a number", path)
        bounds = (
            (kind.gt is not None and number <= kind.gt, f"more than {kind.gt}"),
            (kind.ge is not None and number < kind.ge, f"at least {kind.ge}"),
            (kind.lt is not None and number >= kind.lt, f"less than {kind.lt}"),
            (kind.le is not None and number > kind.le, f"at most {kind.le}"),
        )
        broken = [bound for is_broken, bound in bounds if is_broken]
        if broken:
            self.refuse(path, f"{number} must be {' and '.join(broken)}")
        return number

    def choice(self, given: Any, kind: inspect.LiteralType, path: str) -> Any:
        if not isinstance(given, str) or given not in kind.values:
            return self.mistyped(given, f"one of {', '.join(str(value) for value in kind.values)}", path)
        return str.__str__(given)

    def quantity(self, given: Any, path: str) -> Any:
        if isinstance(given, bool) or not isinstance(given, int | str):
            return self.mistyped(given, "a quantity such as 12Gi or 500m", path)
        if isinstance(given, str) and not self.length(len(given), _QUANTITY, "characters", path):
            return given
        if isinstance(given, int) and self.free(given, path) is None:
            return None
        try:
            quantities.parse_quantity(given)
        except ValueError as error:
            self.refuse(path, str(error))
        return str(given)

    def free(self, given: Any, path: str) -> Any:
        try:
            return canonical(given if self.plain else without_nulls(given), path)
        except NotCanonical as error:
            self.refuse(error.place, error.message)
            return None

    def fits(self, given: Any, kind: Any, path: str) -> bool:
        """Whether a list or a map has no more entries than its bound. Ask before looking at its entries."""
        fits = self.length(len(given), kind, "entries", path)
        self.is_oversized = self.is_oversized or not fits
        return fits

    def length(self, length: int, kind: Any, what: str, path: str) -> bool:
        """Refuse a value that is too long or too short. False if it is too long."""
        if kind.min_length is not None and length < kind.min_length:
            self.refuse(path, f"has {length} {what}; at least {kind.min_length} are required")
        if kind.max_length is None or length <= kind.max_length:
            return True
        self.refuse(path, f"has {length} {what}; at most {kind.max_length} are allowed")
        return False

    def mistyped(self, given: Any, wanted: str, path: str) -> None:
        if isinstance(given, str | int | float | bool):
            self.refuse(path, f"{quoted(given)} must be {wanted}")
        else:
            self.refuse(path, f"must be {wanted}, not {_kind_of(given)}")


def _spelt(key: Any) -> str:
    return key if isinstance(key, str) else quoted(key)


def _kind_of(given: Any) -> str:
    names = {type(None): "null", dict: "a map", list: "a list", tuple: "a list"}
    return names.get(type(given), f"a {type(given).__name__}")


def _matches(pattern: str, text: str) -> bool:
    # Python's $ also matches before a trailing line break, RE2's does not.
    return re.search(pattern.replace("$", r"\Z"), text) is not None


def _pattern_message(pattern: str, given: str) -> str:
    if pattern == quantities.NAME_PATTERN:
        if re.search(r"@r[0-9]+$", given):
            return f"{given!r} ends like the name of an instance; the suffix @rN is reserved"
        return (
            f"{given!r} is not a name: use lower case letters, digits, - and _, with a letter first and no - or _ last"
        )
    if pattern == quantities.FUNCTION_PATTERN:
        return f"{given!r} is not a function: write it as package.module:function"
    if pattern in quantities.FORMS:
        return f"{given!r} is not {quantities.FORMS[pattern]}"
    return f"{given!r} does not match {pattern}"
