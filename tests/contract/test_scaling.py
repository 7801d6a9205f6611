"""How many instances a group should have: a table of situations, and what holds whatever the numbers are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec import scaling
from omnipipeline_spec.scaling import Decision, Limits, Load, Seen

LIMITS = Limits(least=0, most=10, down_delay_s=60)
IDLE = Load(ready=1, arrivals_per_s=0.0, service_s=2.0, per_instance=4, cold_start_s=10)


def load(**more: object) -> Load:
    return msgspec.structs.replace(IDLE, **more)


def one(load: Load, limits: Limits = LIMITS, *, seen: Seen | None = None, now: float = 1000.0) -> Decision:
    return scaling.decide({"a": limits}, {"a": load}, {"a": seen or Seen()}, now=now)["a"]


@pytest.mark.parametrize(
    "observed, replicas, reason",
    [
        # Nothing is known of earlier, so an idle group stays for a while…
        (load(arrivals_per_s=4.0, ready=3), 3, "stays at 3: load 8.0, 4 at once each"),
        (load(arrivals_per_s=8.0, ready=1), 5, "up to 5: load 16.0, 4 at once each"),
        # …and one at zero waits for a request.
        (load(ready=0), 0, "stays at 0: no request"),
        (load(ready=0, waiting=1, arrivals_per_s=0.1), 1, "up to 1: load 0.2, 4 at once each"),
        (load(ready=0, waiting=2, arrivals_per_s=None, service_s=None), 1, "up to 1: 2 wait for the first instance"),
        (load(ready=0, waiting=50, service_s=None, per_instance=1), 1, "up to 1: 50 wait for the first instance"),
        # Instances on their way were ordered for what waits.
        (load(ready=1, pending=4, arrivals_per_s=8.0, waiting=200), 5, "stays at 5: load 16.0, 4 at once each"),
        (load(ready=5, arrivals_per_s=8.0, waiting=80), 8, "up to 8: 80 wait, too long for 1 s, 4 at once each"),
        (
            load(ready=5, arrivals_per_s=40.0),
            10,
            "up to 10: load 80.0, 4 at once each; 22 would be wanted, maxReplicas is 10",
        ),
    ],
)
def test_the_replicas_of_a_moment_and_why(observed: Load, replicas: int, reason: str) -> None:
    decision = one(observed)
    assert (decision.replicas, decision.reason) == (replicas, reason)


def test_a_named_utilization_decides_the_room() -> None:
    half = msgspec.structs.replace(LIMITS, target_utilization=0.5)
    assert one(load(arrivals_per_s=8.0), half).replicas == 8


def test_a_group_without_load_shrinks_to_its_least_after_the_delay() -> None:
    for least in (0, 2):
        limits, seen = msgspec.structs.replace(LIMITS, least=least), Seen()
        found = []
        for now in range(0, 100, 10):
            arrivals = 8.0 if now < 20 else 0.0
            decision = one(load(ready=5, arrivals_per_s=arrivals), limits, seen=seen, now=float(now))
            seen = decision.seen
            found.append(decision.replicas)
        assert found == [5] * 8 + [least] * 2
        assert "down to" in decision.reason and "for 60 s" in decision.reason


def test_a_long_cold_start_makes_the_delay_longer() -> None:
    busy = Seen(wanted=((0.0, 5), (10.0, 0)))
    assert one(load(ready=5, cold_start_s=40), seen=busy, now=80.0).replicas == 5
    assert one(load(ready=5, cold_start_s=40), seen=busy, now=91.0).replicas == 0


def test_more_is_ordered_only_after_it_was_wanted_for_the_delay() -> None:
    limits = msgspec.structs.replace(LIMITS, up_delay_s=30)
    grown = load(ready=1, arrivals_per_s=8.0)
    assert one(grown, limits, seen=Seen(wanted=((0.0, 1),)), now=100.0).replicas == 1
    assert one(grown, limits, seen=Seen(wanted=((0.0, 1), (69.0, 5))), now=100.0).replicas == 5
    assert one(load(ready=0, waiting=1), limits, now=100.0).replicas == 1, "a group at zero does not wait"


def test_a_group_grows_with_the_one_that_sends_to_it() -> None:
    loads = {
        "thinker": load(ready=1, arrivals_per_s=8.0, waiting=9),
        "talker": load(ready=1, arrivals_per_s=2.0, service_s=1.0, per_instance=2),
    }
    alone = scaling.decide(dict.fromkeys(loads, LIMITS), loads, {}, now=0.0)
    both = scaling.decide(dict.fromkeys(loads, LIMITS), loads, {}, edges=[("thinker", "talker")], now=0.0)
    assert (alone["talker"].replicas, both["talker"].replicas) == (2, 5)
    assert both["talker"].reason == "up to 5: load 8.0 once its sources have grown 4.0 times, 2 at once each"


def test_what_a_request_reaches_through_a_sleeping_group_wakes_with_it() -> None:
    loads = {"a": load(ready=0, waiting=1), "b": load(ready=0), "c": load(ready=0), "apart": load(ready=0)}
    edges = [("a", "b"), ("b", "c")]
    decided = scaling.decide(dict.fromkeys(loads, LIMITS), loads, {}, edges=edges, now=0.0)
    assert {name: each.replicas for name, each in decided.items()} == {"a": 1, "b": 1, "c": 1, "apart": 0}
    assert decided["c"].reason == "up to 1: a neighbour starts"


def test_instances_that_never_come_do_not_keep_a_group_large() -> None:
    stuck, seen = load(ready=1, pending=6), Seen(wanted=((0.0, 7), (10.0, 1)))
    assert one(msgspec.structs.replace(stuck, arrivals_per_s=0.5), seen=seen, now=100.0).replicas == 1


numbers = st.floats(0, 1e6)
loads = st.builds(
    Load,
    ready=st.integers(0, 1000),
    pending=st.integers(0, 1000),
    arrivals_per_s=st.none() | numbers,
    service_s=st.none() | numbers,
    running=numbers,
    waiting=numbers,
    per_instance=numbers,
    cold_start_s=st.none() | numbers,
)
limits = st.builds(
    lambda least, more, **rest: Limits(least=least, most=max(1, least + more), **rest),
    st.integers(0, 50),
    st.integers(0, 50),
    target_queue_s=st.floats(0.001, 1e4),
    target_utilization=st.none() | st.floats(0.05, 1),
    up_delay_s=st.floats(0, 1e4),
    down_delay_s=st.floats(0, 1e4),
)


@given(st.lists(st.tuples(st.floats(0, 100), loads), min_size=1, max_size=12), limits)
def test_replicas_stay_within_the_limits_and_have_a_reason(history: list[tuple[float, Load]], given: Limits) -> None:
    seen, now = Seen(), 0.0
    for after, observed in history:
        now += after
        decision = one(observed, given, seen=seen, now=now)
        seen = decision.seen
        assert given.least <= decision.replicas <= given.most
        assert decision.reason


@given(loads, limits, st.integers(2, 8))
def test_a_load_that_stays_is_answered_once(observed: Load, given: Limits, repeats: int) -> None:
    seen, orders = Seen(), []
    there = observed.ready + observed.pending
    for now in range(repeats):
        present = msgspec.structs.replace(observed, pending=max(0, there - observed.ready))
        decision = one(present, given, seen=seen, now=float(now))
        seen = decision.seen
        if decision.replicas > there:
            orders.append(decision.replicas)
        there = max(there, decision.replicas)
    assert len(orders) <= 1, "what is on its way was ordered for the same requests"


@given(limits)
def test_no_load_for_long_leaves_the_least(given: Limits) -> None:
    quiet = load(ready=given.most)
    seen = one(quiet, given, now=0.0).seen
    assert one(quiet, given, seen=seen, now=1e6).replicas == given.least


@given(st.integers(1, 9), st.floats(0.2, 4))
def test_the_size_that_the_rule_chose_does_not_flap(ready: int, noise: float) -> None:
    seen, there, changes = Seen(), ready, 0
    for now in range(0, 600, 2):
        arrivals = 6.0 + noise * (-1) ** (now // 2) / 4
        decision = one(load(ready=there, arrivals_per_s=arrivals), seen=seen, now=float(now))
        seen = decision.seen
        changes += decision.replicas != there
        there = decision.replicas
    assert changes <= 2, "up once and down once"


def test_the_memory_of_a_group_is_bounded() -> None:
    seen = Seen()
    for now in range(3 * scaling.MOST_SEEN):
        arrivals = 20.0 if now % 2 else 0.0
        seen = one(load(ready=3, arrivals_per_s=arrivals), LIMITS, seen=seen, now=now / 1000).seen
    assert len(seen.wanted) <= scaling.MOST_SEEN


@pytest.mark.parametrize("peak", [0, 1, 2, 3, scaling.MOST_SEEN - 1])
def test_a_peak_is_remembered_for_the_delay_however_often_the_load_changed_since(peak: int) -> None:
    limits, seen = Limits(least=0, most=100, down_delay_s=10 * scaling.MOST_SEEN), Seen()
    for now in range(2 * scaling.MOST_SEEN):
        arrivals = 160.0 if now == peak else 4.0 + 16 * (now % 2)
        decision = one(load(ready=90, arrivals_per_s=arrivals), limits, seen=seen, now=float(now))
        seen = decision.seen
        if now >= peak:
            assert decision.replicas > 80, f"{now}: {decision.reason}"


def test_several_coordinators_are_one_load_each_with_its_own_requests_and_all_instances() -> None:
    first = load(ready=2, arrivals_per_s=3.0, service_s=2.0, running=4, waiting=5, held=2)
    second = load(ready=2, pending=1, arrivals_per_s=1.0, service_s=6.0, running=5, waiting=3, held=0)
    fresh = load(ready=1, arrivals_per_s=0.0, service_s=None)
    assert scaling.joined([{"a": first}, {"a": second, "b": fresh}])["a"] == Load(
        ready=2,
        pending=1,
        arrivals_per_s=4.0,
        service_s=3.0,
        running=5,
        waiting=5,
        held=2,
        per_instance=4,
    )
    assert scaling.joined([{"b": fresh}])["b"].service_s is None
