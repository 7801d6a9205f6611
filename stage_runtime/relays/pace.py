"""How much the mooncake relay reads at once from a peer, by how fast the bytes came from it before.

Mooncake does not say how much of a read is here. So a slow peer is told from a dead one by the ends of its pieces, and
these have to be small where bytes come slowly. No threads and no clock here. Used by `reading`, in its threads.
"""

from __future__ import annotations

from typing import Final

FIRST_NBYTES: Final = 2 << 20  # of a peer whose speed is not known: 0.4 MB/s are enough not to be late
LEAST_NBYTES: Final = 64 << 10
MOST_NBYTES: Final = 16 << 20  # an abort is heeded once a piece; with 4 MiB, 256 MiB took a third longer
PIECE_S: Final = 1.0  # that a piece is to take, at most


class Pace:
    """Of one peer."""

    def __init__(self) -> None:
        self._per_s: float | None = None  #: Bytes, by the piece before.

    def next_nbytes(self) -> int:
        if self._per_s is None:
            return FIRST_NBYTES
        return int(min(max(self._per_s * PIECE_S, LEAST_NBYTES), MOST_NBYTES))

    def took(self, nbytes: int, seconds: float) -> None:
        """A piece was here after so long."""
        if nbytes >= LEAST_NBYTES:  # a smaller one shows how long the way is
            self._per_s = nbytes / max(seconds, 1e-6)

    def gave_up(self) -> None:
        """A piece was not here in time: the next one shows whether the peer is slow."""
        self._per_s = 0.0
