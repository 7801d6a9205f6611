"""A stage that one revision of a pipeline makes worse: on its processes' path as `worse_stages`."""

from __future__ import annotations

import os
from typing import Any

import stage_runtime as omni


def say(fault: str = "") -> Any:
    """Answers with its revision's word. fault: ``raises`` fails each request, ``dies`` ends the process with it."""

    def run(payload: omni.StagePayload) -> Any:
        if fault == "raises":
            raise ValueError("this revision is worse")
        if fault == "dies":
            os._exit(3)
        return omni.Text(fault or "good")

    return run
