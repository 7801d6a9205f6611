"""How many examples a property test draws and how many rows of a long table are tried: in a run of each change, or in
the nightly one.

``make nightly`` sets ``OMNI_THOROUGH=1``: ten times the examples of each property, and other ones every night; all rows
of all tables. A run of each change draws few, and in CI the same ones each time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

THOROUGH = os.environ.get("OMNI_THOROUGH") == "1"
NIGHTLY_FACTOR = 10

Row = TypeVar("Row")
Other = TypeVar("Other")


def examples(each_run: int) -> int:
    """``max_examples`` of a property."""
    return NIGHTLY_FACTOR * each_run if THOROUGH else each_run


def rows(table: Sequence[Row], *, each_run: int) -> Sequence[Row]:
    """The rows of a table of cases that take seconds each: all, or so many of them, evenly spread."""
    if THOROUGH or each_run >= len(table):
        return table
    return [table[number * len(table) // each_run] for number in range(each_run)]


def crossed(first: Sequence[Row], second: Sequence[Other]) -> Sequence[tuple[Row, Other]]:
    """The pairs of two long tables: all, or each of ``first`` with one of ``second`` in turn."""
    if THOROUGH:
        return [(one, other) for one in first for other in second]
    return [(one, second[number % len(second)]) for number, one in enumerate(first)]
