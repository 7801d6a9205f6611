"""The time for which an observer watches does not contain the time for which it was stopped."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.flow.watched_time import LATE_S, WatchedTime

LOOK_S = 2.0


def watched(passed_s: list[float], look_s: float = LOOK_S) -> list[float]:
    """How much of each time between two looks counts."""
    watch = WatchedTime(100.0, look_s)
    return [watch.look(100.0 + at) for at in itertools.accumulate(passed_s)]


@pytest.mark.parametrize(
    ("passed_s", "counted_s"),
    [
        ([2.0, 2.0], [2.0, 2.0]),
        ([0.5, 2.0], [0.5, 2.0]),  # something else has woken it
        ([2.125, 2.25], [2.125, 2.25]),  # a busy machine
        ([2.0, 900.0, 2.0], [2.0, 0.0, 2.0]),
        ([900.0, 2.0, 900.0, 2.0], [0.0, 2.0, 0.0, 2.0]),
        ([900.0, 900.0, 3.0, 2.0, 3.0], [0.0, 900.0, 3.0, 2.0, 0.0]),
    ],
)
def test_a_late_look_does_not_count_and_a_second_one_after_it_does(
    passed_s: list[float], counted_s: list[float]
) -> None:
    assert watched(passed_s) == counted_s


@given(passed_s=st.lists(st.floats(0.01, 100.0), min_size=2, max_size=20))
def test_at_least_every_second_look_counts(passed_s: list[float]) -> None:
    counted = watched(passed_s)
    assert all(one == 0.0 or one == pytest.approx(passed) for one, passed in zip(counted, passed_s, strict=True))
    assert all(map(any, itertools.pairwise(counted)))


@given(late_s=st.floats(2 * LATE_S, 1e6), looks=st.integers(2, 20))
def test_an_observer_that_is_always_late_counts_all_but_its_first_look(late_s: float, looks: int) -> None:
    assert watched([LOOK_S + late_s] * looks)[0] == 0.0
    assert sum(watched([LOOK_S + late_s] * looks)) == pytest.approx((LOOK_S + late_s) * (looks - 1))
