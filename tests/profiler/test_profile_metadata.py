"""Metadata of any value: the event it belongs to is in the file, as small and as plain as JSON takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.profiler import build_report, emit, span
from stage_runtime.profiler.recording import writing
from stage_runtime.profiler.recording.recorder import Recorder, recorder
from tests.profiler import odd_values

TEXTS = st.text(st.characters(exclude_categories=[]))
NAMES = st.one_of(
    st.sampled_from(["attempt", "modality", "a"]),
    TEXTS.filter(lambda text: text not in ("event", "name", "request_id", "stage")),
)


@pytest.fixture
def mine() -> Iterator[Recorder]:
    own = Recorder()
    yield own
    own.stop()


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_bytes().splitlines()]


def recorded(recorder: Recorder, folder: Path, *metadata: dict[str, Any]) -> list[Any]:
    """The metadata of each event, as the file has it."""
    path = recorder.start("run", folder, "a")
    for number, each in enumerate(metadata):
        recorder.emit("x", f"r{number}", "a", each)
    recorder.stop()
    return [each["metadata"] for each in events(path) if each["request_id"]]


@pytest.mark.parametrize("value", [*odd_values.NUMPY, *odd_values.TORCH, *odd_values.OBJECTS], ids=lambda _: "")
def test_no_value_loses_its_event(mine: Recorder, tmp_path: Path, value: object) -> None:
    forms = ({"value": value}, {"value": [value]}, {"value": {"inner": [value, 1]}})
    assert len(recorded(mine, tmp_path, *forms)) == len(forms)


@given(st.lists(st.dictionaries(NAMES, odd_values.values, max_size=4), min_size=1, max_size=4))
def test_whatever_metadata_hold_no_event_is_lost(
    tmp_path_factory: pytest.TempPathFactory, metadata: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = recorder.start("run", folder, "a")
    for number, each in enumerate(metadata):
        emit(f"x{number}", "r", "a", **each)
        recorder.record(f"y{number}", "r", "a", each)
        with span(f"z{number}", "r", "a", **each):
            pass
    recorder.stop()
    written = events(path)
    assert written[-1]["metadata"]["dropped"] == 0
    expected = [name for number in range(len(metadata)) for name in (f"x{number}", f"y{number}", f"z{number}_start")]
    found = [each["event_name"] for each in written if each["request_id"]]
    assert [name for name in found if not name.endswith("_end")] == expected
    assert max(len(each) for each in path.read_bytes().splitlines()) <= writing.MAX_LINE
    report = build_report(folder)
    assert (report["event_count"], report["unreadable_lines"]) == (4 * len(metadata), 0)
    assert sum(each["count"] for each in report["stage_breakdown"]) == len(metadata)


def test_numbers_of_numpy_and_of_subclasses_are_plain_numbers(mine: Recorder, tmp_path: Path) -> None:
    given_values = {
        "double": np.float64(0.5),
        "half": np.float16(0.5),
        "count": np.uint64(2**64 - 1),
        "flag": np.bool_(True),
        "whole": odd_values.Whole(7),
        "share": odd_values.Share(0.5),
        "level": odd_values.Level.LOW,
        "colour": odd_values.Colour.RED,
        "large": 1 << 80,
        "long": np.longdouble(0.5),
        "complex": 1 + 2j,
    }
    assert recorded(mine, tmp_path, given_values) == [
        {
            "double": 0.5,
            "half": 0.5,
            "count": 2**64 - 1,
            "flag": True,
            "whole": 7,
            "share": 0.5,
            "level": 1,
            "colour": "red",
            "large": str(1 << 80),
            "long": "np.longdouble('0.5')",
            "complex": "(1+2j)",
        }
    ]


def test_metadata_that_are_too_long_leave_their_event_and_what_pairs_it(mine: Recorder, tmp_path: Path) -> None:
    long = {**{str(each): "n" * 2000 for each in range(20)}, "modality": "audio", "attempt": 2, "span_id": "s" * 2000}
    [found] = recorded(mine, tmp_path, long)
    assert found == {"modality": "audio", "attempt": 2, "omitted": "21 too long"}
