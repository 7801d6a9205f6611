"""Batched notifications to instances: requests that ended, chunks that clients consumed. This runs on the I/O
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.rules.flow.streams import STREAM_WINDOW
from stage_runtime.wire.messages import Consumed, Ended, Message, Stream

ENDED_EVERY_S: Final = 0.02
ENDED_MOST: Final = 1024  # requests in a message, of at most some 150 bytes each: far below the limit of a frame
CONSUMED_EVERY: Final = STREAM_WINDOW // 4


class EndedNotifier:
    """Requests that are complete while some stage may still hold something of them: unread streams, branches not
    taken. One message per instance and `ENDED_EVERY_S`, or a few, not one per request.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[str, Message], bool]) -> None:
        self._loop = loop
        self._send = send
        self._ended: dict[str, list[tuple[str, int]]] = {}

    def add(self, instances: Iterable[str], request_id: str, attempt: int) -> None:
        if not self._ended:
            self._loop.call_later(ENDED_EVERY_S, self._send_ended)
        for incarnation in instances:
            self._ended.setdefault(incarnation, []).append((request_id, attempt))

    def forget(self, incarnation: str) -> None:
        self._ended.pop(incarnation, None)

    def _send_ended(self) -> None:
        ended, self._ended = self._ended, {}
        for incarnation, requests in ended.items():
            for start in range(0, len(requests), ENDED_MOST):
                self._send(incarnation, Ended(tuple(requests[start : start + ENDED_MOST])))


class ConsumedNotifier:
    """The weight of chunks that clients have read and that were not reported to their producers yet."""

    def __init__(self, owner: str, send: Callable[[str, Message], bool]) -> None:
        self._owner = owner
        self._send = send
        self._unreported: dict[tuple[str, str], int] = {}  #: (request id, stage)

    def read(self, request_id: str, attempt: int, stage: str, producer: str, weight: int) -> None:
        """A client took one chunk of ``stage``; its producer may send more."""
        key = (request_id, stage)
        unreported = self._unreported.get(key, 0) + weight
        if unreported >= CONSUMED_EVERY:
            self._send(producer, Consumed(request_id, attempt, self._owner, stage, COORDINATOR, unreported))
            unreported = 0
        self._unreported[key] = unreported

    def refuse(self, producer: str, chunk: Stream) -> None:
        """This stream has no reader: its producer need not wait."""
        over = Consumed(chunk.request_id, chunk.attempt, self._owner, chunk.source, COORDINATOR, 0, over=True)
        self._send(producer, over)

    def forget(self, request_id: str, stages: Iterable[str]) -> None:
        for stage in stages:
            self._unreported.pop((request_id, stage), None)
