"""Event files that no recorder has written: cut, binary, of wrong types, of other times. The rest is reported."""

from __future__ import annotations

import gc
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.profiler import build_report, event_files, events, views
from stage_runtime.profiler.formats import html, perfetto, table
from tests.profiler.event_files import chain, line, write

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
NAMES = st.sampled_from([*(name for pair in events.INTERVALS for name in pair), *events.HOPS, "clock_offset"])
FACTS = st.dictionaries(
    st.sampled_from([*events.DISTINCT_BY, "offset_ns", "uncertainty_ns", "incarnation", "dropped", "rank"]), VALUES
)
LIKE_EVENTS = st.fixed_dictionaries(
    {
        "request_id": st.sampled_from(["", "r", "s"]) | VALUES,
        "stage": st.sampled_from(["a", "b"]) | VALUES,
        "event_name": NAMES | VALUES,
        "timestamp_ns": st.integers(0, 2**62) | st.integers(0, 100) | VALUES,
        "metadata": FACTS | VALUES,
    },
    optional={"run_id": VALUES, "pid": VALUES, "more": VALUES},
)
LINES = LIKE_EVENTS.map(lambda value: json.dumps(value).encode()) | VALUES.map(lambda value: json.dumps(value).encode())


def everything(folder: Path) -> dict[str, Any]:
    """The report, after each format was made of the same files."""
    found = event_files.read(folder)
    html.page(found)
    perfetto.write(found, io.BytesIO())
    report = views.report_of(found)
    table.text(report)
    return report


@pytest.mark.proves("profile-faults")
@given(lines=st.lists(LINES | st.binary(max_size=40), max_size=12))
def test_whatever_a_file_holds_its_readable_events_are_reported(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "events_x_1.jsonl").write_bytes(b"\n".join(lines))
    good = chain("good", ["a", "b"], 2, start=10**18)
    write(folder / "events_y_2.jsonl", *(event for _, event in good))
    report = everything(folder)
    [kept] = [each for each in report["timeline"] if each["request_id"] == "good"]
    assert len(kept["events"]) == len(good)


@pytest.mark.parametrize(
    ("tail", "unreadable"),
    [
        ('{"request_id": "r", "stage": "a", "event_na', 1),
        ("\x00\x01\x02\n\x00", 2),
        ("\n\n   \n", 0),
        ("[]\nnull\n7\n", 3),
        ("[" * 100_000 + "\n", 1),
        ("x" * (3 << 20) + "\n", 1),
        (json.dumps(line("r", "a", "x", -1)), 1),
        (json.dumps(line("r", "a", "x", 2**63)), 1),
        (json.dumps({**line("r", "a", "x", 1), "timestamp_ns": "now"}), 1),
        (json.dumps({**line("r", "a", "x", 1), "metadata": [1]}), 1),
        (json.dumps({**line("r", "a", "x", 1), "stage": None, "run_id": None, "metadata": None}), 0),
        (json.dumps(line("", "c", "clock_offset", 1, incarnation="i", offset_ns=2**61)), 1),
        (json.dumps(line("", "c", "recorder_stopped", 1, dropped="many")), 1),
    ],
)
def test_a_line_that_is_no_event_is_counted(tmp_path: Path, tail: str, unreadable: int) -> None:
    write(tmp_path / "e.jsonl", line("r", "a", "stage_run_start", 1), tail=tail)
    assert everything(tmp_path)["unreadable_lines"] == unreadable


def test_events_of_the_past_and_of_the_future_are_shown_where_they_are(tmp_path: Path) -> None:
    now = 1_700_000_000 * 10**9
    write(
        tmp_path / "e.jsonl",
        line("r", "coordinator", "request_admission", now),
        line("r", "a", "early", now - 10**9),
        line("r", "coordinator", "terminal_response", now + 10**9),
        line("r", "a", "late", now + 3 * 10**9),
    )
    [request] = everything(tmp_path)["timeline"]
    assert [each["t_rel_ms"] for each in request["events"]] == [-1000.0, 0.0, 1000.0, 3000.0]
    assert request["duration_ms"] == 1000.0


def test_what_is_no_event_file_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "e.jsonl", line("r", "a", "x", 1))
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("{}")
    report = everything(tmp_path)
    assert (report["event_count"], len(report["processes"])) == (1, 2)


def calls(folder: Path, chunks: int) -> int:
    """How many calls a report of one request of so many chunks takes, without those of the garbage collector."""
    folder.mkdir()
    write(folder / "e.jsonl", *(event for _, event in chain("r", ["a", "b"], chunks)))
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()
    sys.setprofile(counted)
    try:
        report = everything(folder)
    finally:
        sys.setprofile(before)
        gc.enable()
    assert sum(each["count"] for each in report["hop_breakdown"]) == 2 * chunks + 1
    return count


def test_one_request_of_many_chunks_takes_work_in_proportion_to_them(tmp_path: Path) -> None:
    """Counted in calls, so that no busy machine matters."""
    assert calls(tmp_path / "many", 1200) < 4.5 * calls(tmp_path / "few", 300)


def test_a_table_obeys_no_control_character_of_a_client(tmp_path: Path) -> None:
    write(tmp_path / "e.jsonl", line("\x1b[2J\x07id", "a\x1b[31m", "encoder_start", 1), line("q", "a", "x", 2))
    text = table.text(build_report(tmp_path))
    assert "\x1b" not in text and "\x07" not in text
