"""The recorder: what it writes, what it never does to its caller."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest
import torch

from stage_runtime import profiler
from stage_runtime.errors import ConfigurationError
from stage_runtime.profiler import recorder as recording
from stage_runtime.profiler.recorder import Recorder, recorder
from stage_runtime.profiler.templates import Template


@pytest.fixture
def mine() -> Iterator[Recorder]:
    own = Recorder()
    yield own
    own.stop()


@pytest.fixture
def active(tmp_path: Path) -> Iterator[Path]:
    """The process's own recorder, recording."""
    yield recorder.start("run", tmp_path, "first")
    recorder.stop()
    profiler.reset_active_stage(None)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


def of_requests(path: Path) -> list[dict[str, Any]]:
    return [each for each in lines(path) if each["request_id"]]


def test_a_line_has_the_documented_form(mine: Recorder, tmp_path: Path) -> None:
    path = mine.start("demo", tmp_path, "thinker")
    mine.emit("scheduler_first_emit", "req-123", "thinker", {"chunk_id": 0}, timestamp_ns=1717000000123456789)
    mine.stop()
    [line] = of_requests(path)
    assert path.name == f"events_thinker_{line['pid']}.jsonl"
    assert line == {
        "request_id": "req-123",
        "stage": "thinker",
        "event_name": "scheduler_first_emit",
        "timestamp_ns": 1717000000123456789,
        "run_id": "demo",
        "pid": line["pid"],
        "metadata": {"chunk_id": 0},
    }


def test_stages_of_one_process_share_the_first_ones_file(mine: Recorder, tmp_path: Path) -> None:
    path = mine.start("demo", tmp_path, "a")
    assert mine.start("demo", tmp_path, "b") == path
    with pytest.raises(ConfigurationError, match="'demo' is recorded already"):
        mine.start("other", tmp_path, "a")


@pytest.mark.parametrize(("run_id", "stops"), [("demo", True), (None, True), ("other", False)])
def test_a_stop_without_a_run_stops_whatever_is_recorded(
    mine: Recorder, tmp_path: Path, run_id: str | None, stops: bool
) -> None:
    mine.start("demo", tmp_path, "a")
    assert (mine.stop(run_id) is not None) == stops
    assert (mine.run_id is None) == stops


def test_nothing_is_written_before_the_start_and_after_the_stop(mine: Recorder, tmp_path: Path) -> None:
    mine.emit("early", "r")
    path = mine.start("demo", tmp_path, "a")
    mine.stop()
    mine.emit("late", "r")
    assert of_requests(path) == []
    assert [each["event_name"] for each in lines(path)] == ["recorder_started", "recorder_stopped"]


def test_tensors_are_summarised_and_scalars_stay_scalars(mine: Recorder, tmp_path: Path) -> None:
    path = mine.start("demo", tmp_path, "a")
    given = {"t": torch.zeros(2, 3, dtype=torch.bfloat16), "n": np.zeros(4), "s": torch.tensor(7), "f": np.float32(0.5)}
    mine.emit("x", "r", "a", given)
    mine.stop()
    [line] = of_requests(path)
    assert line["metadata"] == {
        "t": {
            "__tensor_summary__": True,
            "type": "torch.Tensor",
            "shape": [2, 3],
            "dtype": "torch.bfloat16",
            "device": "cpu",
        },
        "n": {"__tensor_summary__": True, "type": "numpy.ndarray", "shape": [4], "dtype": "float64", "device": "cpu"},
        "s": 7,
        "f": 0.5,
    }


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [
        Unprintable(),
        "x" * (1 << 20),
        {"a": {"b": {"c": {"d": 1}}}},
        list(range(10_000)),
        b"\xff" * 99,
        "\ud800",
        1 << 80,
    ],
)
def test_no_metadata_ends_the_caller_or_what_follows(mine: Recorder, tmp_path: Path, value: object) -> None:
    path = mine.start("demo", tmp_path, "a")
    mine.emit("odd", "r", "a", {"value": value})
    mine.emit("next", "r", "a")
    mine.stop()
    written = lines(path)
    assert of_requests(path)[-1]["event_name"] == "next"
    assert len(of_requests(path)) + written[-1]["metadata"]["dropped"] == 2
    assert max(len(each) for each in path.read_text().splitlines()) <= recording.MAX_LINE


def test_a_full_file_counts_what_it_drops(mine: Recorder, tmp_path: Path) -> None:
    path = mine.start("demo", tmp_path, "a", max_bytes=1000)
    for number in range(100):
        mine.emit("x", f"r{number}", "a")
    mine.stop()
    kept = of_requests(path)
    assert 0 < len(kept) < 100
    assert lines(path)[-1]["metadata"]["dropped"] == 100 - len(kept)


class NarrowDisk(io.RawIOBase):
    """Takes ``room`` bytes, then fails; as a disk that is full in the middle of a line."""

    def __init__(self, room: int) -> None:
        self.taken = bytearray()
        self.room = room

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data)[: self.room]
        if not taken:
            raise OSError(28, "No space left on device")
        self.room -= len(taken)
        self.taken += taken
        return len(taken)


def test_a_line_that_a_full_disk_cuts_spoils_no_later_line(mine: Recorder, tmp_path: Path) -> None:
    run = recording._Run("demo", tmp_path / "x", 1 << 20)
    mine._run = run
    for number in range(3):
        mine.emit("early", str(number), "a")
    disk = NarrowDisk(150)
    with pytest.raises(OSError):
        mine._flush(run, cast(BinaryIO, disk))
    disk.room = 10_000
    mine.emit("late", "r", "a")
    mine._flush(run, cast(BinaryIO, disk))
    mine._run = None
    read = []
    for line in bytes(disk.taken).splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            read.append(json.loads(line)["event_name"])
    assert read == ["early", "late"]
    assert run.dropped == 2


