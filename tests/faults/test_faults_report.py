"""`benchmarks.faults --relay` reports its runs, which are stand-ins here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import faults
from benchmarks.faultlab.relay_faults import FAULTS, Outcome


def outcome(relay: str, fault: str, noticed_s: float = 0.0, wrong: int = 0) -> Outcome:
    return Outcome(
        relay=relay, fault=fault, transfers=9, noticed_s=noticed_s, reason="r", wrong=wrong, held={}, exits={}
    )


@pytest.mark.parametrize(("noticed_s", "code"), [(0.01, 0), (99.0, 1)])
async def test_the_outcomes_of_a_relay_are_written_whether_or_not_a_promise_was_broken(
    tmp_path: Path, noticed_s: float, code: int
) -> None:
    async def hurt(relay: str, fault: str) -> Outcome:
        return outcome(relay, fault, noticed_s)

    async def give_up_often(relay: str, transfers: int, careless: bool = False) -> Outcome:
        return outcome(relay, "careless" if careless else "often", wrong=int(careless))

    async def slow(relay: str) -> Outcome:
        return outcome(relay, "slow")

    file = tmp_path / "found.json"
    assert await faults.relay_table("nixl", 10, str(file), hurt=hurt, slow=slow, give_up_often=give_up_often) == code
    found = msgspec.json.decode(file.read_bytes(), type=list[Outcome])
    assert [each.fault for each in found] == [*FAULTS, "slow", "often", "careless"]
    assert {each.noticed_s for each in found[: len(FAULTS)]} == {noticed_s}


def test_a_busy_machine_has_a_while_longer_to_notice_a_fault() -> None:
    late = outcome("nixl", "kill", 1.0)
    assert late.broken() == ["noticed after 1.00 s, not 0.1 s"]
    assert late.broken(slack_s=2.0) == []
    assert msgspec.structs.replace(late, closed_s=0.95).broken() == [], "the kernel took its time"
    assert outcome("nixl", "freeze", 7.0).broken(slack_s=2.0) == ["noticed after 7.00 s, not 6.0 s"]
