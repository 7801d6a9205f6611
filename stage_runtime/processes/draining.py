"""Draining a stage process: until nothing is bound to it and nothing is left to send. Called by `processes.stage`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final

log = logging.getLogger(__name__)

IDLE_EVERY_S: Final = 0.02


class Drain:
    """One process's."""

    def __init__(self) -> None:
        self._unbound: set[str] = set()  #: Coordinators that have nothing bound to this incarnation.

    def unbound(self, coordinator: str) -> None:
        """A coordinator says that nothing of its requests is bound here any more."""
        self._unbound.add(coordinator)

    def reset(self) -> None:
        """The process takes another incarnation: what coordinators said was of the one before."""
        self._unbound.clear()

    async def run(
        self, *, coordinators: Callable[[], Collection[str]], idle: Callable[[], bool], most_s: float
    ) -> None:
        """Until every coordinator says that nothing is bound here and nothing is left to send, or for ``most_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + most_s
        while loop.time() < deadline:
            if self._unbound.issuperset(coordinators()) and idle():
                return
            await asyncio.sleep(IDLE_EVERY_S)
        log.warning("not drained within %.0f s", most_s)
