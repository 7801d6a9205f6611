"""Releases to be sent: the received transfers that are not referenced any more.

A view's death is reported by `relays` (``on_release``). Used by every process that fetches: stages, follower ranks, the
coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import get_ident

from stage_runtime.wire.messages import Message, Release


class Releases:
    """The slots that this process has released and not reported yet. Made on ``loop``'s thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[str, Message], object]) -> None:
        self._loop = loop
        self._thread = get_ident()
        self._send = send
        self._waiting: dict[str, list[int]] = {}  #: Releases by peer; empty unless `_flush` is scheduled.

    def add(self, peer: str, transfer: int) -> None:
        """The last view of what ``peer`` put has died. Any thread may call this: a worker sends a message of its own,
        which costs less than to wake the loop; what is reported in one turn of the loop goes in one message to each
        peer.
        """
        if get_ident() != self._thread:
            self._send(peer, Release((transfer,)))
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.setdefault(peer, []).append(transfer)

    def clear(self) -> None:
        """The process takes a new incarnation: its peers' `forget` frees what it held under the old one."""
        self._waiting.clear()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for peer, transfers in waiting.items():
            self._send(peer, Release(tuple(transfers)))
