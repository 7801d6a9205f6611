"""A request as lines: of a profile's events the same as of the coordinator's record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stage_runtime.profiler import event_files, lines, views
from tests.profiler.event_files import chain, line, write


def drawn(folder: Path, *events: dict[str, Any]) -> list[lines.Line]:
    write(folder / "e.jsonl", *events)
    [moments] = event_files.read(folder).requests.values()
    return lines.of_events(moments, views.paired(moments).hops)


def test_events_give_the_lines_that_the_record_of_the_same_request_gives(tmp_path: Path) -> None:
    found = drawn(tmp_path, *(event for _, event in chain("r", ["a", "b"], 2)))
    stages = {
        "a": {"start_ms": 1.0, "end_ms": 10.0, "queue_ms": 2.0, "run_ms": 7.0},
        "b": {"start_ms": 12.0, "end_ms": 21.0, "queue_ms": 2.0, "run_ms": 7.0},
    }
    hops = [
        {"source": source, "target": target, "kind": kind, "start_ms": start, "end_ms": start + 1.0}
        for source, target, kind, start in (
            ("coordinator", "a", "payload", 0.0),
            ("a", "b", "stream", 5.0),
            ("a", "b", "payload", 11.0),
            ("b", "coordinator", "stream", 16.0),
            ("b", "coordinator", "payload", 21.0),
        )
    ]
    assert found == lines.of_record(stages, hops)


def test_a_stage_that_has_not_ended_lasts_as_long_as_its_request_and_says_so(tmp_path: Path) -> None:
    events = [event for _, event in chain("r", ["a"], 1)][:5]
    [_, stage] = drawn(tmp_path, *events)
    assert (stage.label, stage.start_ms, stage.end_ms) == ("a (no end)", 1.0, 4.0)


def test_attempts_of_one_stage_have_lines_of_their_own(tmp_path: Path) -> None:
    events = [
        line("r", "a", name, time * 1_000_000, attempt=attempt)
        for attempt, name, time in (
            (1, "stage_input_received", 1),
            (1, "stage_run_start", 2),
            (2, "stage_input_received", 5),
            (2, "stage_run_start", 6),
            (2, "stage_complete", 8),
        )
    ]
    assert [each.label for each in drawn(tmp_path, *events)] == ["a (no end)", "a, attempt 2"]
