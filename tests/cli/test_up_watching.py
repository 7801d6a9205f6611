"""`omni up --watch`: a change that could not be taken over is shown, and the next one is."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

from stage_runtime.cli.serving import up
from tests.patience import patience


class Changing:
    """`local.LocalPipeline` whose disk is full at the first change."""

    notices: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.updates = 0

    async def update(self, changed: set[Path]) -> str:
        self.updates += 1
        if self.updates == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return "nothing to restart"


class Notes:
    """`screens.Screen` that keeps its notes."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def note(self, line: str) -> None:
        self.lines.put_nowait(line)


async def test_a_change_that_met_a_full_disk_is_shown_and_the_next_one_is_taken_over(tmp_path: Path) -> None:
    file, screen = tmp_path / "pipeline.yaml", Notes()
    file.write_text("1")
    pipeline: Any = Changing()
    watching = asyncio.create_task(up._watch(pipeline, file, screen))  # type: ignore[arg-type]
    shown = []
    for content in ("22", "333"):
        await asyncio.sleep(0)  # it has seen the file as it was
        file.write_text(content)
        noted = asyncio.create_task(screen.lines.get())
        await asyncio.wait([noted, watching], timeout=patience(60.0), return_when=asyncio.FIRST_COMPLETED)
        assert noted.done(), "it watches no more"
        shown.append(noted.result())
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert shown == [
        "pipeline.yaml: what ran goes on: OSError: [Errno 28] No space left on device",
        "pipeline.yaml: nothing to restart",
    ]
