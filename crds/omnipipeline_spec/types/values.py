"""The base class of all spec types: frozen values that accept several spellings and store one.

Here: `Spec`. Its constructor turns lists into tuples, a single value into a list where the field allows it, ``""`` and
None into "unset", and integers into quantities, for values built in Python and values read from files alike. Not here:
refusing values (`shapes` does, with the path). Subclassed by `pipeline`, `cluster` and `status`, and by authors who
give their pipelines other defaults.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Meta, inspect

from omnipipeline_spec.types.quantities import NAME_PATTERN

_PACKAGE = f"{__name__.partition('.')[0]}."
#: ``extra`` of a list field that may be written as one value: ``next: thinker``.
SCALAR_OR_LIST = {"scalar": True}
#: ``extra`` of a field that only Python and plain files have; the resource expresses it differently.
OUTSIDE_RESOURCE = {"outside_resource": True}


class _SpecMeta(msgspec.StructMeta):
    """Lets a subclass redeclare fields with lists and maps as defaults, and refuses a default that would be ignored."""

    def __new__(metacls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any) -> _SpecMeta:
        inherited = {field for base in bases for field in getattr(base, "__struct_fields__", ())}
        for field in inherited & namespace.keys():
            default = namespace[field]
            if default and isinstance(default, list | dict):
                namespace[field] = msgspec.field(default_factory=functools.partial(copy.deepcopy, default))
        made = super().__new__(metacls, name, bases, namespace, **config)
        for field in sorted(inherited & vars(made).keys()):
            # A class attribute would hide the field: instances would return it instead of the value they were given.
            kind = type(vars(made)[field]).__name__
            raise TypeError(f"{name}.{field} needs an annotation: {field}: {kind} = ...")
        return made


def doc(text: str) -> Meta:
    """A field's description, as the CRD and the reference print it."""
    return Meta(description=text)


class Spec(msgspec.Struct, metaclass=_SpecMeta, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A value of the spec: snake_case in Python, camelCase in the resource."""

    def __post_init__(self) -> None:
        for name, normalise in _normalisers(contract_of(type(self))):
            given = getattr(self, name)
            held = normalise(given)
            if held is not given:
                msgspec.structs.force_setattr(self, name, held)


def unwrap(kind: inspect.Type) -> tuple[inspect.Type, dict[str, Any]]:
    """A type without its metadata, and the merged ``extra`` of that metadata."""
    extra: dict[str, Any] = {}
    while isinstance(kind, inspect.Metadata):
        extra |= kind.extra or {}
        kind = kind.type
    return kind, extra


def is_optional(kind: inspect.Type) -> bool:
    """Whether None means "unset"."""
    return isinstance(kind, inspect.UnionType) and kind.includes_none


def without_none(kind: inspect.Type) -> inspect.Type:
    """A field's type without None. (``gpu`` is the only union of two types.)

    The type of a field that accepts a single value or a list is the list, as in the resource.
    """
    kind, _ = unwrap(kind)
    if not isinstance(kind, inspect.UnionType):
        return kind
    members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    lists = [member for member in members if is_list(unwrap(member)[0])]
    return unwrap((lists or members)[0])[0]


def may_be_empty(kind: inspect.Type) -> bool:
    """Whether ``""`` means "unset": for strings other than names of stages or processes and quantities."""
    inner = without_none(kind)
    return isinstance(inner, inspect.StrType) and inner.pattern != NAME_PATTERN and "quantity" not in extra_of(kind)


def extra_of(kind: inspect.Type) -> dict[str, Any]:
    """All ``extra`` of a field's type, the members of a union included."""
    inner, extra = unwrap(kind)
    if isinstance(inner, inspect.UnionType):
        for member in inner.types:
            extra = extra_of(member) | extra
    return extra


def is_list(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.ListType | inspect.VarTupleType | inspect.CollectionType)


@functools.cache
def contract_of(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The contract's type that an author's class derives from. A subclass changes defaults and adds no fields."""
    return next((each for each in struct.__mro__ if each.__module__.startswith(_PACKAGE)), struct)


@functools.cache
def is_ours(struct: type[msgspec.Struct]) -> type[msgspec.Struct] | None:
    """The contract's type that a value of this type is; None: it is another Struct of an author's."""
    ours = contract_of(struct)
    return ours if ours.__module__.startswith(_PACKAGE) else None


@functools.cache
def type_of(struct: type[msgspec.Struct]) -> inspect.StructType:
    """A struct type, inspected once: that takes 20 ms for a pipeline's, ten times as long as to plan one."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return info


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    """The fields of a struct type."""
    return type_of(struct).fields


def to_document(value: Any) -> Any:
    """A spec value as in the resource: camelCase, lists, without unset fields and fields that equal their default.

    Defaults are those of the contract's type, also for a value of a subclass. Fields that a subclass adds are kept, so
    that `shapes` refuses them. Works for other Structs (a plan's) too, in their own spelling.
    """
    match value:
        case msgspec.Struct():
            kind = contract_of(type(value))
            document = {
                field.encode_name: to_document(held)
                for field in fields_of(kind)
                if (held := getattr(value, field.name)) is not None and _differs(held, default_of(field))
            }
            added = [name for name in type(value).__struct_fields__ if name not in kind.__struct_fields__]
            return document | {name: to_document(getattr(value, name)) for name in added}
        case list() | tuple():
            return [to_document(item) for item in value]
        case dict():
            return {key: to_document(item) for key, item in value.items()}
    return value


def _differs(held: Any, default: Any) -> bool:
    try:
        return bool(held != default)
    except Exception:  # an author's class or an array may raise; `shapes` refuses it
        return True


def default_of(field: inspect.Field) -> Any:
    """The default of a field; NODEFAULT for a required one."""
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


@functools.cache
def _normalisers(struct: type[Spec]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    found: list[tuple[str, Callable[[Any], Any]]] = []
    for field in fields_of(struct):
        normalise = _normaliser(field)
        if normalise is not None:
            found.append((field.name, normalise))
    return tuple(found)


def _normaliser(field: inspect.Field) -> Callable[[Any], Any] | None:
    kind = without_none(field.type)
    extra = extra_of(field.type)
    if is_list(kind):
        return functools.partial(_as_tuple, scalar="scalar" in extra)
    if isinstance(kind, inspect.DictType):
        quantities = "quantity" in extra_of(kind.value_type)
        return _as_quantities if quantities else (lambda given: {} if given is None else given)
    if "quantity" in extra:
        return _as_quantity
    if is_optional(unwrap(field.type)[0]) and may_be_empty(field.type):
        return lambda given: None if _is_empty(given) else given
    return None


def _is_empty(given: Any) -> bool:
    return isinstance(given, str) and not given  # to compare what is not text may raise


def _as_quantity(given: Any) -> Any:
    return str(given) if type(given) is int and given.bit_length() < 64 else given


def _as_tuple(given: Any, *, scalar: bool) -> Any:
    if type(given) is tuple:
        return given
    if given is None or (scalar and _is_empty(given)):
        return ()
    if scalar and isinstance(given, str | int):
        return (given,)
    return tuple(given) if isinstance(given, list) else given


def _as_quantities(given: Any) -> Any:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or all(type(amount) is not int for amount in given.values()):
        return given
    return {key: _as_quantity(amount) for key, amount in given.items()}
