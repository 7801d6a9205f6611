"""Shares of requests while a revision is tried, and what is counted of each."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec.types.plan import CanaryShare, PipelineRevision
from stage_runtime.rules.binding import canaries
from stage_runtime.rules.binding.canaries import Outcomes
from stage_runtime.rules.binding.membership_state import MembershipState
from stage_runtime.rules.graph import edges
from stage_runtime.wire.parts import Member

TENTH = CanaryShare(revision="new", weight=0.1)


@pytest.mark.parametrize(
    ("sets", "canary", "expected"),
    [
        pytest.param([("old", 2), ("new", 1)], None, [2, 1], id="none is tried: as the complete sets are"),
        pytest.param([("old", 2), ("new", 1)], TENTH, [0.9, 0.1], id="tried: its weight, however many sets"),
        pytest.param([("a", 1), ("old", 3), ("new", 9)], TENTH, [0.225, 0.675, 0.1], id="others divide the rest"),
        pytest.param([("a", 1), ("old", 3)], TENTH, [1, 3], id="tried, and cannot serve"),
        pytest.param([("new", 3)], TENTH, [3], id="tried, and no other can serve"),
    ],
)
def test_shares(sets: list[tuple[str, int]], canary: CanaryShare | None, expected: list[float]) -> None:
    assert canaries.shares(sets, canary) == pytest.approx(expected)


def revision(name: str) -> PipelineRevision:
    return PipelineRevision(
        revision=name,
        units={"a": name, "b": name},
        groups={"a": "a", "b": "b"},
        stages={"first": "a", "last": "b"},
        entry="first",
        terminals=("last",),
        edges=(("first", "last", "normal"),),
    )


def served(*, instances: dict[str, int]) -> MembershipState:
    """Revisions with so many ready instances of each group."""
    revisions = [revision(name) for name in instances]
    state = MembershipState(revisions, chance=lambda: 0.0)
    for one in revisions:
        for number in range(instances[one.revision]):
            for group in ("a", "b"):
                name = f"{one.revision}-{group}{number}"
                stages = tuple(stage for stage, its in one.stages.items() if its == group)
                member = Member(name, group, group, one.revision, f"tcp://{name}:1", {}, stages)
                state.join(member, edges.of_revision(one)[group])
                state.mark(name, ready=True)
    return state


def bound(state: MembershipState, requests: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for _ in range(requests):
        chosen, bindings = state.bind()
        assert {one.partition("-")[0] for one in bindings.values()} == {chosen.revision}, "a request has one revision"
        found[chosen.revision] += 1
        state.unbind(bindings)
    return found


@pytest.mark.proves("canary")
@given(weight=st.integers(1, 99), old=st.integers(1, 4), new=st.integers(1, 4), coordinators=st.integers(1, 3))
def test_each_coordinator_gives_a_tried_revision_its_share(weight: int, old: int, new: int, coordinators: int) -> None:
    total: Counter[str] = Counter()
    for _ in range(coordinators):
        state = served(instances={"old": old, "new": new})
        state.share(CanaryShare(revision="new", weight=weight / 100))
        total += bound(state, 200)
    assert abs(total["new"] - 2 * weight * coordinators) <= coordinators


def test_a_revision_that_was_taken_back_gets_nothing_while_another_can_serve() -> None:
    state = served(instances={"old": 1, "new": 3})
    assert bound(state, 4) == {"new": 3, "old": 1}
    state.share(CanaryShare(revision="new", weight=0.0))
    assert bound(state, 20) == {"old": 20}
    state.mark("old-a0", draining=True)
    assert bound(state, 3) == {"new": 3}
    state.share(None)
    state.mark("old-a0", draining=False)
    assert bound(state, 4) == {"new": 3, "old": 1}


@given(st.lists(st.floats(1e-4, 1e5)))
def test_times_are_counted_to_five_per_cent(times: list[float]) -> None:
    outcomes = Outcomes()
    for seconds in times:
        outcomes.complete(seconds)
    outcomes.fail()
    report = outcomes.report()
    assert (report["completed"], report["failed"]) == (len(times), 1)
    assert msgspec.json.decode(msgspec.json.encode(report))["failed"] == 1
    told = [seconds for seconds, count in report["times"] for _ in range(count)]
    assert len(told) == len(times)
    for seconds, told_s in zip(sorted(times), told, strict=True):
        assert abs(told_s / seconds - 1) < 0.05


def test_a_time_of_nothing_is_counted() -> None:
    outcomes = Outcomes()
    outcomes.complete(0.0)
    [(seconds, count)] = outcomes.report()["times"]
    assert (0 < seconds < 0.001, count) == (True, 1)
