"""The files of one process's profiles: no process and no run overwrites those of another."""

from __future__ import annotations

import gzip
import json
import os
import socket
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stage_runtime.profiler import paths
from stage_runtime.profiler.recording.children import Children, PathOf
from stage_runtime.profiler.recording.recorder import Recorder
from stage_runtime.profiler.recording.session import STARTED, STOPPED, ProfileSession, ProfileSettings


def session(root: Path, incarnation: str, *, own_folder: bool) -> ProfileSession:
    return ProfileSession(root, ["a"], incarnation=lambda: incarnation, own_folder=own_folder, recorder=Recorder())


def record(one: ProfileSession, run_id: str, template: str) -> set[Path]:
    """Returns: the files that the session has of the run."""
    settings = ProfileSettings(run_id=run_id, event_dir=f"{run_id}/events", torch_template=template)
    assert one.start(settings) == {"a": STARTED}
    assert one.stop(run_id) == {"a": STOPPED}
    return {Path(path) for path, _ in one.files(run_id)}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{run_id}/traces/{stage}_{pid}", "run/traces/{own}/a_{pid}"),
        ("mine", "{own}/mine_a_{pid}"),
        ("{incarnation}/{stage}", "{incarnation}/a"),
        ("{stage}", "{own}/a_a_{pid}"),
        ("x/{host}-{incarnation}", "x/{host}-{incarnation}"),
    ],
)
def test_traces_of_replicas_that_share_a_volume_lie_beside_each_other(
    tmp_path: Path, template: str, expected: str
) -> None:
    """Pods have equal process ids, as two sessions of this process have."""
    host, found = socket.gethostname(), {}
    for incarnation in ("aa", "bb"):
        one = session(tmp_path, incarnation, own_folder=True)
        files = record(one, "run", template)
        one.close()
        own = f"{host}-{incarnation}"
        path = expected.format(own=own, pid=os.getpid(), incarnation=incarnation, host=host)
        found[incarnation] = tmp_path / f"{path}.trace.json.gz"
        assert files == {tmp_path / "run" / "events" / own / f"events_a_{os.getpid()}.jsonl", found[incarnation]}
    assert found["aa"] != found["bb"]
    assert all("traceEvents" in json.loads(gzip.decompress(each.read_bytes())) for each in found.values())


def test_a_trace_overwrites_none_that_is_there(tmp_path: Path) -> None:
    one = session(tmp_path, "aa", own_folder=False)
    files = [record(one, run_id, "mine/{stage}-{pid}") for run_id in ("one", "two", "three")]
    one.close()
    traces = [path.name for found in files for path in found if path.name.endswith(".trace.json.gz")]
    assert traces == [f"a-{os.getpid()}{suffix}.trace.json.gz" for suffix in ("", "_2", "_3")]
    assert sorted(each.name for each in (tmp_path / "mine").iterdir()) == sorted(traces)


