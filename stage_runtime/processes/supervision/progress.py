"""Whether loading processes do something: output, processor time, input or output. Called by `instances`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from stage_runtime.processes.supervision import activity
from stage_runtime.processes.supervision.children import Child


class ProgressWatch:
    """When each loading process last did something."""

    def __init__(self, children: Sequence[Child]) -> None:
        now = time.monotonic()
        self._seen = {child: (activity.of_session(child.pid), now, now) for child in children}

    def idlest(self) -> tuple[Child, float] | None:
        """The unready process that has done nothing for longest, and for how many seconds."""
        now = time.monotonic()
        idle: dict[Child, float] = {}
        for child, (before, looked, moved) in self._seen.items():
            if child.ready:
                continue
            done = activity.of_session(child.pid)
            moved = max(now if done.goes_on(before, now - looked) else moved, child.last_sign)
            self._seen[child] = (done, now, moved)
            idle[child] = now - moved
        return max(idle.items(), key=lambda item: item[1], default=None)
