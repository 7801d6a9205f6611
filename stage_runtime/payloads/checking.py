"""The check of values: which may travel, and a walk over them. Used by `payloads`, on every transport the same.

MessagePack libraries take tuples, sets, dataclasses and int keys silently and give something else back; so nothing
reaches the encoder that this walk has not seen. It is on the path of every hop: the words of a refusal are made
only when there is one, from the trail of keys that the walk left behind.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeAlias

import msgspec
import numpy as np

from stage_runtime.errors import ValueRefused, safe_str
from stage_runtime.payloads import tensors
from stage_runtime.wire import outputs, values

MAX_DEPTH: Final = 64
KEY_SHOWN: Final = 80  # characters of a key in a path: a message about a long one need not be as long
INT_RANGE: Final = (-(2**63), 2**64 - 1)  # what MessagePack can encode

#: A step of a trail: a dict's key, a list's index, or ``(name,)``, a field.
Step: TypeAlias = str | int | tuple[str]
Walker: TypeAlias = Callable[[Any, Any], Any]

CURES: Final[dict[type, str]] = {
    tuple: "use a list",
    set: "use a list",
    frozenset: "use a list",
    bytearray: "use bytes(...)",
    memoryview: "use bytes(...)",
    complex: "use a list of two floats",
    range: "use list(...)",
}


class CheckFailed(Exception):
    """The value at the end of the trail cannot be encoded; raised inside a walk."""


class ValueWalk:
    """One pass over a value. Subclasses handle the leaves.

    An untouched container is passed on as it is, unless ``rebuild`` wants a fresh one of each.
    """

    rebuild: ClassVar[bool] = False
    #: Types that need no look at all.
    plain: ClassVar[frozenset[type]]
    #: The function that handles a type; tensor and Struct types are added as they are met.
    walkers: ClassVar[dict[type, Walker]]

    __slots__ = ("deepest", "trail")

    def __init__(self) -> None:
        self.trail: list[Step] = []
        self.deepest = MAX_DEPTH  #: Steps; the names of a message's own fields do not count.

    def run(self, value: Any, where: str, *, as_fields: bool = False) -> Any:
        """Walk ``value``; with ``as_fields``, a dict whose keys are field names.

        Raises: ValueRefused: with the path, which begins with ``where``, and the cure.
        """
        try:
            if as_fields:
                self.deepest = MAX_DEPTH + 1
                return self.walk_fields(value)
            kind = type(value)
            return value if kind in self.plain else (self.walkers.get(kind) or self.learn(value))(self, value)
        except CheckFailed as refused:
            raise ValueRefused(path_of(where, self.trail), str(refused)) from None

    def learn(self, value: Any) -> Walker:
        """The walker of a type that was not met before."""
        kind = type(value)
        walker: Walker
        if tensors.is_tensor(value):
            walker = type(self).walk_tensor
        elif isinstance(value, np.ndarray):
            walker = type(self).walk_array
        elif isinstance(value, values.RawTensor):
            walker = type(self).walk_raw
        elif isinstance(value, msgspec.Struct) and values.REGISTRY.get(values.message_name(kind)) is kind:
            walker = type(self).walk_struct
        else:
            raise CheckFailed(_problem(value))
        self.walkers[kind] = walker
        return walker

    def walk_dict(self, value: dict[Any, Any]) -> dict[str, Any]:
        trail, plain, walkers = self.trail, self.plain, self.walkers
        if len(trail) >= self.deepest:
            raise CheckFailed(_too_deep())
        copy = value.copy() if self.rebuild else None
        for key, item in value.items():
            if type(key) is not str:
                raise CheckFailed(f"{type(key).__name__} key {safe_str(key, limit=40, how=repr)}: use str keys")
            if copy is not None and not key.isascii():  # else the encoder looks
                check_str(self, key)
            kind = type(item)
            if kind in plain:
                continue
            trail.append(key)
            new = (walkers.get(kind) or self.learn(item))(self, item)
            trail.pop()
            if new is not item:
                if copy is None:
                    copy = dict(value)
                copy[key] = new
        return value if copy is None else copy

    def walk_list(self, value: list[Any]) -> list[Any]:
        trail, plain, walkers = self.trail, self.plain, self.walkers
        if len(trail) >= self.deepest:
            raise CheckFailed(_too_deep())
        copy = value.copy() if self.rebuild else None
        for index, item in enumerate(value):
            kind = type(item)
            if kind in plain:
                continue
            trail.append(index)
            new = (walkers.get(kind) or self.learn(item))(self, item)
            trail.pop()
            if new is not item:
                if copy is None:
                    copy = list(value)
                copy[index] = new
        return value if copy is None else copy

    def walk_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The items of ``fields``, walked, in a new dict; refusals call them ``.name``, not ``['name']``."""
        trail, plain, walkers = self.trail, self.plain, self.walkers
        if len(trail) >= self.deepest:
            raise CheckFailed(_too_deep())
        walked = {}
        for name, item in fields.items():
            kind = type(item)
            if kind not in plain:
                trail.append((name,))
                item = (walkers.get(kind) or self.learn(item))(self, item)
                trail.pop()
            walked[name] = item
        return walked

    def struct_fields(self, value: msgspec.Struct) -> dict[str, Any]:
        problem = outputs.problem(value)
        if problem is not None:
            raise CheckFailed(problem)
        return self.walk_fields({name: getattr(value, name) for name in value.__struct_fields__})

    def walk_tensor(self, value: Any) -> Any:
        problem = tensors.tensor_problem(value)
        if problem is not None:
            raise CheckFailed(problem)
        return self.tensor(value)

    def walk_array(self, value: np.ndarray[Any, Any]) -> Any:
        problem = tensors.array_problem(value)
        if problem is not None:
            raise CheckFailed(problem)
        return self.array(value)

    def walk_raw(self, value: values.RawTensor) -> Any:
        return self.raw(value)

    def walk_struct(self, value: msgspec.Struct) -> Any:
        raise NotImplementedError

    def tensor(self, value: Any) -> Any:
        raise NotImplementedError

    def array(self, value: np.ndarray[Any, Any]) -> Any:
        raise NotImplementedError

    def raw(self, value: values.RawTensor) -> Any:
        raise NotImplementedError