class Engines:
    """Two processes of this one, which answer at once or not at all."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.paths: list[Path] = []

    def start_traces(self, path_of: PathOf, switches: Mapping[str, bool]) -> Future[None]:
        self.paths = [path_of(rank, 100 + rank) for rank in (0, 1)]
        return self._done(None)

    def stop_traces(self) -> Future[list[Path]]:
        for path in self.paths:
            path.touch()
        return self._done(self.paths)

    def _done(self, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._error is None:
            future.set_result(value)
        else:
            future.set_exception(self._error)
        return future


def test_traces_of_processes_that_this_one_started_are_files_of_the_run(tmp_path: Path) -> None:
    children = Children()
    children.add(Engines())
    one = ProfileSession(tmp_path, ["a"], incarnation=lambda: "aa", recorder=Recorder(), children=children)
    files = record(one, "run", "{stage}-{rank}-{pid}")
    one.close()
    names = {path.name.removesuffix(paths.TRACE_SUFFIX) for path in files if path.name.endswith(paths.TRACE_SUFFIX)}
    assert names == {f"a-0-{os.getpid()}", "a-engine-0-100", "a-engine-1-101"}


def test_a_process_that_cannot_be_traced_costs_only_its_own_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    children = Children()
    children.add(Engines(OSError("the disk is full")))
    one = ProfileSession(tmp_path, ["a"], incarnation=lambda: "aa", recorder=Recorder(), children=children)
    files = record(one, "run", "{stage}-{rank}-{pid}")
    one.close()
    traces = [path.name for path in files if path.name.endswith(paths.TRACE_SUFFIX)]
    assert traces == [f"a-0-{os.getpid()}{paths.TRACE_SUFFIX}"]
    assert "the disk is full" in caplog.text


class Ended(Engines):
    """The event loop by which they are called is closed."""

    def _done(self, value: Any) -> Future[Any]:
        raise RuntimeError("Event loop is closed")


def test_an_engine_that_has_ended_costs_no_trace_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    children = Children()
    children.add(Ended())
    children.add(Engines())
    one = ProfileSession(tmp_path, ["a"], incarnation=lambda: "aa", recorder=Recorder(), children=children)
    files = record(one, "run", "{stage}-{rank}-{pid}")
    one.close()
    names = {path.name.removesuffix(paths.TRACE_SUFFIX) for path in files if path.name.endswith(paths.TRACE_SUFFIX)}
    assert names == {f"a-0-{os.getpid()}", "a-engine-0-100", "a-engine-1-101"}
    assert caplog.text.count("Event loop is closed") == 2


def test_the_folder_of_all_runs_is_made_for_this_user_alone(tmp_path: Path) -> None:
    one = session(tmp_path / "new" / "profiles", "aa", own_folder=False)
    record(one, "run", "{stage}")
    one.close()
    assert (tmp_path / "new" / "profiles").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("owner", "around", "foreign"),
    [
        (1000, 0o1777, False),  # ours
        (0, 0o1777, False),
        (1001, 0o1777, True),
        (1001, 0o0757, True),
        (1001, 0o0755, False),  # whoever may write there gave it to somebody on purpose
        (1001, 0o2775, False),
    ],
)
def test_a_folder_is_foreign_where_anybody_can_have_made_it(owner: int, around: int, foreign: bool) -> None:
    assert paths.is_foreign(owner, around, {0, 1000}) is foreign


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
@pytest.mark.parametrize("link", [False, True])
def test_nothing_is_recorded_in_a_folder_that_another_user_has_made(tmp_path: Path, link: bool) -> None:
    tmp_path.chmod(0o1777)
    root, own = tmp_path / "profiles", tmp_path / "own"
    own.mkdir()
    if link:
        root.symlink_to(own)
    else:
        root.mkdir()
    os.chown(root, 12345, 12345, follow_symlinks=False)
    one = session(root, "aa", own_folder=False)
    answer = one.start(ProfileSettings(run_id="run", event_dir="run/events"))
    one.close()
    problem = f"{root} belongs to user 12345, who could replace what is written there"
    assert answer == {"a": f"failed: {problem}: set OMNI_PROFILE_ROOT to a folder of your own"}
    assert not list(own.iterdir()) and not list(root.iterdir())


def ends(path: Path) -> list[str]:
    """Why the recorder of this file stopped, each time."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event["metadata"]["why"] for event in events if event["event_name"] == "recorder_stopped"]


def test_a_start_ends_another_run_that_is_still_recorded(tmp_path: Path) -> None:
    """Its coordinator is gone, and the next one knows nothing of it."""
    one = session(tmp_path, "aa", own_folder=False)
    old = ProfileSettings(run_id="old", event_dir="old/events", torch_template="old", max_seconds=9)
    assert one.start(old) == {"a": STARTED}
    refused = one.start(ProfileSettings(run_id="bad", event_dir="/elsewhere"))
    assert (refused["a"].startswith("failed"), one.recording) == (True, "old")
    assert one.start(ProfileSettings(run_id="new", event_dir="new/events")) == {"a": STARTED}
    assert one.recording == "new"
    assert one.expire() is None
    events, trace = (Path(path) for path, _ in one.files("old"))
    assert (ends(events), trace.suffixes[-2:]) == (["another run starts"], [".json", ".gz"])
    assert one.stop("new") == {"a": STOPPED}
    one.close()


def test_a_start_of_the_same_run_lets_it_go_on(tmp_path: Path) -> None:
    now = 0.0
    one = ProfileSession(tmp_path, ["a"], incarnation=lambda: "aa", recorder=Recorder(), monotonic=lambda: now)
    settings = ProfileSettings(run_id="run", event_dir="run/events", max_seconds=9)
    assert one.start(settings) == {"a": STARTED}
    assert one.start(msgspec.structs.replace(settings, max_seconds=20)) == {"a": STARTED}
    now = 10.0
    assert one.expire() is None
    elsewhere = msgspec.structs.replace(settings, event_dir="elsewhere")
    assert one.start(elsewhere) == {"a": STARTED}
    now = 19.0
    assert one.expire() == "run"
    files = [Path(path) for path, _ in one.files("run")]
    assert {path.parent: ends(path) for path in files} == {
        tmp_path / "run" / "events": ["another run starts"],
        tmp_path / "elsewhere": ["its time is over"],
    }
    one.close()
