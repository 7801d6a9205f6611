"""Bytes that are sent in pieces, each as base64. Pure; called by the routes that stream sound."""

from __future__ import annotations

import base64
from typing import Final

_UNIT: Final = 6  # bytes: 3 are encoded without padding, 2 are a sample of pcm


class Base64Pieces:
    """Texts that may be decoded one by one, or joined and decoded as one.

    Padding ends base64, and decoders ignore what follows it. So what does not fill a unit waits for the next piece, and
    only the last text may be padded.
    """

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> str:
        """The part that can be sent of all that was added; empty: nothing yet."""
        given = self._rest + data
        end = len(given) - len(given) % _UNIT
        self._rest = given[end:]
        return base64.b64encode(given[:end]).decode()

    def finish(self, data: bytes = b"") -> str:
        """The last text; empty: all was sent."""
        given, self._rest = self._rest + data, b""
        return base64.b64encode(given).decode()
