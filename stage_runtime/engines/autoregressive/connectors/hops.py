"""The cost of asking a prefill instance, beside its computing: from which length on a prompt is worth asking for.

Measured over the links: by a probe of one block to each instance that is met, and by every prompt that is asked for.
Called by `decode`.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

ASSUMED_S: Final = 0.010  # until something was measured
MET_MOST: Final = 4096  # instances; one that is forgotten is probed once more
KEPT: Final = 32  # the last ones: links change, and one that was slow once must not count for ever


class Hops:
    """Seconds from an ask to its first piece, less what prefill needed to compute it."""

    def __init__(self, tokens_per_s: float) -> None:
        """tokens_per_s: what decode itself computes of a prompt."""
        self._tokens_per_s = tokens_per_s
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._met: set[str] = set()

    def meet(self, peer: str) -> bool:
        """Whether this instance is to be probed: it is asked for the first time."""
        if peer in self._met:
            return False
        if len(self._met) >= MET_MOST:
            self._met.clear()
        self._met.add(peer)
        return True

    def note(self, seconds: float) -> None:
        self._seconds.append(max(seconds, 0.0))

    @property
    def least_tokens(self) -> int:
        """A prompt that lacks fewer tokens is computed by decode while an ask would be on its way."""
        seconds = statistics.median(self._seconds) if self._seconds else ASSUMED_S
        return max(int(seconds * self._tokens_per_s), 1)


class Fixed(Hops):
    """The author's number: nothing is measured."""

    def __init__(self, least_tokens: int) -> None:
        super().__init__(0.0)
        self._least = least_tokens

    def meet(self, peer: str) -> bool:
        return False

    @property
    def least_tokens(self) -> int:
        return self._least
