"""Bounds what a coordinator keeps of unread answers (`rules.requests.readers.first_to_end`). This runs on the I/O
thread.

A stream's window bounds its own chunks, not the sum of all streams. An answer that is not streamed has no window: it is
kept until it is complete. Called by `answers` with all that comes.
"""

from __future__ import annotations

import asyncio
from typing import Final
from weakref import WeakSet

import msgspec

from stage_runtime.coordinator.answering.request_handles import RequestHandle, UnreadBytes
from stage_runtime.coordinator.following import Following
from stage_runtime.rules.requests.readers import PATIENCE_S, Holder, first_to_end
from stage_runtime.transfers.receiving import Fetched
from stage_runtime.wire.parts import Failure

MIB: Final = 1 << 20
EVENT_NBYTES: Final = 1024  # of a chunk or result beside its value: its objects


class AnswerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of answers that are here and unread."""

    of_one: int = 256 * MIB  #: The bound of one answer that is not streamed.
    of_all: int = 1024 * MIB


DEFAULT_LIMITS: Final = AnswerLimits()


def nbytes_of(fetched: Fetched | None) -> int:
    return EVENT_NBYTES + (0 if fetched is None else fetched.held_nbytes)


class UnreadAnswers:
    """The unread answers of one coordinator's requests."""

    def __init__(self, following: Following, loop: asyncio.AbstractEventLoop, limits: AnswerLimits) -> None:
        self._following = following
        self.bytes = UnreadBytes()
        self._loop = loop
        self._limits = limits
        self._holders: WeakSet[RequestHandle] = WeakSet()

    def came(self, handle: RequestHandle, stage: str, nbytes: int) -> None:
        """A chunk or result of the request is here. A request that takes too much ends: this request, or others."""
        handle.hold(nbytes)
        if handle.unread_nbytes == nbytes:
            self._holders.add(handle)
        if handle.whole and handle.unread_nbytes > self._limits.of_one:
            most = f"{self._limits.of_one / MIB:g} MiB, the most that is kept of an answer that is not streamed"
            self._following.end_too_large(
                handle, Failure("stage_failed", f"its answer takes more than {most}: ask for a stream", stage)
            )
        while self.bytes.nbytes > self._limits.of_all and self._end_one():
            pass

    def _end_one(self) -> bool:
        """False: nothing is unread after all."""
        found = [
            Holder(handle, handle.unread_nbytes, not handle.whole, handle.read_at)
            for handle in self._holders
            if handle.unread_nbytes
        ]
        self.bytes.nbytes = sum(holder.nbytes for holder in found)  # handles may be gone, and never read
        if self.bytes.nbytes <= self._limits.of_all:
            return False
        self._holders = WeakSet(holder.request for holder in found)
        now = self._loop.time()
        ended = first_to_end(found, now=now)
        if ended.streamed and now - ended.read_at >= PATIENCE_S:
            self._following.end_unread(ended.request)
        else:
            most = f"{self._limits.of_all / MIB:g} MiB (OMNI_HTTP_ANSWERS_MB)"
            problem = f"answers that are not read yet take more than {most}, and this one takes most of it"
            self._following.end_too_large(ended.request, Failure("rate_limited", problem))
        return True
