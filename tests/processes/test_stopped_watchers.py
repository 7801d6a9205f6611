"""A process that was stopped itself (SIGSTOP, a paused container) does not count that time against what it watches."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from stage_runtime.processes.stages.watchdog import Watchdog
from stage_runtime.processes.supervision.progress import ProgressWatch
from tests.patience import patience
from tests.processes.test_child_processes import child

STUCK_S = 100.0
LOOK_S = 5.0  # of a watchdog that waits for so long


class Computing:
    """A stage with a request."""

    computing = True

    def __init__(self) -> None:
        self.steps = 7


def watchdog(stage: Any) -> Watchdog:
    return Watchdog({"voice": stage}, stuck_after_s=STUCK_S, stuck=lambda *_: None)


def test_a_stage_that_was_stopped_with_its_watchdog_is_not_stuck() -> None:
    stage = Computing()
    watching = watchdog(stage)
    looks = [watching.look(at) for at in (0.0, LOOK_S, 2 * LOOK_S)]
    paused = 2 * LOOK_S + 10 * STUCK_S
    looks += [watching.look(paused + number * LOOK_S) for number in range(10)]
    stage.steps += 1
    looks += [watching.look(paused + (10 + number) * LOOK_S) for number in range(19)]
    assert looks == [None] * 32


def test_a_stage_that_makes_no_step_is_stuck_though_its_process_was_stopped_now_and_then() -> None:
    watching, now, looks = watchdog(Computing()), 0.0, 0
    while watching.look(now) is None:
        looks += 1
        now += 10 * STUCK_S if looks % 4 == 0 else LOOK_S
        assert looks < 100
    assert looks * LOOK_S > STUCK_S


async def test_a_process_that_loads_and_was_stopped_with_its_supervisor_is_not_idle_for_that_time() -> None:
    up = asyncio.Event()
    started = child("import time; print('up', flush=True); time.sleep(600)", on_line=lambda *_: up.set())
    await asyncio.wait_for(up.wait(), patience(60.0))
    began = time.monotonic()
    watch = ProgressWatch([started], began)
    for second in range(1, 600):
        watch.idlest(began + second)
    found = watch.idlest(began + 600)
    assert found is not None and found[0] is started and found[1] > 500
    assert watch.idlest(began + 5000) == found
    later = watch.idlest(began + 5001)
    assert later is not None and later[1] == found[1] + 1
    started.kill()
    await asyncio.wait_for(started.exited, patience(60.0))
