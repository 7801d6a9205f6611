"""A request that ends instances again and again is suspected."""

from __future__ import annotations

import pytest

from stage_runtime.rules.requests import suspicion
from stage_runtime.rules.requests.suspicion import Blame


@pytest.mark.parametrize(
    ("deaths", "others", "blame"),
    [
        (0, 0, Blame.NONE),
        (0, 3, Blame.NONE),
        (1, 0, Blame.ITS_OWN),
        (1, 1, Blame.UNCLEAR),
        (2, 1, Blame.ITS_OWN),
        (2, 0, Blame.ITS_OWN),
    ],
)
def test_the_second_end_is_its_own_unless_another_suspect_was_there(deaths: int, others: int, blame: Blame) -> None:
    assert suspicion.blame(deaths, other_suspects=others) is blame


@pytest.mark.parametrize(("ran_s", "after_s"), [(0.1, 1.0), (3.0, 6.0), (90.0, 10.0)])
def test_a_suspect_is_cleared_by_running_for_longer_than_before(ran_s: float, after_s: float) -> None:
    assert suspicion.cleared_after_s(ran_s) == after_s


@pytest.mark.parametrize(
    ("suspects", "unclear", "most"), [(1, False, 1), (8, False, 1), (9, False, 2), (128, False, 16), (128, True, 1)]
)
def test_many_suspects_take_eight_rounds_and_one_at_a_time_after_two_ends(
    suspects: int, unclear: bool, most: int
) -> None:
    assert suspicion.at_once(suspects, unclear=unclear) == most
