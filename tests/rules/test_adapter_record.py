"""Reports of the adapters that an instance has loaded and dropped: the latest, within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from stage_runtime.rules.members.adapters import MOST_CHANGES, AdapterRecord
from stage_runtime.wire import codec
from stage_runtime.wire.frames import FRAME_LIMIT, PROTOCOL, Frame
from stage_runtime.wire.messages import Ready


def test_the_latest_change_of_each_adapter_counts() -> None:
    record = AdapterRecord()
    assert record.done("s", "load_adapter", {"name": "sql", "path": "/a"})
    assert record.done("s", "load_adapter", {"name": "tone", "path": "/t"})
    assert record.done("s", "unload_adapter", {"name": "sql"})
    assert record.done("other", "load_adapter", {"name": "sql", "path": "/b"})
    assert record.report() == {"s": {"tone": "/t", "sql": None}, "other": {"sql": "/b"}}
    assert list(record.report()["s"]) == ["tone", "sql"]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("reset_prefix_cache", {"name": "sql", "path": "/a"}),
        ("load_adapter", {"name": "sql"}),
        ("load_adapter", {"name": 7, "path": "/a"}),
        ("load_adapter", {"name": "a b", "path": "/a"}),
        ("load_adapter", {"name": "sql", "path": 7}),
        ("load_adapter", {"name": "sql", "path": "/" * 4097}),
        ("unload_adapter", {}),
    ],
)
def test_other_operations_are_not_recorded(operation: str, arguments: dict[str, Any]) -> None:
    record = AdapterRecord()
    assert not record.done("s", operation, arguments)
    assert record.report() == {}


def test_a_full_record_fits_into_a_frame_that_is_read() -> None:
    record = AdapterRecord()
    for number in range(MOST_CHANGES + 1):
        assert record.done("s", "load_adapter", {"name": f"n{number}", "path": f"/{number}" + "\N{EURO SIGN}" * 4000})
    report = record.report()
    assert 1 < len(report["s"]) < MOST_CHANGES and f"n{MOST_CHANGES}" in report["s"] and "n0" not in report["s"]
    encoded = codec.encode(Frame(PROTOCOL, "a", "", 1, 1, 1, 0, Ready(report)))
    assert len(encoded) < FRAME_LIMIT and codec.decode(encoded).message == Ready(report)