def test_one_event_that_is_no_json_costs_no_other(mine: Recorder, tmp_path: Path) -> None:
    path = mine.start("demo", tmp_path, "a")
    for number in range(200):
        mine.record("x", str(number), "a", {"odd": object()} if number == 100 else {"ids": "n" * 100})
    mine.emit("y", "long", "a", {str(each): "n" * 2000 for each in range(20)})
    mine.stop()
    assert [each["request_id"] for each in of_requests(path)] == [str(each) for each in range(200) if each != 100]
    assert lines(path)[-1]["metadata"]["dropped"] == 2


def test_a_disk_that_fails_is_logged_once_and_the_caller_learns_nothing(
    mine: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path("/dev/full")
    run = recording._Run("demo", path, 1 << 20)
    mine._run = run
    for _ in range(2):
        mine.emit("x", "r", "a")
        with path.open("wb", buffering=0) as file:
            try:
                mine._flush(run, file)
            except OSError as error:
                mine._report(run, error)
    mine._run = None
    assert run.dropped == 2
    assert [each.getMessage() for each in caplog.records] == [
        "events are lost (logged once per process): /dev/full: [Errno 28] No space left on device"
    ]


def test_a_folder_that_cannot_be_made_is_refused_by_name(mine: Recorder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file/below/events_a_"):
        mine.start("demo", tmp_path / "file" / "below", "a")
    assert mine.run_id is None


def test_the_active_stage_is_of_a_thread_and_of_what_copies_its_context(active: Path) -> None:
    def work() -> None:
        token = profiler.set_active_stage("thinker")
        profiler.emit("in_thread", "r")

        async def inside() -> None:
            profiler.emit("in_task", "r")
            await asyncio.to_thread(profiler.emit, "in_executor", "r")
            profiler.emit("named", "r", stage="talker")

        asyncio.run(inside())
        profiler.reset_active_stage(token)
        profiler.emit("after", "r")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(profiler.emit, "elsewhere", "r").result()
    recorder.stop()
    assert {each["event_name"]: each["stage"] for each in of_requests(active)} == {
        "in_thread": "thinker",
        "in_task": "thinker",
        "in_executor": "thinker",
        "named": "talker",
        "after": "",
        "elsewhere": "",
    }


def test_reset_without_a_token_forgets_both_bindings(active: Path) -> None:
    profiler.set_active_stage("a")
    profiler.set_active_stage("b")
    profiler.reset_active_stage(None)
    profiler.emit("x", "r")
    recorder.stop()
    assert [each["stage"] for each in of_requests(active)] == [""]


def test_a_span_closes_when_its_block_raises(active: Path) -> None:
    with pytest.raises(KeyError), profiler.span("encoder", "r", stage="image", modality="image"):
        raise KeyError("x")
    recorder.stop()
    opened, closed = of_requests(active)
    assert (opened["event_name"], closed["event_name"]) == ("encoder_start", "encoder_end")
    assert closed["metadata"] == {**opened["metadata"], "error": "KeyError"}


def test_more_than_the_queue_holds_is_dropped_and_counted(mine: Recorder, tmp_path: Path) -> None:
    path = mine.start("demo", tmp_path, "a")
    run = mine._run
    assert run is not None
    run.queue.extend([run.line("x", "r", "a", 1, {})] * recording.MAX_QUEUED)
    before = run.dropped
    mine.emit("over", "r", "a")
    dropped = run.dropped - before
    mine.stop()
    names = {each["event_name"] for each in of_requests(path)}
    assert (dropped == 1) != ("over" in names)  # the writer may have looked in between


def test_notes_are_lines_in_their_places_with_their_numbers(mine: Recorder, tmp_path: Path) -> None:
    begins = Template("left", ("one", {"from_stage": 'a"b'}), ("two", {}), number="depth")
    path = mine.start("demo", tmp_path, "left")
    mine.note(begins, "r1", 1, 7, time_ns=5)
    mine.emit("of an author", "r1", "left", {"x": 1}, timestamp_ns=6)
    for attempt in range(600):
        mine.note(begins, "r2", attempt, attempt % 300, time_ns=7)
    mine.stop()
    found = of_requests(path)
    pid = found[0]["pid"]
    same = {"stage": "left", "run_id": "demo", "pid": pid}
    one = {"event_name": "one", "metadata": {"from_stage": 'a"b', "attempt": 1}}
    two = {"event_name": "two", "metadata": {"attempt": 1, "depth": 7}}
    assert found[:2] == [
        {**same, "request_id": "r1", "timestamp_ns": 5, **one},
        {**same, "request_id": "r1", "timestamp_ns": 6, **two},
    ]
    assert found[2]["event_name"] == "of an author"
    assert [(each["metadata"]["attempt"], each["metadata"].get("depth")) for each in found[3:]] == [
        (attempt, depth) for attempt in range(600) for depth in (None, attempt % 300)
    ]
    mine.note(begins, "late", 1)
    assert of_requests(path) == found


def test_notes_beyond_the_bound_are_counted_by_their_events(mine: Recorder, tmp_path: Path) -> None:
    begins = Template("left", ("one", {}), ("two", {}))
    path = mine.start("demo", tmp_path, "left", max_bytes=2_000)
    for _ in range(100):
        mine.note(begins, "r", 1)
    mine.note(begins, "\ud800", 1)  # no JSON
    mine.stop()
    written = of_requests(path)
    assert lines(path)[-1]["metadata"]["dropped"] == 202 - len(written) > 150
