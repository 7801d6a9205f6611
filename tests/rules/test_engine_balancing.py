"""An instance's engines share its requests: least loaded, rotating start, expected load, ranks, pins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.autoregressive.balancing import Balancer
from stage_runtime.rules.binding.prefixes import PIECES_MOST, Hashes, token_hashes


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


def test_a_request_that_is_withdrawn_is_expected_no_longer() -> None:
    balancer = Balancer(2, client_count=2)
    assert [balancer.choose() for _ in range(3)] == [0, 1, 0]
    balancer.withdraw(0)
    balancer.withdraw(1)
    balancer.withdraw(1)
    balancer.withdraw(7)
    assert balancer.counts == [(2, 0), (0, 0)]


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


PROMPT = token_hashes(range(2000))


def met(rank: int, engines: int = 2) -> Balancer:
    """Engines of which one has met `PROMPT`."""
    balancer = Balancer(engines)
    assert balancer.choose(rank=rank, prompt=PROMPT) == rank
    return balancer


@pytest.mark.parametrize(
    ("counts", "used", "chosen"),
    [
        ([(0, 0), (0, 0)], 0.0, 1),
        ([(0, 0), (0, 2)], 0.0, 1),
        ([(0, 8), (0, 12)], 0.0, 1),
        ([(0, 8), (0, 13)], 0.0, 0),  # overloaded
        ([(0, 0), (1, 1)], 0.0, 0),  # what waits counts twice, as at the coordinator
        ([(0, 0), (0, 0)], 1.0, 0),  # no block is free
        ([(0, 0), (0, 0)], 0.9, 1),
    ],
)
def test_an_engine_that_has_met_the_prompt_is_chosen_unless_it_is_overloaded(
    counts: list[tuple[int, int]], used: float, chosen: int
) -> None:
    balancer = met(1)
    balancer.report(counts)
    assert balancer.choose(prompt=PROMPT, caches={1: used}) == chosen


@pytest.mark.parametrize("prompt", [(), token_hashes(range(1, 2000)), token_hashes(range(2000), "an adapter")])
def test_another_prompt_goes_to_the_least_loaded_engine(prompt: Hashes) -> None:
    assert met(1).choose(prompt=prompt, caches={1: 0.0}) == 0


def test_an_engine_whose_cache_is_empty_or_that_was_replaced_has_met_nothing() -> None:
    balancer = met(1)
    assert balancer.choose(prompt=PROMPT, caches={}) == 0
    balancer = met(1)
    balancer.close(1)
    assert balancer.choose(prompt=PROMPT, caches={1: 0.0}) == 0
    balancer = met(1)
    balancer.close(1)
    balancer.open_again(1)
    assert balancer.choose(prompt=PROMPT, caches={1: 0.0}) == 0


def test_a_beginning_that_all_prompts_share_does_not_fill_one_engine() -> None:
    balancer = Balancer(4)
    chosen = [balancer.choose(prompt=PROMPT, caches=dict.fromkeys(range(4), 0.0)) for _ in range(64)]
    shares = [chosen.count(rank) for rank in range(4)]
    assert max(shares) <= 1.25 * min(shares) + 2


def test_tokens_are_hashed_as_far_as_they_are_tokens() -> None:
    tokens = list(range(500))
    whole = token_hashes(tokens)
    assert len(whole) == 7 and token_hashes([*tokens, 5] * 20)[:7] == whole
    assert token_hashes([*tokens[:200], -1, *tokens[200:]]) == whole[:3]  # a row of embeddings
    assert len(token_hashes(range(100_000))) <= PIECES_MOST
    for hostile in ([1 << 70], [None], ["a"], [1.5]):
        assert token_hashes(hostile) == ()  # type: ignore[arg-type]
