"""Prevents slow clients from blocking a stage that others need (`rules.requests.readers`). This runs on the I/O
thread.
"""

from __future__ import annotations

import asyncio
from typing import Final
from weakref import WeakSet

from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.coordinator.binding.bindings import Bindings
from stage_runtime.coordinator.following import Following
from stage_runtime.rules.flow.streams import STREAM_WINDOW
from stage_runtime.rules.flow.watched_time import WatchedTime
from stage_runtime.rules.requests.readers import Reader, TakeUnread, decide

LOOK_EVERY_S: Final = 0.05
FULL: Final = STREAM_WINDOW * 3 // 4  # unread beyond this, a window may be full: producers are notified by the quarter


class Readers:
    """The clients of one coordinator's requests."""

    def __init__(self, following: Following, bindings: Bindings, loop: asyncio.AbstractEventLoop) -> None:
        self._following = following
        self._bindings = bindings
        self._loop = loop
        self._stalled: set[tuple[str, str]] = set()  #: (instance, stage): its workers wait for clients, others for it.
        self._holders: WeakSet[RequestHandle] = (
            WeakSet()
        )  #: Chunks of these were taken early; they may have ended since.
        self._timer: asyncio.TimerHandle | None = None
        self._watched = WatchedTime(loop.time(), LOOK_EVERY_S)

    def stalled(self, instance: str, stage: str, stalled: bool) -> None:
        if not stalled:
            self._stalled.discard((instance, stage))
            return
        self._stalled.add((instance, stage))
        if self._timer is None:
            self._look()

    def forget(self, instance: str) -> None:
        self._stalled = {each for each in self._stalled if each[0] != instance}

    def close(self) -> None:
        self._stalled.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        # Armed first: a check that raises does not stop the later ones.
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look) if self._stalled else None
        # A loop that was stopped has not written yet to the clients that read.
        was_stopped = not self._watched.look(self._loop.time())
        for instance, stage in sorted(self._stalled):
            self._make_way(instance, stage, was_stopped=was_stopped)

    def _make_way(self, instance: str, stage: str, *, was_stopped: bool) -> None:
        waited_for = {handle for handle in self._bindings.on(instance) if stage in handle.tracked.waiting}
        found = []
        for handle in waited_for | set(self._holders):
            fresh = handle.unread(stage) if handle in waited_for else 0
            reader = Reader(handle, fresh if fresh > FULL else 0, handle.early, handle.read_at)
            if reader.fresh or reader.early:
                found.append(reader)
            if not reader.early:
                self._holders.discard(handle)
        for step in decide(found, now=self._loop.time()):
            if isinstance(step, TakeUnread):
                step.request.take_early(stage)
                self._holders.add(step.request)
            elif not was_stopped:
                self._following.end_unread(step.request)
