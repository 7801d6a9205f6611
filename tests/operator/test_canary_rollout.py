"""The pods of a revision that is tried, or was taken back, as simulated roll-outs."""

from __future__ import annotations

from fractions import Fraction

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from omnipipeline_operator.changes.deciding import rollout
from omnipipeline_operator.changes.deciding.rollout import Goal
from tests.operator.rollout_simulation import RolloutSimulation, goal, running
from tests.operator.test_rollout import spec_of
from tests.thoroughness import examples


def tried(desired: Goal, weight: int) -> Goal:
    return msgspec.structs.replace(desired, tried=Fraction(weight, 100) if weight < 100 else None)


def test_a_tried_revision_has_the_pods_that_its_share_is_worth_and_the_old_one_keeps_the_rest() -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": 4, "b": 1})
    desired = goal({"a": "a2", "b": "b1"}, {"a": 4, "b": 1})
    found = []
    for weight in (10, 50, 90, 100):
        world.run(tried(desired, weight))
        found.append(spec_of(world, "a"))
        assert spec_of(world, "b") == {"b1": 1}, "it does not change"
    assert found == [{"a1": 4, "a2": 1}, {"a1": 2, "a2": 2}, {"a1": 1, "a2": 4}, {"a1": 0, "a2": 4}]


def test_with_one_replica_the_old_pod_stays_until_the_new_one_has_everything() -> None:
    world = running({"a": "a1"}, {"a": 1})
    desired = goal({"a": "a2"}, {"a": 1})
    for weight in (1, 50, 99):
        world.run(tried(desired, weight))
        assert spec_of(world, "a") == {"a1": 1, "a2": 1}
        assert rollout.decide(tried(desired, weight), world.observed(), world.serving).rolling
    world.run(tried(desired, 100))
    assert spec_of(world, "a") == {"a1": 0, "a2": 1}


def test_a_revision_that_was_taken_back_loses_its_pods_at_once_and_the_old_one_gets_its_own_back() -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": 2, "b": 1})
    desired = goal({"a": "a2", "b": "b2"}, {"a": 2, "b": 1})
    world.run(tried(desired, 90))
    assert (spec_of(world, "a"), spec_of(world, "b")) == ({"a1": 1, "a2": 2}, {"b1": 1, "b2": 1})
    dropped = frozenset({("a", "a2"), ("b", "b2")})
    back = msgspec.structs.replace(goal({"a": "a1", "b": "b1"}, {"a": 2, "b": 1}), dropped=dropped)
    world.reconcile(back)
    assert (spec_of(world, "a")["a2"], spec_of(world, "b")) == (0, {"b1": 1, "b2": 0})
    world.run(back)
    assert (spec_of(world, "a"), spec_of(world, "b")) == ({"a1": 2, "a2": 0}, {"b1": 1, "b2": 0})


steps = st.lists(st.sampled_from(["start", "finish", "fail", "act", "weigh"]), max_size=40)


@settings(max_examples=examples(100))
@given(replicas=st.integers(1, 6), surge=st.integers(1, 3), weight=st.integers(1, 99), steps=steps)
def test_a_complete_old_set_stays_while_a_revision_is_tried(
    replicas: int, surge: int, weight: int, steps: list[str]
) -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": replicas, "b": replicas})
    desired = goal({"a": "a2", "b": "b2"}, {"a": replicas, "b": replicas}, max_surge=surge)
    share = 0
    for step in steps:
        if step == "weigh":
            share = min(share + weight, 99)
        elif step == "act":
            world.act(tried(desired, max(share, weight)))
            assert _old(world) >= 1
            assert all(spec_of(world, unit).get(f"{unit}2", 0) >= 0 for unit in ("a", "b"))
            most = rollout.worth(replicas, Fraction(max(share, weight), 100))
            assert all(spec_of(world, unit)[f"{unit}2"] <= most for unit in ("a", "b"))
            assert all(world.replicas_of(unit) <= replicas + surge for unit in ("a", "b"))
        else:
            for key in (("a", "a2"), ("b", "b2")):
                getattr(world, step)(key)


def _old(world: RolloutSimulation) -> int:
    return min(spec_of(world, "a")["a1"], spec_of(world, "b")["b1"])
