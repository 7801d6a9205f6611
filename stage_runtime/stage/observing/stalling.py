"""Notifies consumers when full windows block all workers of a stage, to prevent a deadlock (`rules.flow.turns`).

The consumer of client streams is the coordinator; it is notified while other requests wait here
(`rules.requests.readers`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.engines.gates import Parking
from stage_runtime.stage.work import RequestWork

PATIENCE_S: Final = 0.05  # a consumer that is only slower reopens its window in time: no notification
OTHERS_EVERY_S: Final = 0.2  # a stage whose workers wait for clients looks so often whether other requests wait here

Notify = Callable[[str, str, bool], None]  #: (target stage, its instance, stalled or not)


class Stalling:
    """Detects when all workers of one stage are blocked. Workers wake it; everything else is on the loop."""

    def __init__(
        self,
        parking: Parking,
        *,
        workers: Callable[[], int],
        works: Callable[[], Iterable[RequestWork]],
        others: Callable[[], bool],
        notify: Notify,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._parking = parking
        self._workers = workers
        self._works = works
        self._others = others
        self._notify = notify
        self._loop = loop
        self._looking = False
        self._notified: set[tuple[str, str]] = set()
        parking.on_change = self._changed

    def _changed(self) -> None:
        """A worker has come to a gate, or left one. Any thread may call it."""
        if not self._looking and (self._notified or self._parking.at_gates >= self._workers()):
            self._looking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._begin_look)

    def _begin_look(self) -> None:
        if self._notified and self._parking.at_gates < self._workers():
            self._notify_moving()
        self._loop.call_later(PATIENCE_S, self._look, self._parking.left)

    def _look(self, left: int) -> None:
        self._looking = False
        if self._parking.at_gates < self._workers():
            self._notify_moving()
        elif self._parking.left != left:
            self._notify_moving()
            self._changed()
        else:
            clients = self._notify_stalled()
            if self._parking.left != left:  # a worker left while the notification was sent
                self._changed()
            elif clients:
                self._looking = True
                self._loop.call_later(OTHERS_EVERY_S, self._look, left)

    def _notify_stalled(self) -> bool:
        """Returns whether a coordinator is among the consumers: its notification depends on what else waits here."""
        clients, others = False, self._others()
        for target, peer in set(self._consumers()):
            notified = (target, peer) in self._notified
            stalled = others or target != COORDINATOR
            clients = clients or target == COORDINATOR
            if stalled != notified:
                (self._notified.add if stalled else self._notified.discard)((target, peer))
                self._notify(target, peer, stalled)
        return clients

    def _consumers(self) -> Iterator[tuple[str, str]]:
        """The consumers whose window is full: (target, its instance)."""
        for work in self._works():
            for target in work.full_targets():
                peer = work.owner if target == COORDINATOR else work.bindings.get(target)
                if peer is not None:
                    yield target, peer

    def _notify_moving(self) -> None:
        notified, self._notified = self._notified, set()
        for target, peer in notified:
            self._notify(target, peer, False)
