"""Event files written by hand, as processes would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def line(request_id: str, stage: str, name: str, time_ns: int, **metadata: Any) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "stage": stage,
        "event_name": name,
        "timestamp_ns": time_ns,
        "run_id": "run",
        "pid": 42,
        "metadata": metadata,
    }


def write(path: Path, *lines: dict[str, Any], tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines) + tail)
    return path


def chain(request_id: str, stages: list[str], chunks: int, *, start: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """(process, event) of one request through a chain of stages with a stream on every edge; 1 ms between events."""
    found: list[tuple[str, dict[str, Any]]] = []
    now = start

    def add(stage: str, name: str, **metadata: Any) -> None:
        nonlocal now
        now += 1_000_000
        found.append((stage, line(request_id, stage, name, now, **metadata)))

    add("coordinator", "request_admission")
    before = "coordinator"
    for index, stage in enumerate(stages):
        add(stage, "stage_input_received", from_stage=before)
        add(stage, "stage_dispatch")
        add(stage, "stage_run_start")
        following = stages[index + 1] if index + 1 < len(stages) else "coordinator"
        for chunk in range(chunks):
            if not chunk:
                add(stage, "stage_first_stream_chunk_sent", to_stage=following)
            add(stage, "stage_stream_chunk_sent", to_stage=following, chunk_id=chunk)
            add(following, "stage_stream_chunk_received", from_stage=stage, chunk_id=chunk)
        add(stage, "stage_run_end")
        add(stage, "stage_complete", terminal=following == "coordinator")
        if following != "coordinator":
            add(stage, "stage_hop_sent", to_stage=following)
        before = stage
    add("coordinator", "terminal_response")
    return found
