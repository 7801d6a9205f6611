"""An instance's engines share its requests: least loaded, rotating start, expected load, ranks, pins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.autoregressive.balancing import Balancer


@pytest.mark.parametrize(
    ("counts", "chosen"),
    [
        ([(0, 0), (0, 0)], 0),
        ([(0, 1), (0, 0)], 1),
        ([(1, 0), (0, 4)], 0),
        ([(1, 0), (0, 3)], 1),
        ([(2, 0), (1, 3), (1, 2)], 2),
    ],
)
def test_the_lowest_four_times_waiting_plus_running_is_chosen(counts: list[tuple[int, int]], chosen: int) -> None:
    balancer = Balancer(len(counts))
    balancer.report(counts)
    assert balancer.choose() == chosen


def test_requests_between_two_reports_are_spread() -> None:
    balancer = Balancer(3)
    assert [balancer.choose() for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    balancer.report([(0, 0), (0, 9), (0, 9)])
    assert [balancer.choose() for _ in range(3)] == [0, 0, 0]
    assert balancer.counts == [(3, 0), (0, 9), (0, 9)]


def test_clients_begin_at_different_engines_and_expect_each_other() -> None:
    balancers = [Balancer(4, client_index=index, client_count=2) for index in range(2)]
    assert [balancer.choose() for balancer in balancers] == [0, 2]
    assert [balancer.counts for balancer in balancers] == [
        [(2, 0), (0, 0), (0, 0), (0, 0)],
        [(0, 0), (0, 0), (2, 0), (0, 0)],
    ]


def test_a_rank_and_a_pin_win_over_the_load_and_change_no_count() -> None:
    balancer = Balancer(4)
    balancer.report([(9, 9)] * 3 + [(0, 0)])
    before = balancer.counts
    assert balancer.choose(rank=1) == 1
    assert len({balancer.choose(pin="document 7") for _ in range(5)}) == 1
    assert balancer.choose(rank=1, pin="document 7") == 1
    assert len({balancer.choose(pin=str(index)) for index in range(50)}) == 4
    assert balancer.counts == before


@pytest.mark.parametrize("rank", [-1, 2, 1])
def test_a_rank_that_is_not_there_or_closed_is_refused(rank: int) -> None:
    balancer = Balancer(2)
    balancer.close(1)
    with pytest.raises(ValueError, match="data_parallel_rank"):
        balancer.choose(rank=rank)


def test_closed_engines_get_nothing_and_none_left_is_an_error() -> None:
    balancer = Balancer(2)
    balancer.close(0)
    assert [balancer.choose() for _ in range(3)] == [1, 1, 1]
    assert balancer.choose(pin="a") == 1
    balancer.close(1)
    with pytest.raises(ValueError, match="no engine"):
        balancer.choose()


def test_a_new_engine_begins_empty_and_open() -> None:
    balancer = Balancer(2)
    balancer.report([(1, 1), (2, 2)])
    balancer.close(1)
    balancer.resize(1)
    balancer.resize(3)
    assert balancer.counts == [(1, 1), (0, 0), (0, 0)] and balancer.open == [0, 1, 2]


def test_an_engine_whose_end_is_noticed_after_its_removal_closes_no_later_one() -> None:
    balancer = Balancer(3)
    balancer.resize(1)
    balancer.close(2)
    balancer.resize(3)
    assert balancer.open == [0, 1, 2]


def test_engines_that_are_added_are_open_and_those_before_stay_as_they_were() -> None:
    balancer = Balancer(2)
    balancer.close(0)
    balancer.resize(4)
    assert balancer.open == [1, 2, 3]


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 3))
def test_equal_engines_get_equal_shares(engines: int, requests: int, clients: int) -> None:
    balancer = Balancer(engines, client_index=clients - 1, client_count=clients)
    chosen = [balancer.choose() for _ in range(requests)]
    shares = [chosen.count(rank) for rank in range(engines)]
    assert max(shares) - min(shares) <= 1