def path_of(where: str, trail: list[Step]) -> str:
    """``payload.data`` and its trail as Python writes it: ``payload.data.cache['x'][0]``."""
    if len(trail) == 1 and isinstance(trail[0], tuple):  # a field's own value
        return f"{where}.{trail[0][0]}"
    return where + "".join(f".{step[0]}" if isinstance(step, tuple) else f"[{_shown(step)}]" for step in trail)


def _shown(step: str | int) -> str:
    return repr(step if isinstance(step, int) or len(step) <= KEY_SHOWN else step[:KEY_SHOWN] + "…")


def check_int(_: ValueWalk, value: int) -> int:
    if not INT_RANGE[0] <= value <= INT_RANGE[1]:
        signed = " with its sign" if value < 0 else ""
        raise CheckFailed(f"int of {value.bit_length() + (value < 0)} bits{signed}: use at most 64, or a str")
    return value


def check_str(_: ValueWalk, value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CheckFailed("str with a lone surrogate: use text that is valid Unicode") from None
    return value


def _too_deep() -> str:
    return f"deeper than {MAX_DEPTH} levels: flatten it (is it part of itself?)"


def _problem(value: Any) -> str:
    """Why a value of a foreign type cannot be encoded, with the cure."""
    kind = type(value)
    if isinstance(value, enum.Enum):  # also a subclass of str or int: str(...) of it is its name
        return f"{kind.__name__}, an Enum: use .value"
    if kind in CURES:
        return f"{kind.__name__}: {CURES[kind]}"
    if isinstance(value, np.generic):
        return f"numpy scalar {kind.__name__}: use .item()"
    if isinstance(value, values.StagePayload):
        return "the payload itself: use its .data"
    if isinstance(value, msgspec.Struct):
        return f"Struct {kind.__name__}: register its type with @omni.message"
    for base in (bool, int, float, str, bytes, list, dict, tuple):
        if isinstance(value, base):
            return (
                f"{kind.__name__}, a subclass of {base.__name__}: use {'list' if base is tuple else base.__name__}(...)"
            )
    if hasattr(kind, "__dataclass_fields__"):
        return f"dataclass {kind.__name__}: use a dict, or a msgspec.Struct with @omni.message"
    return f"object of type {kind.__name__}: use plain values, or a msgspec.Struct with @omni.message"
