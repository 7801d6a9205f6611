"""Blocks of a paged cache as bytes: K and V of each layer, and kept rows. They are what crosses between engines.

The bytes of some blocks are one flat buffer: page after page (a page is K or V of a layer), in each the blocks in the
order in which they were asked for. So two engines whose pages have the same shapes and dtypes agree on them.

Pages of the host are copied by numpy: in one thread and without the GIL. torch would divide each copy among all of its
threads, which wait for one another in a spin where processors are shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Page(NamedTuple):
    """name: such as ``3.key``. values: ``[blocks, block_size, …]``."""

    name: str
    values: Tensor


class BlockPages:
    """All pages of one engine. Calls in the executor's thread."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self.pages = tuple(pages)
        self._rows = [_rows(one.values) for one in self.pages]

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

    def export(self, blocks: Sequence[int], into: Tensor | None = None) -> Tensor:
        """A copy of their bytes on the host: uint8 ``[blocks x block_nbytes]``. into: memory for it, of that size."""
        flat = torch.empty(len(blocks) * self.block_nbytes, dtype=torch.uint8) if into is None else into
        self._check(blocks, flat)
        numbers = np.array(blocks, dtype=np.int64)
        for rows, part in self._parts(flat, len(blocks)):
            if isinstance(rows, np.ndarray):
                rows.take(numbers, axis=0, out=part, mode="clip")  # "raise" would copy twice
            else:
                part[:] = rows[torch.from_numpy(numbers)].cpu().numpy()
        return flat

    def load(self, blocks: Sequence[int], flat: Tensor) -> None:
        """Write what `export` of another engine gave. Raises: ValueError: it has another size."""
        self._check(blocks, flat)
        numbers = np.array(blocks, dtype=np.int64)
        for rows, part in self._parts(flat, len(blocks)):
            if isinstance(rows, np.ndarray):
                rows[numbers] = part
            else:
                rows[torch.from_numpy(numbers)] = torch.from_numpy(part).to(rows.device)

    def _check(self, blocks: Sequence[int], flat: Tensor) -> None:
        """Raises: ValueError: it has another size, or a block is not one of the pages'."""
        most = len(self._rows[0]) if self._rows else 0
        if blocks and not 0 <= min(blocks) <= max(blocks) < most:
            raise ValueError(f"blocks {min(blocks)} to {max(blocks)} of {most}")
        if flat.dtype is not torch.uint8 or flat.numel() != len(blocks) * self.block_nbytes:
            raise ValueError(f"{flat.numel()} values for {len(blocks)} blocks of {self.block_nbytes} bytes")

    def _parts(self, flat: Tensor, count: int) -> Iterator[tuple[Any, Bytes]]:
        """Each page's rows, and its part of a flat buffer as ``[count, bytes]``."""
        whole, at = flat.numpy(), 0
        for rows in self._rows:
            nbytes = rows.shape[1]
            yield rows, whole[at : at + count * nbytes].reshape(count, nbytes)
            at += count * nbytes


def _rows(values: Tensor) -> Any:
    """A page's blocks as ``[blocks, bytes]``: an array on the host, else a tensor."""
    rows = values.view(len(values), -1).view(torch.uint8)
    return rows.numpy() if rows.device.type == "cpu" else rows
