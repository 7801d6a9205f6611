"""A queue between threads whose entries can be dropped with the request that they are of.

Entries that wait for a busy reader hold memory and slots of its senders. When its request has ended, that
must not stay until the reader comes to it. Used by inboxes and by the queue before a fan-in's hooks.
"""

from __future__ import annotations

import time
from collections import deque
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, Final, Generic, TypeVar

import msgspec

Item = TypeVar("Item")

_GONE: Final[Any] = object()
COMPACT_FROM: Final = 64  # dropped entries that stay as empty cells, before they are looked for


class _Entry(msgspec.Struct, eq=False):
    item: Any
    of: object


class Backlog(Generic[Item]):
    """Entries in order; any thread.

    Invariants: every entry that was not dropped has its token, so that a reader that waits for one is woken; what is
    dropped leaves an empty cell, of which there are at most as many as entries, or `COMPACT_FROM`.
    """

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        #: request -> its entries, in order; one alone stands for itself, as most do.
        self._of: dict[object, _Entry | deque[_Entry]] = {}
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._empty = 0  #: Cells of dropped entries.
        self._lock = Lock()
        self._closing = False

    def put(self, item: Item, of: object = None) -> None:
        """Add an entry, of a request if it is to be dropped with that."""
        entry = _Entry(item, of)
        with self._lock:
            self._entries.append(entry)
            if of is not None:
                own = self._of.setdefault(of, entry)
                if own is not entry:
                    self._append(of, own, entry)
        self._tokens.put(None)

    def take(self, timeout: float | None = None) -> Item | None:
        """The next entry; None when the queue is empty and closed, or ``timeout`` seconds have passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                self._tokens.get(timeout=timeout)
            except Empty:
                return None
            found, ended = self._next()
            if found is not _GONE:
                return found  # type: ignore[no-any-return]
            if ended:
                self._tokens.put(None)  # for the other readers
                return None
            if deadline is not None:
                timeout = max(0.0, deadline - time.monotonic())

    def take_nowait(self) -> Item | None:
        """The next entry, or None when the queue is empty."""
        return self.take(0.0)

    def drop(self, of: object) -> list[Item]:
        """Take all entries of a request out, wherever they wait. Returns them, to be freed."""
        with self._lock:
            dropped = self._of.pop(of, None)
            if dropped is None:
                return []
            if isinstance(dropped, _Entry):
                dropped = deque((dropped,))
            items = [entry.item for entry in dropped]
            for entry in dropped:
                entry.item, entry.of = _GONE, None
            self._empty += len(items)
            if self._empty > COMPACT_FROM and self._empty > len(self._entries) // 2:
                self._entries = deque(entry for entry in self._entries if entry.item is not _GONE)
                self._empty = 0
        return items

    def close(self) -> None:
        """Every reader finds the end, once what waits before it is taken."""
        self._closing = True
        self._tokens.put(None)

    @property
    def closed(self) -> bool:
        """Closed, and nothing waits any more."""
        return self._closing and not len(self)

    def __len__(self) -> int:
        return len(self._entries) - self._empty

    def _next(self) -> tuple[Any, bool]:
        """The first entry, or `_GONE` and whether the end is reached."""
        with self._lock:
            while self._entries:
                entry = self._entries.popleft()
                if entry.item is _GONE:
                    self._empty -= 1
                    continue
                of = entry.of
                if of is not None:
                    own = self._of[of]
                    if own is entry:
                        del self._of[of]
                    else:
                        self._popleft(of, own)
                return entry.item, False
            return _GONE, self._closing

    def _append(self, of: object, own: _Entry | deque[_Entry], entry: _Entry) -> None:
        """One more entry of a request that has some. The caller holds the lock."""
        if isinstance(own, _Entry):
            self._of[of] = deque((own, entry))
        else:
            own.append(entry)

    def _popleft(self, of: object, own: _Entry | deque[_Entry]) -> None:
        """The first of a request's several entries is taken. The caller holds the lock."""
        assert not isinstance(own, _Entry)
        own.popleft()
        if not own:
            del self._of[of]
