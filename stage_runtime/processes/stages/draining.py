"""Draining a stage process: until nothing is bound to it and nothing is left to send. Called by `stage_process`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final

log = logging.getLogger(__name__)

IDLE_EVERY_S: Final = 0.02


class StageDrain:
    """The drain of one stage process."""

    def __init__(self) -> None:
        self._unbound: set[str] = set()  #: Coordinators that have nothing bound to this incarnation.

    def unbound(self, coordinator: str) -> None:
        """A coordinator has reported that none of its requests is bound here any more."""
        self._unbound.add(coordinator)

    def reset(self) -> None:
        """The process takes another incarnation: reports of coordinators were about the one before."""
        self._unbound.clear()

    async def run(
        self, *, coordinators: Callable[[], Collection[str]], idle: Callable[[], bool], most_s: float
    ) -> None:
        """Wait until every coordinator has reported and nothing is left to send, for ``most_s`` at most."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + most_s
        while loop.time() < deadline:
            if self._unbound.issuperset(coordinators()) and idle():
                return
            await asyncio.sleep(IDLE_EVERY_S)
        log.warning("not drained within %.0f s", most_s)
