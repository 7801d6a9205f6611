"""Blocks of a paged cache as bytes: K and V of each layer, and kept rows. What crosses between engines.

The bytes of some blocks are one flat buffer: page after page (a page is K or V of a layer), in each the blocks in the
order in which they were asked for. So two engines whose pages have the same shapes and dtypes agree on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Page(NamedTuple):
    """name: such as ``3.key``. values: ``[blocks, block_size, …]``."""

    name: str
    values: Tensor


class BlockPages:
    """All pages of one engine. Calls in the executor's thread."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self.pages = tuple(pages)
        self._rows = [one.values.view(len(one.values), -1).view(torch.uint8) for one in self.pages]

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name of each page, and the shape of one block as it crosses."""
        return [(one.name, tuple(one.values.shape[1:])) for one in self.pages]

    @property
    def item_nbytes(self) -> list[int]:
        """The bytes of one block as it crosses, in each page."""
        return [rows.shape[1] for rows in self._rows]

    @property
    def block_nbytes(self) -> int:
        """The bytes of one block in all pages, as it crosses."""
        return sum(self.item_nbytes)

    def export(self, blocks: Sequence[int]) -> Tensor:
        """A copy of their bytes on the host: uint8 ``[blocks x block_nbytes]``."""
        flat = torch.empty(len(blocks) * self.block_nbytes, dtype=torch.uint8)
        for rows, part in self._parts(flat, len(blocks)):
            for at, start, end in _runs(blocks):
                part[at : at + end - start].copy_(rows[start:end])
        return flat

    def load(self, blocks: Sequence[int], flat: Tensor) -> None:
        """Write what `export` of another engine gave. Raises: ValueError: it has another size."""
        self._check(blocks, flat)
        for rows, part in self._parts(flat, len(blocks)):
            for at, start, end in _runs(blocks):
                rows[start:end].copy_(part[at : at + end - start])

    def _check(self, blocks: Sequence[int], flat: Tensor) -> None:
        """Raises: ValueError: it has another size."""
        if flat.dtype is not torch.uint8 or flat.numel() != len(blocks) * self.block_nbytes:
            raise ValueError(f"{flat.numel()} values for {len(blocks)} blocks of {self.block_nbytes} bytes")

    def _parts(self, flat: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each page's rows, and its part of a flat buffer as ``[count, bytes]``."""
        at = 0
        for rows in self._rows:
            nbytes = rows.shape[1]
            yield rows, flat[at : at + count * nbytes].view(count, nbytes)
            at += count * nbytes


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours together: index of the first one, and the blocks ``start .. end``. One copy each is much faster."""
    cuts = [0, *(at + 1 for at, (one, after) in enumerate(pairwise(blocks)) if after != one + 1), len(blocks)]
    return [(low, blocks[low], blocks[high - 1] + 1) for low, high in pairwise(cuts)]
