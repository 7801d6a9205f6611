"""Blocks that a pass is about to fill, each with the running request for which it does. Pure.

A request whose next block is being filled for an earlier one waits for it instead of computing the same. Called by
`scheduling`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, ItemsView, Iterable, Sequence

from stage_runtime.rules.autoregressive.requests import Request
from stage_runtime.rules.autoregressive.waiting_queue import PriorityKey


class BlocksBeingFilled:
    """Their hashes, each with its writer."""

    def __init__(self, key: Callable[[Request], PriorityKey]) -> None:
        """key: the policy's order of requests."""
        self._key = key
        self._filling: dict[bytes, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._filling)

    def items(self) -> ItemsView[bytes, Request]:
        return self._filling.items()

    def begin(self, request: Request, hashes: Iterable[bytes]) -> None:
        """The request is about to fill these blocks, but for those that another one fills already."""
        for content in hashes:
            self._filling.setdefault(content, request)

    def filled(self, request: Request, hashes: Iterable[bytes]) -> None:
        """The request fills these blocks no longer: no other one waits for them."""
        for content in hashes:
            if self._filling.get(content) is request:
                del self._filling[content]

    def for_others(self, request: Request, hashes: Sequence[bytes]) -> list[bytes]:
        """The first of ``hashes`` that are being filled for requests before this one."""
        return list(itertools.takewhile(lambda one: self.precedes(one, request), hashes))

    def precedes(self, content: bytes, request: Request) -> bool:
        """Whether the policy puts the block's writer before the request, which may wait for it then. A request that
        waits for a later one would wait for all between them, too.
        """
        writer = self._filling.get(content)
        return writer is not None and self._key(writer) < self._key(request)
