"""The token bucket that all writes pass: whatever goes wrong, the API server is never flooded.

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
        """Return when a write may be made."""
        while True:
            now = asyncio.get_running_loop().time()
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
            self._filled_at = now
            if self._tokens >= 1:
                self._tokens -= 1
                self.taken += 1
                return
            await asyncio.sleep((1 - self._tokens) / self._rate)
