"""Exactly those hear of an instance that requests bring together with it, once; of a departure, those that knew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.members import beats
from stage_runtime.rules.members.introductions import FRESH_S, NOTHING, Introductions

EDGES = (("a", "b", "normal"), ("b", "c", "normal"), ("a", "c", "stream"))
INSTANCES = {"a": ["a1", "a2"], "b": ["b1", "b2", "ab"], "c": ["c1", "c2"]}
BINDINGS = st.fixed_dictionaries({}, optional={stage: st.sampled_from(names) for stage, names in INSTANCES.items()})


def test_a_pair_is_introduced_once_and_brought_along_while_it_is_fresh() -> None:
    made = Introductions()
    first = made.bind(EDGES, {"a": "a1", "b": "b1"}, 0.0)
    assert (first.introduced, first.along) == ({"a1": ["b1"], "b1": ["a1"]}, {"a1", "b1"})
    again = made.bind(EDGES, {"a": "a1", "b": "b1"}, FRESH_S)
    assert (again.introduced, again.along) == ({}, {"a1", "b1"})
    assert made.bind(EDGES, {"a": "a1", "b": "b1"}, FRESH_S + 1) is NOTHING


def test_stages_of_one_instance_and_stages_that_are_not_bound_introduce_nobody() -> None:
    assert Introductions().bind(EDGES, {"a": "one", "b": "one"}, 0.0) is NOTHING
    assert Introductions().bind(EDGES, {"a": "a1", "x": "x1"}, 0.0) is NOTHING


def test_a_pair_without_a_connection_is_introduced_once_more_and_learns_of_departures_as_before() -> None:
    made = Introductions()
    made.bind(EDGES, {"a": "a1", "b": "b1", "c": "c1"}, 0.0)
    made.lost("b1", "a1")
    made.lost("b1", "strangers")
    made.lost("b1", "b1")
    assert not made.known("a1", "b1") and not made.known("b1", "a1")
    again = made.bind(EDGES, {"a": "a1", "b": "b1", "c": "c1"}, FRESH_S + 1)
    assert (again.introduced, again.along) == ({"a1": ["b1"], "b1": ["a1"]}, {"a1", "b1"})
    assert made.bind(EDGES, {"a": "a1", "b": "b1", "c": "c1"}, 2 * FRESH_S + 2) is NOTHING
    made.lost("a1", "b1")
    assert set(made.leave("b1")) == {"a1", "c1"}
    assert made.leave("a1") == ["c1"]


def test_a_pair_of_another_coordinator_learns_of_departures_and_is_introduced_by_the_next_request() -> None:
    made = Introductions()
    made.adopt("a1", "b1")
    made.bind(EDGES, {"a": "a2", "b": "b1"}, 0.0)
    made.adopt("a2", "b1")
    assert made.known("a2", "b1"), "what it has introduced itself stays as it is"
    assert not made.known("a1", "b1") and not made.known("b1", "a1")
    assert made.bind(EDGES, {"a": "a1", "b": "b1"}, 1.0).introduced == {"a1": ["b1"], "b1": ["a1"]}
    made.adopt("b2", "c1")
    assert made.leave("b2") == ["c1"]
    assert set(made.leave("b1")) == {"a1", "a2"}


@given(st.lists(st.one_of(BINDINGS, st.sampled_from([one for names in INSTANCES.values() for one in names]))))
def test_each_learns_of_exactly_those_it_shares_edges_with_and_of_their_departures(
    events: list[dict[str, str] | str],
) -> None:
    made = Introductions()
    introduced: dict[str, set[str]] = {}  #: Instances that each one has heard of and not heard the end of.
    now = 0.0
    for event in events:
        now += 1.0
        if isinstance(event, str):
            assert set(made.leave(event)) == {one for one, known in introduced.items() if event in known}
            introduced.pop(event, None)
            for known in introduced.values():
                known.discard(event)
            continue
        news = made.bind(EDGES, event, now)
        for one, others in news.introduced.items():
            assert len(set(others)) == len(others)
            assert introduced.setdefault(one, set()).isdisjoint(others), "each pair is introduced once"
            introduced[one].update(others)
        wanted = {
            (event[source], event[target])
            for source, target, _ in EDGES
            if source in event and target in event and event[source] != event[target]
        }
        for one, other in wanted:
            assert other in introduced[one] and one in introduced[other]
            assert made.known(one, other) and made.known(other, one)
        assert set(news.introduced) <= news.along <= {name for pair in wanted for name in pair}


@given(st.lists(st.integers(0, 30_000), min_size=1))
def test_beats_cost_at_most_their_share_and_their_time_changes_seldom(sizes: list[int]) -> None:
    interval, changes = 0.0, 0
    for members in sizes:
        before, interval = interval, beats.interval_s(members, interval)
        changes += interval != before
        load = (
            members * beats.BEAT_COST_S / interval
            if interval
            else members * beats.BEAT_COST_S / beats.SHORTEST_S * 0.05
        )
        assert load <= beats.SHARE or interval == beats.LONGEST_S
        assert interval <= beats.LONGEST_S
    assert beats.interval_s(10) == 0.0


def test_the_time_between_beats_grows_in_steps_and_falls_late() -> None:
    assert [beats.interval_s(members) for members in (100, 500, 1000, 3000, 100_000)] == [1.0, 8.0, 16.0, 16.0, 16.0]
    assert beats.interval_s(10) == 0.0
    assert beats.interval_s(100, sent_s=2.0) == 2.0
    assert beats.interval_s(40, sent_s=2.0) == 0.5


@given(st.integers(1, 100_000))
def test_connections_are_checked_less_often_the_more_there_are_and_never_too_rarely(count: int) -> None:
    factor = beats.check_factor(count)
    assert 1.0 <= factor <= beats.RAREST
    assert factor <= beats.check_factor(count + 1)
    assert (factor == 1.0) == (count <= beats.CHECKED_OFTEN)
