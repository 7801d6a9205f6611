"""A stage that says how far it has loaded, and then waits for a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import stage_runtime as omni


def talk(context: omni.StageContext, until: str) -> Callable[[omni.StagePayload], omni.Text]:
    context.progress("model.bin", 700, 2800, "B")
    while not Path(until).exists():
        time.sleep(0.01)
    return lambda payload: omni.Text("hello")
