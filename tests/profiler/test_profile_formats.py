"""The report's formats: what they hold, that they can be read."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from stage_runtime.profiler import event_files, views
from stage_runtime.profiler.__main__ import main
from stage_runtime.profiler.formats import html, perfetto, table
from tests.profiler.event_files import chain, line, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number in range(3):
        events = chain(f"r{number}", ["a", "b"], 2, start=number * 1_000_000)
        for home in ("coordinator", "a", "b"):
            write(
                tmp_path / "run" / f"{home}{number}" / "events_x_1.jsonl",
                *(event for stage, event in events if stage == home),
            )
    return tmp_path / "run"


@pytest.mark.parametrize("form", ["table", "json", "html", "perfetto"])
def test_each_format_is_written_to_a_file(run: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(main, [str(run), "--format", form, "--out", str(out)])
    assert (done.exit_code, done.output) == (0, "")
    assert out.stat().st_size > 1000


def test_the_table_has_every_stage_and_hop(run: Path) -> None:
    done = CliRunner().invoke(main, [str(run)])
    assert done.output.startswith("run: 3 requests, ")
    assert re.search(r"│ a +│ b +│ payload +│ +3 │", done.output)
    assert re.search(r"│ b +│ coordinator +│ stream +│ +6 │", done.output)


def test_a_run_without_requests_says_so_and_has_its_name(tmp_path: Path) -> None:
    write(tmp_path / "e.jsonl", line("", "a", "recorder_started", 1, incarnation="i"))
    found = event_files.read(tmp_path)
    shown = table.text(views.report_of(found))
    assert shown.startswith("run: 0 requests") and "No request was recorded" in shown
    assert "No request was recorded" in html.page(found)


def test_figures_of_the_page_are_of_the_requests_that_the_table_counts(tmp_path: Path) -> None:
    for number in range(5):
        events = [event for _, event in chain(f"r{number}", ["a"], 1, start=number)]
        first, last = (1, len(events)) if number == 3 else (0, len(events) - (number == 4))
        write(tmp_path / f"{number}.jsonl", *events[first:last])
    found = event_files.read(tmp_path)
    report = views.report_of(found)
    [counted] = [row for row in report["stage_breakdown"] if row["close_event"] == "terminal_response"]
    data = json.loads(html.page(found).partition("const data = ")[2].partition(";\n")[0])
    assert (len(data["durations"]), max(data["durations"])) == (counted["count"], counted["max_ms"]) == (3, 9.0)
    assert data["partial_count"] == 2
    assert "5 requests (2 without a recorded beginning or end)" in table.text(report)


def test_the_json_report_has_the_three_views(run: Path) -> None:
    report = json.loads(CliRunner().invoke(main, [str(run), "--format", "json"]).output)
    assert report["request_count"] == 3
    assert {"timeline", "stage_breakdown", "hop_breakdown"} <= report.keys()


def test_an_empty_folder_and_a_file_that_cannot_be_written_are_errors_of_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments in ([str(tmp_path / "empty")], [str(run), "--out", str(tmp_path / "no" / "out")]):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 1
        assert done.output.startswith("Error: ") and done.output.count("\n") == 1


def test_the_page_needs_nothing_from_elsewhere_and_no_name_ends_its_script(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><!--"
    write(tmp_path / "e.jsonl", line(name, "a", "x", 1), line(name, "a", "y", 2))
    page = html.page(event_files.read(tmp_path))
    assert page.count("</script>") == 1
    assert "<!--" not in page
    outside = re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
    assert outside == []


def test_the_trace_nests_and_its_arrows_have_both_ends(run: Path) -> None:
    entries = list(perfetto.trace(event_files.read(run)))
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for each in entries:
        if each["ph"] == "X":
            tracks.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    slices = {(each["pid"], each["tid"], each["ts"]) for each in entries if each["ph"] == "X"}
    for each in entries:  # Perfetto draws an arrow between slices that are open at its ends, and no other
        assert each["ph"] not in "sf" or (each["pid"], each["tid"], each["ts"]) in slices
        assert set(each) >= {"ph", "name", "pid"} and (each["ph"] == "M" or {"ts", "tid"} <= set(each))
        assert each["ph"] in "XisfM"
    starts = {each["id"] for each in entries if each["ph"] == "s"}
    assert starts == {each["id"] for each in entries if each["ph"] == "f"}
    assert len(starts) == 3 * (1 + 2 * 2)
