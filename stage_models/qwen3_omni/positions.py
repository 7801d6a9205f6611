"""The places of a prompt's rows for rotary embedding: in time, height and width (mrope). Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


def positions(
    tokens: Sequence[int], image_token: int, grids: Sequence[Sequence[int]], merge: int
) -> tuple[Positions, int]:
    """Each token's positions ``[3, tokens]``, and what is added to the index of a generated token.

    Text and sound go on by one in all three. An image begins after what is before it and spans its height and width;
    what follows begins after the larger side. grids: of each image ``[t, h, w]`` in patches, ``merge`` a row and side.

    Source: ``get_rope_index`` of transformers 5.23, without video.
    """
    found = np.empty((3, len(tokens)), np.int64)
    left = iter(grids)
    at = after = 0
    while at < len(tokens):
        if tokens[at] != image_token:
            found[:, at] = after
            at, after = at + 1, after + 1
            continue
        place = after + _image(next(left), merge)
        count = place.shape[1]
        found[:, at : at + count] = place
        at, after = at + count, int(place.max()) + 1
    return found, after - len(tokens)


def _image(grid: Sequence[int], merge: int) -> Positions:
    frames, high, wide = grid[0], grid[1] // merge, grid[2] // merge
    if frames != 1:
        raise ValueError(f"an image of {frames} frames; videos are not supported")
    rows, columns = np.meshgrid(np.arange(high), np.arange(wide), indexing="ij")
    return np.stack([np.zeros(high * wide, np.int64), rows.ravel(), columns.ravel()])
