"""Values that no author should put into metadata, and that one does. hypothesis draws them."""

from __future__ import annotations

import datetime
import enum
import fractions
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st


class Whole(int):
    """No plain int."""

    def __int__(self) -> int:
        raise RuntimeError("no int")


class Share(float):
    """No plain float."""

    def __float__(self) -> float:
        raise RuntimeError("no float")


class Words(str):
    """No plain str."""

    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("no str")


class Level(enum.IntEnum):
    LOW = 1
    HUGE = 1 << 70


class Colour(enum.StrEnum):
    RED = "red"
    HALF = "\ud800"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Surrogates:
    def __repr__(self) -> str:
        return "\udfff" * 9


class Shaped:
    """It has what a tensor has, and none of it works."""

    dtype = Unprintable()

    @property
    def shape(self) -> Any:
        raise OSError("no shape")


class Alike:
    """Nothing comes of `item` but itself."""

    shape = ()
    dtype = "alike"

    def item(self) -> Any:
        return self


def _endless_list() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _endless_dict() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    found["self"] = [found, {1: found}]
    return found


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def _within_itself() -> Any:
    found = np.empty((), dtype=object)
    found[()] = found
    return found


#: Scalars and small arrays of every type that numpy has.
NUMPY = [
    *(
        made
        for code in np.typecodes["All"]
        if code not in "Mm"
        for made in (np.zeros((), code), np.zeros((), code)[()])
    ),
    *(np.float64(text) for text in ("nan", "inf", "-0.0", "1e308")),
    np.float16(0.5),
    np.uint64(2**64 - 1),
    np.longdouble("1e4000"),
    np.datetime64("NaT"),
    np.datetime64("2026-01-01T00:00:00.123456789"),
    np.timedelta64(7, "D"),
    np.array((1, b"x"), dtype=[("a", "i4"), ("b", "S1")])[()],
    np.array({"a": object()}, dtype=object),
    np.str_("\ud800"),
    np.bytes_(b"\xff" * 5000),
    np.ones((2, 3), dtype=object),
]
TORCH = [
    torch.tensor(True),
    torch.tensor(0.5, dtype=torch.bfloat16),
    torch.tensor(1 + 2j),
    torch.zeros((), device="meta"),
    torch.zeros(2, 3).to_sparse(),
]
OBJECTS = [
    None,
    Whole(7),
    Whole(-1 << 90),
    Share(0.5),
    Words("words"),
    Words("\ud800" * 3000),
    *Level,
    *Colour,
    Unprintable(),
    Surrogates(),
    Shaped(),
    Alike(),
    Unprintable,
    Decimal("1.5"),
    Decimal("NaN"),
    fractions.Fraction(1, 3),
    1 << 64,
    -(1 << 63) - 1,
    10**5000,
    2 + 1j,
    datetime.datetime(2026, 1, 1),
    datetime.timedelta.max,
    range(10**18),
    memoryview(b"abc"),
    _endless_list(),
    _endless_dict(),
    _nested(5000),
    _within_itself(),
    {Unprintable(): 1},
    {"\ud800": "\udfff"},
    {Words("key"): 1, 7: 2, None: 3, (1, 2): 4},
    ["x" * 5000] * 5000,
    {str(each): "é" * 2000 for each in range(200)},
    ValueError(Unprintable()),
    iter(()),
]

_ALL: list[Any] = [*NUMPY, *TORCH, *OBJECTS]


def _at(index: int) -> Any:
    """Hypothesis prints the number, not the value: not all of them can be printed."""
    return _ALL[index]


values = st.recursive(
    st.one_of(
        st.integers(0, len(_ALL) - 1).map(_at),
        st.integers(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(),
        st.complex_numbers(),
        st.decimals(),
        st.fractions(),
        st.booleans(),
        st.binary(),
        st.text(st.characters(exclude_categories=[]), max_size=20),
        st.text(st.characters(categories=["Cs"]), max_size=3000),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(st.characters(exclude_categories=[])), st.integers()), inner, max_size=5),
    ),
    max_leaves=20,
)
