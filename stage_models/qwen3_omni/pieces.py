"""Frames of each piece of sound: 4, 8, 16, 25, 25, … and how many of them a busy vocoder joins to the first one. Pure.

The vocoder is always called with the same sizes, whatever is joined: so the load changes when sound is sent, not its
bytes. Called by `stages.code2wav`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

INITIAL: Final = 4
#: Requests that are spoken at once -> pieces that the first one is made of. A player that starts with more in hand does
#: not run dry while the others are served.
OPENINGS: Final = ((4, 1), (12, 2))
LAST_OPENING: Final = 3
#: Frames of one call of the vocoder, as of transformers' ``chunked_decode``: a piece of more is made by several, for
#: memory grows with a call's frames, and other requests wait for its end.
MOST_AT_ONCE: Final = 300


def opening(speaking: int) -> int:
    """speaking: requests under way, the new one among them."""
    return next((count for most, count in OPENINGS if speaking <= most), LAST_OPENING)


class Pieces:
    """The pieces of one request."""

    def __init__(self, initial: int, steady: int, merged: int = 1) -> None:
        """merged: pieces that are given out as one, first of all."""
        self._sizes = _sizes(initial, steady)
        self._next = list(itertools.islice(self._sizes, merged))

    def take(self, waiting: int) -> list[int] | None:
        """Sizes of the next pieces, to be given out as one; None: too few frames wait."""
        if waiting < sum(self._next):
            return None
        taken, self._next = self._next, [next(self._sizes)]
        return _calls(taken)

    def rest(self, waiting: int) -> list[int]:
        """Sizes for all that waits: the stream has ended."""
        taken = []
        for size in itertools.chain(self._next, self._sizes):
            if waiting <= 0:
                break
            taken.append(min(size, waiting))
            waiting -= size
        return _calls(taken)


def _calls(pieces: list[int]) -> list[int]:
    """The same frames, in sizes of calls of the vocoder."""
    return [min(MOST_AT_ONCE, size - at) for size in pieces for at in range(0, size, MOST_AT_ONCE)]


def _sizes(initial: int, steady: int) -> Iterator[int]:
    size = initial
    while True:
        yield size
        size = min(2 * size, max(steady, initial))
