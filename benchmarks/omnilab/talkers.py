"""The talker of examples/qwen3_omni, with its steps timed: how long each takes, and what lies between two of them.

The stage's process writes the times to a file: `timed` is its factory in place of the example's. Steps are timed where
they are computed, around `ModelRunner.execute_model`.
"""

from __future__ import annotations

import itertools
import statistics
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import stage_runtime as omni
from stage_models.qwen3_omni import stages
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner

_RECORD: Final = struct.Struct("<ddddd")
_WRITTEN_AT_ONCE: Final = 16 * _RECORD.size


class Step(NamedTuple):
    """begun, ended: as `time.monotonic` has it, in all processes of a machine. requests: in it. cpu_begun, cpu_ended:
    processor seconds of the thread that computes steps.
    """

    begun: float
    ended: float
    requests: float
    cpu_begun: float
    cpu_ended: float


def timed(context: omni.StageContext, *, steps_file: str, **settings: Any) -> omni.Autoregressive:
    """The talker's stage. steps_file: the times are appended there. settings: of `stages.talker`."""
    file: BinaryIO = Path(steps_file).open("ab", buffering=_WRITTEN_AT_ONCE)
    whole = ModelRunner.execute_model

    def execute_model(runner: ModelRunner, step: Any, hold: bool = False, drafted: Any = None) -> Any:
        begun, cpu_begun = time.monotonic(), time.thread_time()
        try:
            return whole(runner, step, hold, drafted)
        finally:
            file.write(_RECORD.pack(begun, time.monotonic(), len(step.rows), cpu_begun, time.thread_time()))

    ModelRunner.execute_model = execute_model  # type: ignore[method-assign, assignment]
    return stages.talker(context, **settings)


def read(file: Path, begun: float, ended: float) -> list[Step]:
    """The steps of that time."""
    data = file.read_bytes() if file.exists() else b""
    whole = data[: len(data) - len(data) % _RECORD.size]
    return [one for one in map(Step._make, _RECORD.iter_unpack(whole)) if begun <= one.begun <= ended]


def between(steps: Sequence[Step]) -> dict[str, float]:
    """Medians of what lies between two steps of the same requests, of the largest number that there was: rows of the
    stream are there most of the time, so it is what the stage does itself. Processor time beside it, for machines are
    shared: what the thread computes between two steps.
    """
    most = max((one.requests for one in steps), default=0)
    pairs = [(one, after) for one, after in itertools.pairwise(steps) if one.requests == after.requests == most]
    if not pairs:
        return {}
    took = statistics.median(one.ended - one.begun for one, _after in pairs)
    gap = statistics.median(after.begun - one.ended for one, after in pairs)
    cpu_took = statistics.median(one.cpu_ended - one.cpu_begun for one, _after in pairs)
    cpu_gap = statistics.median(after.cpu_begun - one.cpu_ended for one, after in pairs)
    found = {"requests": most, "step_ms": 1000 * took, "between_ms": 1000 * gap, "between_of_step": gap / took}
    return {
        **found,
        "cpu_step_ms": 1000 * cpu_took,
        "cpu_between_ms": 1000 * cpu_gap,
        "cpu_of_step": cpu_gap / cpu_took,
    }
