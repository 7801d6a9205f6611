"""Releases to be sent: the received transfers that nobody looks at any more, one message per peer.

A view's death is reported by `relays` (``on_release``). Used by every process that fetches: stages, follower ranks, the
coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stage_runtime.wire.messages import Message, Release


class Releases:
    """What this process has let go of and not reported yet. On ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[str, Message], object]) -> None:
        self._loop = loop
        self._send = send
        self._waiting: dict[str, list[int]] = {}  #: By peer; empty unless `_flush` is scheduled.

    def add(self, peer: str, transfer: int) -> None:
        """The last view of what ``peer`` put has died. All that die in one turn of the loop go in one message."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.setdefault(peer, []).append(transfer)

    def clear(self) -> None:
        """This process takes a new incarnation: what it held under the old one is freed by its peers' `forget`."""
        self._waiting.clear()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for peer, transfers in waiting.items():
            self._send(peer, Release(tuple(transfers)))
