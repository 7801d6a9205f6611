"""The files of one process's profiles: no process and no run overwrites those of another."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path

import pytest

from stage_runtime.profiler.recorder import Recorder
from stage_runtime.profiler.session import STARTED, STOPPED, ProfileOrder, ProfileSession


def session(root: Path, incarnation: str, *, own_folder: bool) -> ProfileSession:
    return ProfileSession(root, ["a"], incarnation=lambda: incarnation, own_folder=own_folder, recorder=Recorder())


def record(one: ProfileSession, run_id: str, template: str) -> set[Path]:
    """Returns: the files that the session has of the run."""
    order = ProfileOrder(run_id=run_id, event_dir=f"{run_id}/events", torch_template=template)
    assert one.start(order) == {"a": STARTED}
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
