"""The recorder: what it writes, what it never does to its caller."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest
import torch

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime import profiler
from stage_runtime.errors import ConfigurationError
from stage_runtime.profiler import event_files
from stage_runtime.profiler.recording import writing
from stage_runtime.profiler.recording.recorder import Recorder, recorder
from stage_runtime.profiler.recording.templates import Template
from stage_runtime.stage.context import RankContext


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
    assert max(len(each) for each in path.read_text().splitlines()) <= writing.MAX_LINE


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


@pytest.mark.proves("profile-faults")
def test_a_line_that_a_full_disk_cuts_spoils_no_later_line(tmp_path: Path) -> None:
    disk = NarrowDisk(20)
    file = writing.AppendedFile(tmp_path / "x", lambda lines: lines.count(b"\n"), cast(BinaryIO, disk))
    with pytest.raises(OSError):
        file.append(b'{"early": 0}\n{"early": 1}\n{"early": 2}\n')
    assert (file.lost, file.cut) == (2, True)
    with pytest.raises(OSError):
        file.append(b'{"none": 0}\n')
    assert (file.lost, file.cut) == (3, True)
    disk.room = 10_000
    file.append(b'{"late": 0}\n')
    file.append(b'{"late": 1}\n')
    assert bytes(disk.taken) == b'{"early": 0}\n{"early\n{"late": 0}\n{"late": 1}\n'
    assert (file.lost, file.cut) == (3, False)


class FullDisk:
    """Takes nothing more."""

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("cut", [b"", b'{"cut": "in the mid'])
def test_the_last_line_takes_the_place_of_events_when_a_disk_is_full(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "x"
    made = b"".join(b'{"event": %d}\n' % number for number in range(1000, 1400))
    path.write_bytes(made + cut)
    file = writing.AppendedFile(path, lambda lines: lines.count(b"\n"), cast(BinaryIO, FullDisk()))
    file.lost, file.cut = 7, bool(cut)
    file.end(lambda: b'{"dropped": %d}\n' % file.lost)
    kept = path.read_bytes().splitlines()
    whole = made.splitlines()
    assert kept == [*whole[: len(kept) - 1], b'{"dropped": %d}' % file.lost]
    assert file.lost == 7 + len(whole) - (len(kept) - 1) and len(kept) > 300


def test_a_file_without_room_for_a_last_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"event": 1}\n')
    file = writing.AppendedFile(path, lambda lines: lines.count(b"\n"), cast(BinaryIO, FullDisk()))
    with pytest.raises(OSError, match="No space left"):
        file.end(lambda: b'{"dropped": 1}\n')
    assert path.read_bytes() == b'{"event": 1}\n'


def test_one_event_that_is_no_json_costs_no_other(mine: Recorder, tmp_path: Path) -> None:
    path = mine.start("demo", tmp_path, "a")
    for number in range(200):
        mine.record("x", "\ud800" if number == 100 else str(number), "a", {"ids": "n" * 100})
    mine.emit("y", "long" * 5000, "a")
    mine.stop()
    assert [each["request_id"] for each in of_requests(path)] == [str(each) for each in range(200) if each != 100]
    assert lines(path)[-1]["metadata"]["dropped"] == 2


def test_a_disk_that_fails_is_logged_once_and_the_caller_learns_nothing(
    mine: Recorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "events"
    path = mine.start("demo", folder, "a")
    path.with_name(path.name.replace(".jsonl", ".notes.jsonl")).mkdir()
    for number in range(3):
        mine.note(Template("a", ("x", {}), ("y", {})), f"r{number}", 1)
    mine.emit("z", "r", "a")
    mine.stop()
    assert [each["event_name"] for each in of_requests(path)] == ["z"]
    assert lines(path)[-1]["metadata"]["dropped"] == 6
    assert mine.missing.startswith("6 events were not written: [Errno 21]")
    [logged] = caplog.records
    assert logged.getMessage().startswith(f"profiler events are dropped (logged once per process): {path}: [Errno 21]")


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


def test_metadata_may_have_any_name_but_stage(active: Path) -> None:
    metadata: dict[str, Any] = dict.fromkeys(("event", "name", "request_id", "self", "metadata", "timestamp_ns"), 1)
    profiler.emit("x", "r", **metadata)
    with profiler.span("y", "r", **metadata):
        pass
    context = RankContext(
        StagePlan(name="a", group="a", factory="x:y"),
        model_path=None,
        model_revision=None,
        allocate=lambda shape, dtype: None,
        progress=lambda *_shown: None,
        emit=recorder.emit,
    )
    context.emit("z", "r", **metadata)
    recorder.stop()
    found = {each["event_name"]: each["metadata"] for each in of_requests(active)}
    assert set(found) == {"x", "y_start", "y_end", "z"}
    assert all(facts.items() >= metadata.items() for facts in found.values())


class Failing:
    """Traces that cannot end a span."""

    def working(self, request_id: str, stage: str, traceparent: str | None) -> None: ...

    def begin(self, *_: Any) -> Callable[[BaseException | None], None]:
        def end(error: BaseException | None) -> None:
            raise RuntimeError("no end")

        return end


def test_a_span_that_cannot_be_traced_ends_no_caller(active: Path) -> None:
    recorder.traces = Failing()
    try:
        with profiler.span("encoder", "r", "a"):
            pass
    finally:
        recorder.traces = None
    recorder.stop()
    assert [each["event_name"] for each in of_requests(active)] == ["encoder_start", "encoder_end"]


@pytest.mark.long
def test_more_than_the_queue_holds_is_dropped_and_counted(mine: Recorder, tmp_path: Path) -> None:
    twice = Template("a", ("over", {}), ("over", {}))
    path = mine.start("demo", tmp_path, "a", max_bytes=1 << 34)
    run = mine._run
    assert run is not None
    run.lines.extend([run.line("x", "r", "a", 1, {})] * writing.MAX_QUEUED)
    run.notes.extend([(twice.id, "", 1, 1, 1)] * writing.MAX_QUEUED)
    before = run.dropped
    mine.emit("over", "r", "a")
    mine.note(twice, "r", 1)
    dropped = run.dropped - before
    mine.stop()
    names = [each["event_name"] for each in of_requests(path)]
    assert names.count("over") == 3 - dropped  # the writer may have looked in between


@pytest.mark.parametrize("attempts", [True, False])
@pytest.mark.parametrize(("number", "numbered"), [(None, -1), ("depth", -1), ("depth", 0), ("depth", 1)])
def test_a_notes_number_is_in_the_metadata_of_its_event(
    mine: Recorder, tmp_path: Path, attempts: bool, number: str | None, numbered: int
) -> None:
    given: list[tuple[str, dict[str, str]]] = [("one", {}), ("two", {"kind": "x"}), ("three", {})]
    template = Template("a", *given, number=number, numbered=numbered, attempts=attempts)
    path = mine.start("demo", tmp_path, "a")
    mine.note(template, "r", 4, 7)
    mine.stop()
    wanted: list[dict[str, object]] = [dict(metadata) for _, metadata in given]
    for metadata in wanted:
        metadata |= {"attempt": 4} if attempts else {}
    if number is not None:
        wanted[numbered]["depth"] = 7
    assert [each["metadata"] for each in of_requests(path)] == wanted


def test_notes_become_lines_with_their_numbers(mine: Recorder, tmp_path: Path) -> None:
    begins = Template("left", ("one", {"from_stage": 'a"b'}), ("two", {}), number="depth")
    plain = Template("right", ("three", {"kind": "x"}), attempts=False)
    counted = Template("right", ("four", {}), attempts=False, number="count")
    path = mine.start("demo", tmp_path, "left")
    mine.note(begins, "r1", 1, 7, time_ns=5)
    mine.emit("of an author", "r1", "left", {"x": 1}, timestamp_ns=8)
    mine.note(plain, 'r"1', 1, 7, time_ns=9)
    mine.note(counted, "r1", 1, 7, time_ns=10)
    for attempt in range(600):
        mine.note(begins, "r2", attempt, attempt % 300, time_ns=11)
    mine.stop()
    found = of_requests(path)
    same = {"run_id": "demo", "pid": found[0]["pid"]}
    first = [each for each in found if each["request_id"] != "r2"]
    assert sorted(first, key=lambda each: each["timestamp_ns"]) == [
        {
            **same,
            "request_id": "r1",
            "stage": "left",
            "event_name": "one",
            "timestamp_ns": 5,
            "metadata": {"from_stage": 'a"b', "attempt": 1},
        },
        {
            **same,
            "request_id": "r1",
            "stage": "left",
            "event_name": "two",
            "timestamp_ns": 6,
            "metadata": {"attempt": 1, "depth": 7},
        },
        {
            **same,
            "request_id": "r1",
            "stage": "left",
            "event_name": "of an author",
            "timestamp_ns": 8,
            "metadata": {"x": 1},
        },
        {
            **same,
            "request_id": 'r"1',
            "stage": "right",
            "event_name": "three",
            "timestamp_ns": 9,
            "metadata": {"kind": "x"},
        },
        {
            **same,
            "request_id": "r1",
            "stage": "right",
            "event_name": "four",
            "timestamp_ns": 10,
            "metadata": {"count": 7},
        },
    ]
    assert [
        (each["metadata"]["attempt"], each["metadata"].get("depth")) for each in found if each["request_id"] == "r2"
    ] == [(attempt, depth) for attempt in range(600) for depth in (None, attempt % 300)]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]  # of lines only
    mine.note(begins, "late", 1)
    assert of_requests(path) == found


def test_notes_beyond_the_bound_are_counted_by_their_events(mine: Recorder, tmp_path: Path) -> None:
    begins = Template("left", ("one", {}), ("two", {}))
    path = mine.start("demo", tmp_path, "left", max_bytes=20_000)
    for _ in range(1000):
        mine.note(begins, "r", 1)
    mine.note(begins, "\ud800", 1)  # no JSON
    mine.stop()
    written = of_requests(path)
    assert lines(path)[-1]["metadata"]["dropped"] == 2002 - len(written) > 1500
    assert path.stat().st_size < 20_000 + writing.MAX_LINE


def test_a_request_id_that_is_no_text_costs_no_other_note(mine: Recorder, tmp_path: Path) -> None:
    begins = Template("left", ("one", {}), ("two", {}))
    path = mine.start("demo", tmp_path, "left")
    for request_id in ("r1", "\ud800", "r2"):
        mine.note(begins, request_id, 1)
    mine.stop()
    assert [each["request_id"] for each in of_requests(path)] == ["r1", "r1", "r2", "r2"]
    assert lines(path)[-1]["metadata"]["dropped"] == 2


def test_the_notes_of_a_process_that_was_killed_are_read(mine: Recorder, tmp_path: Path) -> None:
    """Its files are as they are while it records."""
    begins = Template("left", ("one", {}), ("two", {}), number="depth")
    path = mine.start("demo", tmp_path / "lives", "left", facts={"incarnation": "i"})
    for number in range(100):
        mine.note(begins, f"r{number}", 1, number, time_ns=number)
    mine.emit("three", "r0", "left", timestamp_ns=5)
    run = mine._run
    assert run is not None
    run.flush()
    shutil.copytree(tmp_path / "lives", tmp_path / "killed")
    with next((tmp_path / "killed").glob("*.notes.jsonl")).open("ab") as file:
        file.write(b'[1,"r5",\n[999999,"r5",1,1,1]\n[0')  # cut off, of no template, cut off
    mine.stop()
    killed, stopped = event_files.read(tmp_path / "killed"), event_files.read(tmp_path / "lives")
    assert len(killed.processes) == len(stopped.processes) == 1
    assert (killed.count, killed.processes[0].unreadable) == (201, 3)
    assert killed.requests == stopped.requests
    assert (killed.processes[0].stopped, stopped.processes[0].stopped) == (False, True)
    assert event_files.read(path).requests == stopped.requests
    [notes] = (tmp_path / "killed").glob("*.notes.jsonl")
    assert event_files.read(notes).count == 200


def test_notes_without_room_for_their_lines_stay_and_are_read(mine: Recorder, tmp_path: Path) -> None:
    begins = Template("left", ("one", {}), ("two", {}))
    path = mine.start("demo", tmp_path, "left")
    path.with_name(path.name + ".settled").symlink_to("/dev/full")
    mine.note(begins, "r", 1)
    mine.stop()
    assert lines(path)[-1]["metadata"]["notes"] is True
    found = event_files.read(tmp_path)
    assert [each.name for each in found.requests["r"]] == ["one", "two"]
    assert mine.start("demo", tmp_path, "left") == path  # again, with room
    mine.note(begins, "r", 2)
    mine.stop()
    assert [each["metadata"]["attempt"] for each in of_requests(path)] == [1, 1, 2, 2]
    assert event_files.read(tmp_path).count == 4
