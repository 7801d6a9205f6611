"""Ends a stage process whose loop makes no progress though it has work. Long computing counts as progress.

`stage.Stage.steps` defines progress. Called by `processes.stages.stage_process`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from stage_runtime import diagnostics
from stage_runtime.rules.flow.watched_time import WatchedTime
from stage_runtime.stage.stage import Stage

LOOK_MOST_S: Final = 5.0  # between two looks


class Watchdog:
    """Watches the stages of one process."""

    def __init__(
        self, stages: Mapping[str, Stage], *, stuck_after_s: float, stuck: Callable[[str, BaseException], None]
    ) -> None:
        """stuck: called once, with the stage that makes no progress."""
        self._stages = stages
        self._stuck_after_s = stuck_after_s
        self._look_every_s = min(stuck_after_s / 10, LOOK_MOST_S)
        self._stuck = stuck
        self._watched: WatchedTime | None = None
        self._watched_s = 0.0  #: The time of the looks, in which this process was not stopped.
        self._seen: dict[str, tuple[int, float]] = {}  #: Stage -> its steps, and since when.
        self._armed = False  #: A loader may keep the GIL as long as it likes: the supervisor sees what it does.

    def arm(self) -> None:
        """All engines are loaded: watch from now on."""
        self._armed = True
        self._rearm()

    async def run(self) -> None:
        """Returns when a stage is stuck, after the log got the stacks of all threads.

        C code prints the stacks and ends the process where something keeps the GIL for so long that this loop cannot
        run.
        """
        try:
            while True:
                await asyncio.sleep(self._look_every_s)
                if not self._armed:
                    continue
                self._rearm()
                name = self.look(time.monotonic())
                if name is not None:
                    diagnostics.print_stacks()
                    problem = f"no progress for {self._stuck_after_s:.0f} s with unfinished requests"
                    self._stuck(name, TimeoutError(problem))
                    return
        finally:
            diagnostics.cancel_end()

    def look(self, now: float) -> str | None:
        """The stage that is stuck, by this look and those before it. now: of `time.monotonic`."""
        self._watched = self._watched or WatchedTime(now, self._look_every_s)
        self._watched_s += self._watched.look(now)
        for name, stage in self._stages.items():
            steps, since = self._seen.get(name, (-1, self._watched_s))
            if not stage.computing or stage.steps != steps:
                self._seen[name] = (stage.steps, self._watched_s)
            elif self._watched_s - since > self._stuck_after_s:
                return name
        return None

    def _rearm(self) -> None:
        """Armed again at each check: a loop that cannot check for so long is ended."""
        diagnostics.end_later(self._stuck_after_s + self._look_every_s)
