"""docs/profiling.md: what it says of an author's own threads is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import stage_runtime as omni
from stage_runtime.profiler.recording.recorder import recorder
from tests.docs.blocks import blocks


def test_the_pages_executor_records_for_its_stage(tmp_path: Path) -> None:
    [block] = [block for block in blocks("docs/profiling.md", "python") if "set_active_stage" in block]
    made: dict[str, Any] = {}
    exec(block, made)
    path = recorder.start("run", tmp_path, "first")
    try:
        with made["decoders"] as decoders:
            decoders.submit(omni.emit, "decode", "r").result()
    finally:
        recorder.stop()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["stage"] for each in events if each["event_name"] == "decode"] == ["recognise"]
