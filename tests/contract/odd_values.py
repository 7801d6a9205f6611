"""Python values that nobody expects in a pipeline, each made anew."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import pathlib
import types
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from omnipipeline_spec.pipeline import StageConfig


class Word(str, enum.Enum):  # noqa: UP042 - authors write it
    HI = "hi"


class Number(enum.IntEnum):
    ONE = 1


class Hostile:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no comparison")

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")

    __hash__ = object.__hash__


class Foreign(msgspec.Struct):
    x: Any = 1


class Unresolved(msgspec.Struct):
    x: Nowhere  # type: ignore[name-defined]  # noqa: F821


def _itself() -> Any:
    found: list[Any] = []
    found += [found, found]
    return found


def _map_of_itself() -> Any:
    found: dict[str, Any] = {}
    found["again"] = found
    return found


def _deep(levels: int, wrap: Callable[[Any], Any]) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = wrap(found)
    return found


ODD: dict[str, Callable[[], Any]] = {
    "a null key": lambda: {None: 1},
    "a null at a null key": lambda: {None: None},
    "a key with a fraction": lambda: {0.5: 1},
    "an integer as key": lambda: {1: 1},
    "a tuple as key": lambda: {(1, 2): 1},
    "bytes as key": lambda: {b"x": 1},
    "a hostile key": lambda: {Hostile(): 1},
    "an enum as key": lambda: {Word.HI: 1},
    "a surrogate as key": lambda: {"caf\udce9": 1},
    "a surrogate": lambda: "caf\udce9",
    "a huge integer": lambda: 10**5000,
    "a huge negative integer": lambda: -(10**5000),
    "a huge integer as key": lambda: {10**5000: 1},
    "a list in itself": _itself,
    "a map in itself": _map_of_itself,
    "500 lists": lambda: _deep(500, lambda inner: [inner]),
    "500 maps": lambda: _deep(500, lambda inner: {"k": inner}),
    "500 tuples": lambda: _deep(500, lambda inner: (inner,)),
    "lists that double": lambda: _deep(40, lambda inner: [inner, inner]),
    "an array": lambda: np.array([1, 2]),
    "a scalar of numpy": lambda: np.float64(0.5),
    "an integer of numpy": lambda: np.int64(1),
    "an enum": lambda: Word.HI,
    "an integer enum": lambda: Number.ONE,
    "a hostile object": Hostile,
    "a set": lambda: {1},
    "bytes": lambda: b"x",
    "a decimal": lambda: decimal.Decimal("0.5"),
    "a time": lambda: datetime.datetime(2026, 1, 1),
    "a path": lambda: pathlib.Path("x"),
    "a function": lambda: _itself,
    "a class": lambda: Foreign,
    "another struct": Foreign,
    "an unresolved struct": lambda: Unresolved(1),
    "a stage": lambda: StageConfig(name="x", factory="w:m"),
    "a dictionary of another class": lambda: collections.OrderedDict(a=(1,)),
    "a map of another class": lambda: types.MappingProxyType({"a": (1,)}),
    "a generator": lambda: (each for each in (1,)),
    "NaN": lambda: float("nan"),
}
