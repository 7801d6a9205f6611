"""How `benchmarks/operator_size.py` reads its figures from the API server's audit log."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import operator_size
from benchmarks.operator_size import Figure
from benchmarks.operatorlab.operated import USER, Audit


def line(user: str, verb: str, resource: str, began_s: int, ended_s: int, *, name: str = "p0", code: int = 200) -> str:
    resource, _, subresource = resource.partition("/")
    return json.dumps(
        {
            "verb": verb,
            "user": {"username": user},
            "objectRef": {"resource": resource, "subresource": subresource, "namespace": "size-0", "name": name},
            "responseStatus": {"code": code},
            "requestReceivedTimestamp": f"2026-01-01T00:00:{began_s:02}.000000Z",
            "stageTimestamp": f"2026-01-01T00:00:{ended_s:02}.000000Z",
        }
    )


def test_a_delay_goes_from_an_edit_to_the_end_of_the_first_write_of_that_pipelines_service(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.write_text("before the benchmark\n")
    audit = Audit(log)
    lines = [
        line(USER, "patch", "services", 0, 1),  # before any edit
        line("admin", "patch", "omnipipelines", 2, 3),
        line("admin", "patch", "omnipipelines", 2, 3, name="p1"),
        line(USER, "patch", "services", 4, 5, name="p2"),  # another's
        line(USER, "patch", "omnipipelines/status", 4, 5),
        line("admin", "patch", "services", 4, 5),  # another's hand
        line(USER, "patch", "services", 5, 7),
        line(USER, "patch", "services", 8, 9),  # once more
    ]
    with log.open("a") as file:
        file.write("\n".join(lines) + '\n{"verb": "a line that is still being wri')
    observed = audit.new()
    assert len(observed) == len(lines)
    assert operator_size.delays(observed) == [5.0]
    assert audit.new() == []


def test_the_lease_is_not_counted_among_the_operators_writes(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.touch()
    audit = Audit(log)
    written = [
        line(USER, "update", "leases", 0, 1),
        line(USER, "create", "pods", 0, 1),
        line("a", "create", "pods", 0, 1),
    ]
    log.write_text("\n".join(written) + "\n")
    assert [each.resource for each in operator_size.own(audit.new())] == ["pods"]


def test_a_figure_beyond_its_limit_is_marked() -> None:
    assert Figure("a", 1.0, "s").holds and Figure("a", 1.0, "s", 1.0).holds
    beyond = Figure("a", 1.01, "s", 1.0)
    assert not beyond.holds and "TOO MUCH" in str(beyond)
