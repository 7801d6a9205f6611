"""Loading the engines of a process, one after the other, until all ranks have theirs. It runs on the I/O thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.base import Engine
from stage_runtime.stage.ranks.tensor_parallel import Leader
from stage_runtime.stage.stage import Stage


class EngineLoader:
    """Loads the engines of a process, once: they outlive its incarnations."""

    def __init__(
        self,
        stages: Mapping[str, Stage],
        *,
        loop: asyncio.AbstractEventLoop,
        leader: Leader | None,
        on_loaded: Callable[[], None],
        on_failed: Callable[[str, BaseException], None],
    ) -> None:
        """on_loaded: called once. on_failed: with the stage whose engine cannot be loaded."""
        self._stages = stages
        self._loop = loop
        self._leader = leader
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._left: set[str] = set(stages)  #: Stages whose engine is not loaded.
        self._complete = False  #: ``on_loaded`` was called.

    def load(self, make: Callable[[StagePlan], Engine]) -> None:
        """Load every stage's engine, each on its own thread."""
        names = deque(self._stages)

        def loaded(name: str, error: BaseException | None) -> None:
            self._loop.call_soon_threadsafe(self._stage_loaded, name, error)
            if error is None and names:
                self._stages[names.popleft()].start(make, loaded)

        if names:
            self._stages[names.popleft()].start(make, loaded)

    def check(self) -> None:
        """A stage or a follower rank has loaded its engine: was it the last one?"""
        if not self._left and not self._complete and (self._leader is None or self._leader.complete()):
            self._complete = True
            self._on_loaded()

    def _stage_loaded(self, name: str, error: BaseException | None) -> None:
        if error is not None:
            self._on_failed(name, error)
            return
        self._left.discard(name)
        self.check()
