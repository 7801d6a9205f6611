"""Rows of prompts: checked against the model, in its dtype, and named by their content."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.text.prompt_rows import ROW, PlacedRows

NAME_BYTES: Final = 8
KEY_BYTES: Final = 32
FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class ModelEmbeddings:
    """`prompt_rows.Embeddings` of one model."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        self._hidden = hidden
        self._dtype = dtype
        self._key = os.urandom(KEY_BYTES)  # of this process: rows with equal names cannot be prepared

    def place(self, tokens: Sequence[int], embeds: Any) -> PlacedRows:
        wanted = sum(token == ROW for token in tokens)
        rows = self._checked(embeds) if embeds is not None else torch.empty(0, self._hidden, dtype=self._dtype)
        if len(rows) != wanted:
            raise ValueError(f"the prompt has places for {wanted} rows, and {len(rows)} rows are given")
        return _placed(tokens, rows, self._names(rows))

    def _checked(self, embeds: Any) -> Tensor:
        """On the host, in the model's dtype, in memory of their own."""
        if not isinstance(embeds, Tensor):
            raise ValueError(f"embeddings must be a torch tensor, not {type(embeds).__name__}")
        if embeds.dtype not in FLOATS:
            raise ValueError(f"embeddings must be floats, not {str(embeds.dtype).removeprefix('torch.')}")
        if embeds.ndim != 2 or embeds.shape[1] != self._hidden:
            raise ValueError(
                f"embeddings have the shape {list(embeds.shape)}; the model takes [tokens, {self._hidden}]"
            )
        rows = embeds.detach().to("cpu", self._dtype, copy=True)
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(f"embeddings must be finite as {str(self._dtype).removeprefix('torch.')}")
        return rows.contiguous()

    def _names(self, rows: Tensor) -> list[int]:
        if not len(rows):
            return []
        return [-1 - (_digest(bytes(row), self._key) >> 1) for row in rows.view(torch.uint8).numpy()]


def _digest(data: bytes, key: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=NAME_BYTES, key=key).digest(), "little")


def _placed(tokens: Sequence[int], rows: Tensor, names: Sequence[int]) -> PlacedRows:
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
    return PlacedRows(placed, pieces)
