"""Prompts that have rows, ``[tokens, hidden]`` floats, in place of some token ids. Without torch; see `embeddings`.

In a request `ROW` stands for the next row. Inside the core each row has a name, a negative number in the place of its
token id that is the same for equal rows only; so blocks are hashed, shared and kept by the content of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

ROW: Final = -1  #: In a prompt's token ids: the next row of its embeddings.


class PromptRows:
    """The rows of one prompt. Added to on the core's thread; read where the model is computed."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Any]] = []  #: Position of the first row, and the rows; in order, disjoint.
        self._end = 0

    def add(self, first: int, rows: Any) -> None:
        self._pieces.append((first, rows))
        self._end = first + len(rows)

    def within(self, start: int, end: int) -> list[tuple[int, Any]]:
        """The rows of positions ``start .. end``, in pieces."""
        if start >= self._end:
            return []
        found = []
        for first, rows in self._pieces:
            low, high = max(first, start), min(first + len(rows), end)
            if low < high:
                found.append((low, rows[low - first : high - first]))
        return found


class PlacedRows(NamedTuple):
    """Part of a prompt, checked. tokens: with a row's name for `ROW`. rows: by the place of their first one in it."""

    tokens: list[int]
    rows: list[tuple[int, Any]]


class Embeddings(Protocol):
    """What the model takes as rows. In any thread."""

    def place(self, tokens: Sequence[int], embeds: Any) -> PlacedRows:
        """embeds: as many rows as ``tokens`` has `ROW`, or None for none.

        Raises: ValueError: they do not fit the model, or each other. Its message is for the client.
        """
