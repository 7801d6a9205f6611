"""The API keys that open the HTTP side, which may change while it serves.

Here: comparing a token with them. Not here: the file that they come from (`settings` reads it,
`processes.coordinator_process` reads it again when it changes), the answer to a request without one (`middleware`).
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence


class ApiKeys:
    """A request needs one of the keys. None is required without keys, and that does not change later."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self.asked_for = bool(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """Take other keys, from the next request on. Never none: that would admit every client."""
        if not keys or not self.asked_for:
            raise ValueError("keys cannot be switched on or off while serving")
        self._keys = tuple(key.encode() for key in keys)

    def allow(self, token: bytes) -> bool:
        """Every key is compared, in constant time: the time taken does not depend on how much of a guess is right."""
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return any(matches)
