"""Buffers that messages are encoded into, used again when the socket is done with them."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol


class MessageTracker(Protocol):
    """The report of a socket on one message that was sent without a copy."""

    @property
    def done(self) -> bool: ...


class BufferPool:
    """Lends bytearrays; never one that a socket may still read. One thread."""

    def __init__(self, most: int = 4) -> None:
        """most: how many free ones are kept."""
        self._most = most
        self._free: list[bytearray] = []
        #: Messages under way, oldest last; with what must live as long: the tensors of its frames.
        self._pending: deque[tuple[MessageTracker, Any, bytearray]] = deque()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def pending(self) -> int:
        return len(self._pending)

    def take(self) -> bytearray:
        """A buffer to encode into; what it holds is to be overwritten."""
        self.reclaim()
        return self._free.pop() if self._free else bytearray()

    def sent(self, tracker: MessageTracker | None, buffer: bytearray, owner: Any = None) -> None:
        """The buffer was given to a socket. tracker: None if the socket has copied it."""
        if tracker is None or tracker.done:
            self._give_back(buffer)
        else:
            self._pending.appendleft((tracker, owner, buffer))

    def reclaim(self) -> None:
        """Take back what sockets are done with. Messages to one peer end in order; a slow peer delays the others'."""
        while self._pending and self._pending[-1][0].done:
            self._give_back(self._pending.pop()[2])

    def _give_back(self, buffer: bytearray) -> None:
        if len(self._free) < self._most:
            self._free.append(buffer)
