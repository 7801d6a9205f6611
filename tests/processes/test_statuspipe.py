"""A child's report arrives whole, and never kills the child."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

import msgspec
import pytest

from stage_runtime.engines.making import resolving
from stage_runtime.engines.threads import stage_threads
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.supervision import statuspipe

PIPE_NBYTES = 64 << 10  # as Linux makes it


@pytest.mark.parametrize(
    "event",
    [
        statuspipe.Loading(stage="thinker", message="weights 3/14"),
        statuspipe.Loaded(),
        statuspipe.Registered(),
        statuspipe.Serving(url="http://127.0.0.1:8000"),
        statuspipe.StartFailed(stage="thinker", error="ValueError: no", traceback="Traceback…"),
        statuspipe.Draining(),
        statuspipe.Stats(gauges={"relay_shm_sent_bytes": 1.0}),
    ],
)
def test_every_event_survives_the_pipe(event: statuspipe.Status) -> None:
    reader, writer = os.pipe()
    statuspipe.report(writer, event)
    os.close(writer)
    with open(reader, "rb") as lines:
        assert [statuspipe.parse(line) for line in lines] == [event]


def test_a_factory_failure_keeps_the_end_of_a_traceback_that_is_longer_than_the_pipe() -> None:
    reader, writer = os.pipe()
    statuspipe.report(writer, statuspipe.failed(RuntimeError("x" * 200_000 + "the cause"), stage="s"))
    os.close(writer)
    with open(reader, "rb") as lines:
        event = statuspipe.parse(lines.read())
    assert isinstance(event, statuspipe.StartFailed)
    assert event.traceback.rstrip().endswith("the cause")


@pytest.mark.parametrize("character", ["é", "\U0001f600", "\x01", '"', "\udcff", "\n"], ids=ascii)
def test_a_failure_fits_into_the_pipe_whatever_characters_it_has(character: str) -> None:
    for text in (character * 200_000, f"first line{character}" + "x" * 990 + character * 200_000):
        event = statuspipe.failed(RuntimeError(f"{text}the cause"), stage="s")
        assert event.traceback.rstrip().endswith("the cause")
        line = msgspec.json.encode(event)
        assert len(line) < PIPE_NBYTES and statuspipe.parse(line) == event


def test_stats_are_left_out_while_a_line_is_unread_so_that_they_never_fill_the_pipe() -> None:
    reader, writer = os.pipe()
    for number in range(3):
        statuspipe.report_stats(writer, {"relay_late_releases": float(number)})
    statuspipe.report(writer, statuspipe.Draining())
    first = os.read(reader, 1 << 16)
    statuspipe.report_stats(writer, {"sends_queued": 3.0})
    os.close(writer)
    with open(reader, "rb") as lines:
        events = [statuspipe.parse(line) for line in (*first.splitlines(), *lines)]
    assert events == [
        statuspipe.Stats(gauges={"relay_late_releases": 0.0}),
        statuspipe.Draining(),
        statuspipe.Stats(gauges={"sends_queued": 3.0}),
    ]


def test_lines_of_several_threads_are_never_mixed() -> None:
    reader, writer = os.pipe()
    long = "y" * 9000  # above PIPE_BUF, so one write would not be atomic

    def write_events(name: str) -> None:
        for _ in range(20):
            statuspipe.report(writer, statuspipe.Loading(stage=name, message=long))

    workers = [threading.Thread(target=write_events, args=(f"s{number}",)) for number in range(4)]
    for thread in workers:
        thread.start()

    def close() -> None:
        for thread in workers:
            thread.join()
        os.close(writer)

    closer = threading.Thread(target=close)
    closer.start()
    with open(reader, "rb") as lines:
        events = [statuspipe.parse(line) for line in lines]
    closer.join()
    assert len(events) == 80
    assert all(isinstance(event, statuspipe.Loading) and event.message == long for event in events)


def test_reporting_to_a_dead_supervisor_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    statuspipe.report(writer, statuspipe.Loaded())
    os.close(writer)


def test_reporting_without_a_pipe_is_no_error() -> None:
    statuspipe.report(None, statuspipe.Loaded())


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"{}",
        b'{"event":"nonsense"}',
        b'{"event":"serving"}',
        b"\xff\x00",
        b'{"event":"loading","stage":"\xff"}',
        b'{"event":"loaded","x":' + b"[" * 100_000,
    ],
    ids=lambda line: str(line[:40]),
)
def test_a_line_of_somebody_else_is_dropped(line: bytes) -> None:
    assert statuspipe.parse(line) is None


def test_a_signal_handler_may_report_while_its_thread_reports() -> None:
    reader, writer = os.pipe()
    with statuspipe._lock:  # where the signal finds the thread
        statuspipe.report(writer, statuspipe.Draining())
    os.close(writer)
    with open(reader, "rb") as lines:
        assert statuspipe.parse(lines.readline()) == statuspipe.Draining()


def test_what_is_wrong_with_a_configuration_is_reported_in_one_line_without_our_traceback() -> None:
    try:
        resolving.resolve("json:lodas", field="stages.a.factory")
    except ConfigurationError as error:
        failure = statuspipe.failed(error, stage="a")
    assert failure == statuspipe.StartFailed(
        stage="a", error="stages.a.factory: 'json' has no 'lodas'; did you mean loads?"
    )


def test_an_author_s_traceback_begins_with_their_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "authors_module.py").write_text("import json\ntry:\n    json.loads('{')\nfinally:\n    1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    caught: list[BaseException] = []
    resolve = functools.partial(resolving.resolve, "authors_module:fn", field="x")
    stage_threads.start("as a stage's", resolve, crashed=caught.append).join()  # no frame of a test's before ours
    failure = statuspipe.failed(caught[0])
    frames = [line for line in failure.traceback.splitlines() if line.startswith("  File")]
    assert [Path(line.split('"')[1]).name for line in frames][:2] == ["authors_module.py", "__init__.py"]
    assert frames[-1].startswith(f'  File "{tmp_path}/authors_module.py", line 5')  # of both exceptions of the chain
    assert "stage_runtime" not in failure.traceback
    assert "importlib" not in failure.traceback


def test_a_traceback_of_ours_alone_is_whole() -> None:
    try:
        statuspipe.parse(None)  # type: ignore[arg-type]
    except TypeError as error:
        assert "statuspipe.py" in statuspipe.failed(error).traceback
