"""A stage that answers as voice and chat models do: text, then audio with a gap, and what it has used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import stage_runtime as omni


def talk() -> Any:
    def run(payload: omni.StagePayload) -> Iterator[Any]:
        for word in ("one", "two", "three"):
            yield omni.Chunk(omni.Text(word))
        yield omni.Chunk(omni.Audio(np.zeros(80, np.float32), 8000))
        while (until := payload.data.get("until")) and not Path(until).exists():  # longer than the sound plays
            time.sleep(0.01)
        time.sleep(0.1)
        yield omni.Chunk(omni.Audio(np.zeros(800, np.float32), 8000))
        yield omni.Result(omni.Usage(prompt_tokens=5, completion_tokens=3))

    return run
