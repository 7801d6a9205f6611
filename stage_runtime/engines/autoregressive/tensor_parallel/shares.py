"""Blocks of all tensor-parallel ranks as one flat buffer with all heads, and each rank's part of it. Pure.

The form with all heads is that of an engine without ranks (`model.paged_attention.block_pages`), so engines of any
numbers of ranks exchange blocks: one joins its ranks' parts, the other splits them among its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Shared = Sequence[tuple[int, int]]  #: Shares of each page: tokens of a block, bytes of a token's heads in one rank.


def join(parts: Sequence[Tensor], shared: Shared, count: int) -> Tensor:
    """parts: of each rank, uint8, page after page, ``count`` blocks in each. Returns: the same with all heads."""
    whole = torch.empty(sum(len(one) for one in parts), dtype=torch.uint8)
    for page, mine in _pages(whole, parts, shared, count):
        for rank, part in enumerate(mine):
            page[:, rank] = part
    return whole


def split(whole: Tensor, ranks: int, shared: Shared, count: int) -> list[Tensor]:
    """The inverse of `join`."""
    parts = [torch.empty(len(whole) // ranks, dtype=torch.uint8) for _ in range(ranks)]
    for page, mine in _pages(whole, parts, shared, count):
        for rank, part in enumerate(mine):
            part.copy_(page[:, rank])
    return parts


def _pages(whole: Tensor, parts: Sequence[Tensor], shared: Shared, count: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Each page as ``[tokens, ranks, bytes]``, and of each rank as ``[tokens, bytes]``."""
    ranks, at = len(parts), 0
    for size, width in shared:
        tokens = count * size
        end = at + tokens * width
        yield (
            whole[at * ranks : end * ranks].view(tokens, ranks, width),
            [part[at:end].view(tokens, width) for part in parts],
        )
        at = end
