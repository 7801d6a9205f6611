"""A step that fails leaves a file: its batch, lengths and blocks, and what the steps before it gave.

Called by the core.
No texts, and no token ids unless a stage's setting asks for them: files outlive requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import Row, SchedulerOutput

MOST_FILES: Final = 16  # of a folder; the oldest are deleted
LAST_STEPS: Final = 8
FOLDER: Final = "OMNI_STEP_DUMPS"  #: The variable that names the folder.

log = logging.getLogger(__name__)


def default_folder() -> Path:
    """A folder of this user's: others must not read what requests were."""
    return Path(os.environ.get(FOLDER) or Path(tempfile.gettempdir(), f"omnipipeline-steps-{os.getuid()}"))


class StepDumps:
    """The dumps of one engine core."""

    def __init__(self, folder: Path | None = None, *, tokens: bool = False) -> None:
        """folder: None: `default_folder`. tokens: token ids are written, too."""
        self._folder = folder or default_folder()
        self._tokens = tokens
        self._last: deque[dict[str, Any]] = deque(maxlen=LAST_STEPS)
        self._written = 0

    def note(self, number: int, step: SchedulerOutput, output: ModelOutput) -> None:
        """A step is over. number: which one it is."""
        known = {"step": number, "rows": len(step.rows), "sampled": len(output.sampled), "failed": len(output.failed)}
        self._last.append({**known, "tokens": dict(output.sampled)} if self._tokens else known)

    def write(self, number: int, step: SchedulerOutput, failed: Mapping[str, str], scheduler: Scheduler) -> Path | None:
        """failed: request id -> why. Returns: the file, which the log names; None: it cannot be written."""
        found = {
            "step": number,
            "failed": dict(failed),
            "rows": [self._row(row) for row in step.rows],
            "scheduler": {
                "running": scheduler.running,
                "waiting": scheduler.waiting,
                "held": scheduler.held,
                "blocks": scheduler.pool.capacity,
                "blocks_free": scheduler.pool.free,
                "limits": msgspec.to_builtins(scheduler.limits),
            },
            "last_steps": list(self._last),
        }
        self._written += 1
        path = self._folder / f"step-{time.time_ns()}-{os.getpid()}-{self._written}.json"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(found)))
            self._prune()
        except OSError as error:
            log.warning("a step failed; its batch cannot be written to %s: %s", path, error)
            return None
        log.error("a step of %d requests failed for %d of them: see %s", len(step.rows), len(failed), path)
        return path

    def _row(self, row: Row) -> dict[str, Any]:
        request = row.request
        known = {
            "request": request.id,
            "start": row.start,
            "count": row.count,
            "samples": row.samples,
            "unknown": row.unknown,
            "prompt_tokens": request.prompt_tokens,
            "generated": request.generated,
            "state": request.state.value,
            "preemptions": request.preemptions,
            "blocks": list(row.blocks),
        }
        return {**known, "tokens": list(request.tokens)} if self._tokens else known

    def _prune(self) -> None:
        """Names begin with the time, so they are in its order."""
        for path in sorted(self._folder.glob("step-*.json"))[:-MOST_FILES]:
            with contextlib.suppress(FileNotFoundError):  # another engine prunes, too
                path.unlink()
