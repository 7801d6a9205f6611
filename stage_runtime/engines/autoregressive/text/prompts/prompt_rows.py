"""The parts of a request beside token ids: rows, ``[tokens, hidden]`` floats, in place of some of them, positions of
its own, rows that are added after named layers, and rows of its stream. It needs no torch; see `embeddings`.

`ROW` stands for the next row in a request. Each row has a name inside the core, a negative number in the place of its
token id that is the same for equal rows only; so blocks are hashed, shared and kept by the content of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from stage_runtime.api import Feed

ROW: Final = -1  #: The id in a prompt's token ids that stands for the next row of its embeddings.


class AddedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows that are added to the output of a layer (DeepStack). places: tokens of the prompt part, in order. rows:
    ``[places, hidden]``.
    """

    layer: int
    places: Sequence[int]
    rows: Any


class RequestRows:
    """All of that of one request. Added to on the core's thread; read where the model is computed."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Any]] = []  #: Position of the first row, and the rows; in order, disjoint.
        self._end = 0
        self._positions: list[tuple[int, Any]] = []  #: Positions in the form of ``_pieces``: ``[3, tokens]``.
        self._added: list[tuple[int, AddedRows]] = []  #: Position of the part's first token.
        self._keys: list[tuple[int, int, bytes]] = []  #: Keys of tokens ``start .. end``: what their KV depends on.
        self.delta = 0  #: A token without a position of its own stands at its index and this.
        self.fed: list[Any] = []  #: Rows of the stream, ``[hidden]`` each.
        self.end: Any = None
        self.pad: Any = None

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

    def keep(self, first: int, part: PlacedRows) -> None:
        """The content of a part of the prompt; ``first`` is its place in the prompt."""
        for at, rows in part.rows:
            self.add(first + at, rows)
        if part.positions is not None:
            self._positions.append((first, part.positions))
            self.delta = part.delta
        for one in part.added:
            self._added.append((first, one))
        for run in part.runs:
            delta = None if run.base is None else run.base - (first + run.start)
            if delta != 0:
                key = run.digest if delta is None else _delta_key(delta)
                self._keys.append((first + run.start, first + run.end, key))

    def feed(self, more: Feed) -> None:
        if more.rows is not None:
            self.fed.extend(more.rows)
        self.end = self.end if more.end is None else more.end
        self.pad = self.pad if more.pad is None else more.pad

    def fed_row(self, place: int) -> Any:
        """The row that is added to the input of the generated token ``place``; None: nothing."""
        if place < len(self.fed):
            return self.fed[place]
        return self.end if place == len(self.fed) and self.end is not None else self.pad

    def positions(self, start: int, end: int) -> list[list[int]]:
        """The positions of tokens ``start .. end``, on each of three axes."""
        found = [[at + self.delta for at in range(start, end)] for _axis in range(3)]
        for first, given in self._positions:
            low, high = max(first, start), min(first + given.shape[1], end)
            if low < high:
                for axis in range(3):
                    found[axis][low - start : high - start] = given[axis, low - first : high - first].tolist()
        return found

    def added(self, start: int, end: int) -> list[tuple[int, list[int], Any]]:
        """Additions to tokens ``start .. end``: a layer, their positions, and the rows that are added there."""
        found = []
        for first, one in self._added:
            chosen = [index for index, place in enumerate(one.places) if start <= first + place < end]
            if chosen:
                rows = one.rows[chosen[0] : chosen[-1] + 1]
                found.append((one.layer, [first + one.places[index] for index in chosen], rows))
        return found

    def key(self, start: int, end: int) -> bytes:
        """Facts beside ids, and beside what is before, on which keys and values of tokens ``start .. end`` depend."""
        keys = [key for low, high, key in self._keys if low < end and start < high]
        placed = max((first + given.shape[1] for first, given in self._positions), default=0)
        if self.delta and end > placed:  # tokens without positions of their own, such as generated ones
            delta = _delta_key(self.delta)
            keys += [delta] if keys[-1:] != [delta] else []
        return b"".join(keys)


def _delta_key(delta: int) -> bytes:
    """The positions of tokens that stand at their index and ``delta``."""
    return delta.to_bytes(8, "little", signed=True)


class Run(NamedTuple):
    """Tokens ``start .. end`` of a part. base: position of the first one, where each stands one after the other on all
    axes and nothing is added; else None, and ``digest`` stands for their positions and what is added.
    """

    start: int
    end: int
    base: int | None
    digest: bytes = b""


class PlacedRows(NamedTuple):
    """Part of a prompt, checked. tokens: with a row's name for `ROW`. rows: by the place of their first one in it.

    positions, delta, added: as the author gave them. runs: of the tokens that have positions of their own. feed: more
    rows of the request's stream.
    """

    tokens: list[int]
    rows: list[tuple[int, Any]]
    positions: Any = None
    delta: int = 0
    added: Sequence[AddedRows] = ()
    runs: Sequence[Run] = ()
    feed: Feed | None = None

    @property
    def plain(self) -> bool:
        """Token ids and nothing else."""
        return not self.rows and self.positions is None and not self.added


class Extension(msgspec.Struct, frozen=True, kw_only=True):
    """More of a request that is open: of its prompt, with fields as those of `EngineCoreRequest`, or of its stream.

    feed: more rows of its stream; with the first of them the prompt is whole. last: nothing more comes.
    """

    prompt_token_ids: Sequence[int] = ()
    prompt_embeds: Any = None
    prompt_positions: Any = None
    position_delta: int = 0
    added_rows: Sequence[AddedRows] = ()
    last: bool = False
    feed: Feed | None = None


class Embeddings(Protocol):
    """The rows that the model takes. Any thread may call this."""

    def place(
        self,
        tokens: Sequence[int],
        embeds: Any,
        positions: Any = None,
        delta: int = 0,
        added: Sequence[AddedRows] = (),
    ) -> PlacedRows:
        """embeds: as many rows as ``tokens`` has `ROW`, or None for none. positions: ``[3, tokens]`` or None.

        Raises: ValueError: they do not fit the model, or each other. Its message is for the client.
        """

    def fed(self, feed: Feed) -> Feed:
        """A part of a stream, checked, in the model's dtype. Raises: ValueError."""
