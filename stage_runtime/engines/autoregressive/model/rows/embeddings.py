"""Rows of prompts and of streams, checked and in the model's dtype, with digests that are equal for equal rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor

from stage_runtime.api import Feed
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import ROW, AddedRows, PlacedRows, Run

NAME_BYTES: Final = 8
KEY_BYTES: Final = 32
FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


AXES: Final = 3  # of a position: time, height, width
POSITION_MOST: Final = 1 << 30


class ModelEmbeddings:
    """`prompt_rows.Embeddings` of one model."""

    def __init__(self, hidden: int, dtype: torch.dtype, *, axes: int = 1, layers: int = 0) -> None:
        """axes: of the model's positions; 3: prompts may give their own. layers: after which rows may be added."""
        self._hidden = hidden
        self._dtype = dtype
        self._axes = axes
        self._layers = layers
        self._key = os.urandom(KEY_BYTES)  # of this process: rows with equal names cannot be prepared

    def place(
        self,
        tokens: Sequence[int],
        embeds: Any,
        positions: Any = None,
        delta: int = 0,
        added: Sequence[AddedRows] = (),
    ) -> PlacedRows:
        wanted = sum(token == ROW for token in tokens)
        rows = self._checked(embeds, "embeddings") if embeds is not None else torch.empty(0, self._hidden)
        if len(rows) != wanted:
            raise ValueError(f"the prompt has places for {wanted} rows, and {len(rows)} rows are given")
        placed, pieces = _placed(tokens, rows, self._names(rows))
        if positions is None and not added:
            return PlacedRows(placed, pieces)
        checked = [self._added(one, len(tokens)) for one in added]
        where = self._positions(positions, len(tokens)) if positions is not None else None
        return PlacedRows(placed, pieces, where, _whole(delta, "position_delta"), checked, self._runs(where, checked))

    def fed(self, feed: Feed) -> Feed:
        rows = None if feed.rows is None else self._checked(feed.rows, "rows of a stream")
        end, pad = (None if one is None else self._single(one) for one in (feed.end, feed.pad))
        return Feed(rows=rows, end=end, pad=pad)

    def _single(self, row: Any) -> Tensor:
        if not isinstance(row, Tensor) or row.numel() != self._hidden:
            raise ValueError(f"the end and the pad of a stream are one row each, of {self._hidden} floats")
        return self._checked(row.reshape(1, -1), "rows of a stream")[0]

    def _checked(self, given: Any, what: str) -> Tensor:
        """A copy of the given rows ``[tokens, hidden]`` on the host, in the model's dtype.

        Raises: ValueError: they are not finite floats of that shape; the error begins with ``what``.
        """
        if not isinstance(given, Tensor):
            raise ValueError(f"{what} must be a torch tensor, not {type(given).__name__}")
        if given.dtype not in FLOATS:
            raise ValueError(f"{what} must be floats, not {str(given.dtype).removeprefix('torch.')}")
        if given.ndim != 2 or given.shape[1] != self._hidden:
            raise ValueError(f"{what} have the shape {list(given.shape)}; the model takes [tokens, {self._hidden}]")
        rows = given.detach().to("cpu", self._dtype, copy=True)
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(f"{what} must be finite as {str(self._dtype).removeprefix('torch.')}")
        return rows.contiguous()

    def _positions(self, given: Any, count: int) -> Tensor:
        if self._axes != AXES:
            raise ValueError("this model places tokens by their index: it takes no positions")
        if not isinstance(given, Tensor) or given.dtype not in (torch.int64, torch.int32):
            raise ValueError("positions must be a torch tensor of whole numbers")
        if list(given.shape) != [AXES, count]:
            raise ValueError(f"positions have the shape {list(given.shape)}; expected [{AXES}, {count}]")
        if count and not 0 <= int(given.min()) <= int(given.max()) < POSITION_MOST:
            raise ValueError(f"positions must be from 0 to {POSITION_MOST - 1}")
        return given.detach().to("cpu", torch.int64, copy=True)

    def _added(self, one: AddedRows, count: int) -> AddedRows:
        places = [_whole(place, "places") for place in one.places]
        if not 0 <= _whole(one.layer, "layer") < self._layers:
            raise ValueError(f"rows are added after layer {one.layer}; the model has layers 0 to {self._layers - 1}")
        if places != sorted(set(places)) or (places and not 0 <= places[0] <= places[-1] < count):
            raise ValueError(f"places of added rows must be in order, from 0 to {count - 1}")
        rows = self._checked(one.rows, "added rows")
        if len(rows) != len(places):
            raise ValueError(f"{len(rows)} rows are added at {len(places)} places")
        return AddedRows(one.layer, places, rows)

    def _runs(self, positions: Tensor | None, added: Sequence[AddedRows]) -> list[Run]:
        """Tokens that stand one after the other, and those between: images, with what is added to them."""
        touched = sorted({place for one in added for place in one.places})
        if positions is None:
            return [self._run(start, end, None, added) for start, end in _spans(touched)]
        index = torch.arange(positions.shape[1])
        level = (positions == positions[:1]).all(0)
        level[touched] = False
        runs = []
        start = 0
        offset = (positions[0] - index).tolist()
        plain = level.tolist()
        for at in range(1, len(plain) + 1):
            goes_on = at < len(plain) and plain[at] == plain[start] and (not plain[at] or offset[at] == offset[start])
            if goes_on:
                continue
            if plain[start]:
                runs.append(Run(start, at, int(positions[0, start])))
            else:
                runs.append(self._run(start, at, positions, added))
            start = at
        return runs

    def _run(self, start: int, end: int, positions: Tensor | None, added: Sequence[AddedRows]) -> Run:
        content = blake2b(digest_size=NAME_BYTES, key=self._key)
        if positions is not None:
            content.update(positions[:, start:end].contiguous().numpy().tobytes())
        for one in added:
            chosen = [index for index, place in enumerate(one.places) if start <= place < end]
            content.update(repr((one.layer, [one.places[index] - start for index in chosen])).encode())
            content.update(one.rows[chosen].view(torch.uint8).numpy().tobytes())
        return Run(start, end, None, content.digest())

    def _names(self, rows: Tensor) -> list[int]:
        if not len(rows):
            return []
        return [-1 - (_digest(bytes(row), self._key) >> 1) for row in rows.view(torch.uint8).numpy()]


def _digest(data: bytes, key: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=NAME_BYTES, key=key).digest(), "little")


def _whole(value: Any, name: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} must be whole numbers")
    return value


def _spans(places: Sequence[int]) -> list[tuple[int, int]]:
    """``places``, in order, as ranges without gaps."""
    spans: list[tuple[int, int]] = []
    for place in places:
        if spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return spans


def _placed(tokens: Sequence[int], rows: Tensor, names: Sequence[int]) -> tuple[list[int], list[tuple[int, Any]]]:
    placed: list[int] = []
    pieces: list[tuple[int, Any]] = []
    taken = 0
    for at, token in enumerate(tokens):
        if token != ROW:
            placed.append(token)
            continue
        if at == 0 or tokens[at - 1] != ROW:
            run = next((end for end in range(at, len(tokens)) if tokens[end] != ROW), len(tokens))
            pieces.append((at, rows[taken : taken + run - at]))
        placed.append(names[taken])
        taken += 1
    return placed, pieces
