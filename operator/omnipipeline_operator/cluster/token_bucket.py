"""A token bucket that bounds the rate of writes to the API server.

Here: only that. Called by `client` before every write.
"""

from __future__ import annotations

import asyncio


class TokenBucket:
    """``rate`` writes a second on average, ``burst`` at once."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at = asyncio.get_running_loop().time()
        self.taken = 0

    async def take(self) -> None:
        """Wait until one write is allowed."""
        while True:
            now = asyncio.get_running_loop().time()
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
            self._filled_at = now
            if self._tokens >= 1:
                self._tokens -= 1
                self.taken += 1
                return
            await asyncio.sleep((1 - self._tokens) / self._rate)
