"""When a revision that is tried gets a larger share, and when it is taken back: a table, and what always holds."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_operator.changes.deciding import canary
from omnipipeline_operator.changes.deciding.canary import Attempts, Canary
from omnipipeline_spec.cluster import AbortOn
from omnipipeline_spec.cluster import Canary as Policy
from tests.operator.test_status import NOW

POLICY = Policy(weight=20, step_seconds=60, abort_on=AbortOn(error_rate=0.05, p99_seconds=2.0))
RUNS = Canary(revision="new", weight=20, since=NOW - 30, message="gets 20 % of the requests")
DUE = Canary(revision="new", weight=20, since=NOW - 60)
FULL = Canary(revision="new", weight=100, since=NOW - 60)
INTERRUPTED = Canary(
    revision="new",
    message="is tried from the beginning once old serves again: the pipeline was suspended meanwhile",
)
BACK = Canary(revision="new", weight=0, since=NOW - 60, aborted=True, message="why")


def quick(completed: int, failed: int = 0, slow: int = 0) -> Attempts:
    times = {0.1: completed - slow, 5.0: slow}
    return Attempts(completed=completed, failed=failed, times={each: count for each, count in times.items() if count})


GOOD, NONE = quick(1000, failed=10), Attempts()


def decided(before: Canary | None = RUNS, new: Attempts = NONE, old: Attempts = GOOD, **more: object) -> Canary | None:
    given = {"update": "new", "serving": "old", "reached": True, "filled": True, "now": NOW, **more}
    return canary.decide(POLICY, before, attempts={"new": new, "old": old}, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(decided(None), Canary(revision="new", weight=20), id="a new revision waits for its pods"),
        pytest.param(decided(BACK, update="newer"), Canary(revision="newer", weight=20), id="another edit is tried"),
        pytest.param(decided(update="old"), None, id="the edit was undone"),
        pytest.param(decided(FULL, update="new", serving="new"), None, id="it serves"),
        pytest.param(decided(BACK), BACK, id="taken back, and it stays so"),
        pytest.param(decided(BACK, new=quick(100)), BACK, id="taken back, however good what ends later is"),
        pytest.param(decided(), RUNS, id="its step is not over"),
        pytest.param(
            decided(msgspec.structs.replace(RUNS, since=NOW + 3600)),
            msgspec.structs.replace(RUNS, since=NOW),
            id="the clock was set back: its step begins anew",
        ),
        pytest.param(decided(DUE, reached=False), DUE, id="no coordinator answers: it gets no more"),
        pytest.param(decided(DUE, filled=False), DUE, id="the pods of its share are not ready, or the roll is paused"),
        pytest.param(decided(FULL, new=quick(0, failed=99)), FULL, id="it has everything: nothing to go back to"),
        pytest.param(decided(suspended=True), INTERRUPTED, id="nothing runs: nothing can be compared"),
        pytest.param(decided(FULL, suspended=True), FULL, id="it was judged, and serves after the pause"),
        pytest.param(decided(BACK, suspended=True), BACK, id="a pause forgets no judgement"),
        pytest.param(decided(None, suspended=True), Canary(revision="new", weight=20), id="no trial was under way"),
        pytest.param(decided(INTERRUPTED, suspended=True), INTERRUPTED, id="the pause goes on"),
        pytest.param(decided(INTERRUPTED, restored=False), INTERRUPTED, id="the old one is not back yet"),
        pytest.param(decided(INTERRUPTED), Canary(revision="new", weight=20), id="tried from the beginning"),
        pytest.param(
            decided(msgspec.structs.replace(INTERRUPTED, revision="other"), restored=False),
            INTERRUPTED,
            id="an edit in the pause is tried, too",
        ),
        pytest.param(decided(INTERRUPTED, update="old"), None, id="the edit was undone in the pause"),
    ],
)
def test_the_next_step(found: Canary | None, expected: Canary | None) -> None:
    assert found == expected


def test_it_begins_when_coordinators_can_bind_to_it_with_the_weight_of_that_moment() -> None:
    waits = Canary(revision="new", weight=5)
    assert decided(waits, reached=False) == Canary(revision="new", weight=20)
    assert decided(waits) == Canary(revision="new", weight=20, since=NOW, message="gets 20 % of the requests")


def test_a_step_adds_the_weight_until_it_has_everything_and_says_what_was_seen() -> None:
    found, weights = DUE, []
    while found.weight < 100:
        stepped = decided(found, new=quick(50), now=(found.since or 0) + 60)
        assert stepped is not None
        weights.append(stepped.weight)
        found = stepped
    assert weights == [40, 60, 80, 100]
    assert found.message == (
        "gets 100 % of the requests after 0 of 50 attempts failed (p99 0.1 s), "
        "with the old revision 10 of 1010 attempts failed (p99 0.1 s)"
    )


@pytest.mark.parametrize(
    ("new", "old", "why"),
    [
        pytest.param(quick(0, failed=4), GOOD, None, id="too few to decide anything"),
        pytest.param(quick(0, failed=5), GOOD, "5 of 5 attempts failed", id="all fail"),
        pytest.param(quick(8, failed=2), GOOD, None, id="2 of 10 may be chance"),
        pytest.param(quick(5, failed=5), GOOD, "5 of 10 attempts failed", id="half fails"),
        pytest.param(quick(85, failed=15), GOOD, "15 of 100 attempts failed", id="three times the bound"),
        pytest.param(quick(93, failed=7), GOOD, None, id="hardly more than the bound"),
        pytest.param(quick(50, failed=50), quick(500, failed=500), None, id="both fail alike"),
        pytest.param(quick(10, failed=90), quick(500, failed=500), "90 of 100", id="both fail, the new one far more"),
        pytest.param(quick(50, failed=50), quick(2, failed=2), "50 of 100", id="the old one has too few to excuse it"),
        pytest.param(quick(0, failed=9), Attempts(), "9 of 9", id="the old one has none"),
        pytest.param(quick(100, slow=1), GOOD, None, id="one in a hundred may be slow"),
        pytest.param(quick(100, slow=9), GOOD, "9 of 100 took longer than 2 s", id="nine are slow"),
        pytest.param(quick(6, slow=6), GOOD, "6 of 6 took longer than 2 s", id="all are slow"),
        pytest.param(quick(100, slow=50), quick(1000, slow=500), None, id="both are slow alike"),
        pytest.param(quick(1000), quick(1000, failed=900), None, id="better than the old one"),
    ],
)
def test_what_is_worse(new: Attempts, old: Attempts, why: str | None) -> None:
    found = canary.worse(POLICY.abort_on, new, old)
    assert (found is None) == (why is None), found
    assert why is None or (found is not None and why in found)
    abort = decided(new=new, old=old)
    assert abort is not None and abort.aborted == (why is not None)
    if why is not None:
        assert (abort.weight, abort.since) == (0, NOW)
        assert why in abort.message and abort.message.startswith("revision new was taken back, old serves: ")
        assert "omni restart" in abort.message and len(abort.message) < 1024


def test_without_a_bound_times_decide_nothing() -> None:
    assert canary.worse(AbortOn(), quick(100, slow=100), GOOD) is None


attempts = st.builds(
    lambda completed, failed, slow: quick(completed, failed, min(completed, slow)),
    st.integers(0, 500),
    st.integers(0, 500),
    st.integers(0, 500),
)


@given(new=attempts, old=attempts, before=st.sampled_from([RUNS, DUE, FULL, BACK, Canary(revision="new")]))
def test_shares_only_grow_or_end_and_a_decision_stands(new: Attempts, old: Attempts, before: Canary) -> None:
    found = decided(before, new, old)
    assert found is not None
    assert found.weight >= before.weight or found.aborted
    assert found.aborted or not before.aborted
    assert decided(found, new, old) == found or found.since is None or before.since is None
    assert canary.read(canary.recorded(found)) == found, "another operator goes on with it"


@given(new=attempts)
def test_a_revision_that_is_as_good_as_the_old_one_is_not_taken_back(new: Attempts) -> None:
    tenfold = Attempts(
        completed=10 * new.completed, failed=10 * new.failed, times={s: 10 * n for s, n in new.times.items()}
    )
    assert canary.worse(AbortOn(error_rate=0.0, p99_seconds=2.0), new, tenfold) is None or tenfold.ended < 50


@given(of=st.integers(1, 60), least=st.integers(0, 60), probability=st.floats(0.001, 0.999))
def test_chances_are_those_of_the_binomial_distribution(of: int, least: int, probability: float) -> None:
    exact = sum(
        math.comb(of, count) * probability**count * (1 - probability) ** (of - count) for count in range(least, of + 1)
    )
    found = canary.chance(min(least, of), of, probability)
    if least > of:
        return
    assert found == pytest.approx(exact, rel=1e-6, abs=1e-12) or (found == 1.0 and least <= of * probability)


def test_a_good_revision_is_rarely_taken_back_by_chance_and_a_bad_one_nearly_always() -> None:
    def taken_back(rate: float, seed: int) -> bool:
        """Looked at after each of 400 requests of the new revision, beside nine times as many of the old one."""
        chance, new, old = random.Random(seed), [0, 0], [0, 0]
        for _ in range(400):
            new[chance.random() < rate] += 1
            for _ in range(9):
                old[chance.random() < 0.01] += 1
            seen = quick(new[0], failed=new[1]), quick(old[0], failed=old[1])
            if canary.worse(AbortOn(error_rate=0.05), *seen) is not None:
                return True
        return False

    assert sum(taken_back(0.01, seed) for seed in range(100)) <= 2
    assert sum(taken_back(0.3, seed) for seed in range(100)) == 100


def test_reports_of_coordinators_are_added() -> None:
    reports = [{"new": quick(3, failed=1), "old": quick(9)}, {"new": quick(2, slow=1)}, {}]
    assert canary.joined(reports) == {
        "new": Attempts(completed=5, failed=1, times={0.1: 4, 5.0: 1}),
        "old": Attempts(completed=9, times={0.1: 9}),
    }
    assert (quick(98, slow=2).p99_s, quick(1000, slow=2).p99_s, Attempts().p99_s) == (5.0, 0.1, None)
