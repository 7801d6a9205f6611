"""How much of a transfer moves at once, by how fast the bytes of its route came before.

NIXL, Mooncake and torch.distributed do not report how much of a read or a write is done. So a slow peer is
distinguished from a dead one by the ends of its pieces, and these must be small where bytes come slowly. No threads and
no clock here.
Used by `mooncake`, `nccl` and `nixl`, in their threads.
"""

from __future__ import annotations

from typing import Final

FIRST_NBYTES: Final = 128 << 10  # of a peer whose speed is not known: 25 KB/s are enough not to be late
LEAST_NBYTES: Final = 64 << 10
PIECE_S: Final = 1.0  # that a piece is to take, at most: far below the time after which nothing more is awaited


class Pace:
    """The size of pieces on one route."""

    def __init__(self, most_nbytes: int) -> None:
        """most_nbytes: of a piece, however fast the route is."""
        self._most_nbytes = most_nbytes
        self._per_s: float | None = None  #: Bytes, by the piece before.

    def next_nbytes(self) -> int:
        if self._per_s is None:
            return min(FIRST_NBYTES, self._most_nbytes)
        return int(min(max(self._per_s * PIECE_S, LEAST_NBYTES), self._most_nbytes))

    def took(self, nbytes: int, seconds: float) -> None:
        """A piece was here after so long."""
        if nbytes >= LEAST_NBYTES:  # a smaller one shows how long the way is
            self._per_s = nbytes / max(seconds, 1e-6)

    def gave_up(self) -> None:
        """A piece was not here in time: the next one shows whether the peer is slow."""
        self._per_s = 0.0
