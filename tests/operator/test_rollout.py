"""Roll-outs, as tables of simulations and with hypothesis."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnipipeline_operator.changes.deciding import rollout
from omnipipeline_operator.changes.deciding.rollout import DesiredUnit, Goal
from omnipipeline_operator.changes.workloads import ObservedPod, Workload
from omnipipeline_spec.types.plan import PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR
from tests.operator.rollout_simulation import RolloutSimulation, SimulatedDeployment, goal, running
from tests.thoroughness import examples

UNITS = ("a", "b", "c")
OLD = {"a": "a1", "b": "b1", "c": "c1"}


def spec_of(world: RolloutSimulation, unit: str) -> dict[str, int]:
    return {rev: held.replicas for (name, rev), held in world.held.items() if name == unit}


def test_a_new_pipeline_gets_all_its_replicas_at_once() -> None:
    world = RolloutSimulation()
    world.act(goal({"a": "a1", "b": "b1"}, {"a": 3, "b": 1}))
    assert {key: held.replicas for key, held in world.held.items()} == {
        ("a", "a1"): 3,
        ("b", "b1"): 1,
        (COORDINATOR, "c"): 1,
    }


def test_old_pods_stay_until_new_ones_are_ready_and_then_go_one_for_one() -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": 2, "b": 1})
    desired = goal({"a": "a2", "b": "b1"}, {"a": 2, "b": 1})
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 2, "a2": 1}
    world.start(("a", "a2"))
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 1, "a2": 2}
    world.start(("a", "a2"))
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 0, "a2": 2}
    assert spec_of(world, "b") == {"b1": 1}


def test_a_pod_is_made_only_when_the_old_one_is_terminating() -> None:
    world, desired = running({"a": "a1"}, {"a": 3}), goal({"a": "a2"}, {"a": 3})
    world.act(desired)
    world.start(("a", "a2"))
    world.reconcile(desired)
    assert spec_of(world, "a") == {"a1": 2, "a2": 1}, "three old pods and one new one stay"
    world.control(("a", "a2"))
    world.reconcile(desired)
    assert world.staying("a") == 4
    world.control(("a", "a1"))
    world.reconcile(desired)
    assert spec_of(world, "a") == {"a1": 2, "a2": 2}


def test_no_old_pod_goes_before_every_changing_unit_has_its_share_of_new_ones() -> None:
    world = running(OLD, {"a": 2, "b": 1, "c": 1})
    desired = goal({"a": "a2", "b": "b2", "c": "c1"}, {"a": 2, "b": 1, "c": 1})
    world.act(desired)
    world.start(("a", "a2"))
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 2, "a2": 1}
    world.start(("b", "b2"))
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 1, "a2": 2}
    assert spec_of(world, "b") == {"b1": 1, "b2": 1}


@pytest.mark.proves("roll-out")
def test_a_revision_that_is_never_ready_leaves_the_old_one_whole_and_scalable() -> None:
    world = running({"a": "a1"}, {"a": 2})
    world.broken = {("a", "a2")}
    world.run(goal({"a": "a2"}, {"a": 2}))
    assert spec_of(world, "a") == {"a1": 2, "a2": 1}
    world.run(goal({"a": "a2"}, {"a": 5}))
    assert spec_of(world, "a") == {"a1": 5, "a2": 1}


def test_a_revision_that_never_served_is_replaced_at_once() -> None:
    world = RolloutSimulation(broken={("a", "a1")})
    world.act(goal({"a": "a1"}, {"a": 1}))
    world.act(goal({"a": "a2"}, {"a": 1}))
    assert spec_of(world, "a") == {"a1": 0, "a2": 1}


def test_going_back_in_mid_roll_keeps_the_pods_that_still_exist() -> None:
    world = running({"a": "a1"}, {"a": 2})
    world.act(goal({"a": "a2"}, {"a": 2}))
    world.start(("a", "a2"))
    world.act(goal({"a": "a2"}, {"a": 2}))
    assert spec_of(world, "a") == {"a1": 1, "a2": 2}
    world.act(goal({"a": "a1"}, {"a": 2}))
    assert world.ready("a") >= 2
    world.run(goal({"a": "a1"}, {"a": 2}))
    assert spec_of(world, "a") == {"a1": 2, "a2": 0}


def test_pods_that_their_deployment_is_about_to_end_replace_no_others() -> None:
    """The spec goes back while the Deployment controller still has to end a pod of each revision."""
    world = running({"a": "a2"}, {"a": 1})
    world.held["a", "a2"].ready = 2
    world.held["a", "a1"] = SimulatedDeployment(replicas=0, ready=1)
    desired = goal({"a": "a1"}, {"a": 1})
    world.reconcile(desired)
    assert spec_of(world, "a") == {"a1": 0, "a2": 1}
    world.settle()
    assert world.ready("a") == 1
    world.run(desired)
    assert spec_of(world, "a") == {"a1": 1, "a2": 0}


def test_regrouped_units_go_only_when_all_new_ones_are_ready() -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": 1, "b": 1})
    desired = goal({"ab": "x1"}, {"ab": 2})
    world.act(desired)
    world.start(("ab", "x1"))
    world.act(desired)
    assert (spec_of(world, "a"), spec_of(world, "b"), spec_of(world, "ab")) == ({"a1": 1}, {"b1": 1}, {"x1": 2})
    world.start(("ab", "x1"))
    world.act(desired)
    assert (spec_of(world, "a"), spec_of(world, "b")) == ({"a1": 0}, {"b1": 0})


def test_without_a_surge_one_old_pod_of_each_unit_ends_and_a_new_one_starts_when_its_gpu_is_free() -> None:
    world = running(OLD, {"a": 3, "b": 2, "c": 1})
    desired = goal({"a": "a2", "b": "b2", "c": "c1"}, {"a": 3, "b": 2, "c": 1}, max_surge=0, max_unavailable=1)
    world.act(desired)
    assert (spec_of(world, "a"), spec_of(world, "b")) == ({"a1": 2, "a2": 0}, {"b1": 1, "b2": 0})
    world.finish(("a", "a1"))
    world.finish(("b", "b1"))
    world.act(desired)
    assert (spec_of(world, "a"), spec_of(world, "b")) == ({"a1": 2, "a2": 1}, {"b1": 1, "b2": 1})
    world.start(("a", "a2"))
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 2, "a2": 1}, "b has none yet, so no set of the new revision is complete"
    world.start(("b", "b2"))
    world.act(desired)
    assert (spec_of(world, "a"), spec_of(world, "b")) == ({"a1": 1, "a2": 1}, {"b1": 1, "b2": 1}), "a third is complete"
    world.run(desired)
    assert (spec_of(world, "a"), spec_of(world, "b")) == ({"a1": 0, "a2": 3}, {"b1": 0, "b2": 2})
    assert spec_of(world, "c") == {"c1": 1}


def test_without_a_surge_a_revision_that_is_never_ready_leaves_complete_old_sets_that_scale() -> None:
    world = running({"a": "a1"}, {"a": 2})
    world.broken = {("a", "a2")}
    asked = {"max_surge": 0, "max_unavailable": 5}
    world.run(goal({"a": "a2"}, {"a": 2}, **asked))
    assert spec_of(world, "a") == {"a1": 1, "a2": 1}
    world.run(goal({"a": "a2"}, {"a": 4}, max_surge=0, max_unavailable=1))
    assert spec_of(world, "a") == {"a1": 3, "a2": 1}
    world.run(goal({"a": "a1"}, {"a": 4}, max_surge=0, max_unavailable=1))
    assert spec_of(world, "a") == {"a1": 4, "a2": 0}


def test_without_a_surge_the_only_pod_of_a_unit_ends_before_its_successor_starts() -> None:
    world, desired = running({"a": "a1"}, {"a": 1}), goal({"a": "a2"}, {"a": 1}, max_surge=0, max_unavailable=1)
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 0, "a2": 0}
    world.finish(("a", "a1"))
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 0, "a2": 1}
    beside = running({"a": "a1"}, {"a": 1})
    beside.act(goal({"a": "a2"}, {"a": 1}, max_unavailable=1))
    assert spec_of(beside, "a") == {"a1": 1, "a2": 1}, "with a surge the only one stays"


AWAITED = ObservedPod(name="x", unschedulable=True, reason="Unschedulable")


@pytest.mark.parametrize(
    ("asked", "pods", "due"),
    [
        ({"strategy": "Recreate"}, (), True),
        ({"max_surge": 0, "max_unavailable": 1}, (), True),
        ({}, (), False),
        ({"strategy": "Recreate"}, (ObservedPod(name="x"),), True),
        ({"strategy": "Recreate"}, (AWAITED,), True),
        ({"strategy": "Recreate"}, (ObservedPod(name="x", ready=True),), False),
        ({"strategy": "Recreate"}, (ObservedPod(name="x", reason="CrashLoopBackOff"),), False),
        ({"strategy": "Recreate"}, (AWAITED, ObservedPod(name="y", reason="ImagePullBackOff")), False),
        ({"strategy": "Recreate", "paused": True}, (), False),
        ({"strategy": "Recreate", "suspended": True}, (), False),
    ],
)
def test_requests_wait_for_units_whose_old_pods_end_first_unless_their_new_ones_fail(
    asked: dict[str, object], pods: tuple[ObservedPod, ...], due: bool
) -> None:
    desired = goal({"a": "a2", "b": "b1"}, {"a": 1, "b": 0}, **asked)
    old = Workload(unit="a", revision="a1", name="a1", uid="a1", replicas=0, pods=(ObservedPod(name="o", ready=True),))
    new = Workload(unit="a", revision="a2", name="a2", uid="a2", replicas=1, pods=pods)
    assert rollout.awaited(desired, [old, new]) == ({"a"} if due else set())
    refused = msgspec.structs.replace(new, pods=(), refused="exceeded quota")
    assert rollout.awaited(desired, [old, refused]) == set()


def test_requests_wait_until_every_coordinator_has_met_the_new_pod() -> None:
    desired = goal({"a": "a2"}, {"a": 1}, strategy="Recreate")
    new = Workload(unit="a", revision="a2", name="a2", uid="a2", replicas=1, pods=(ObservedPod(name="x", ready=True),))
    assert rollout.awaited(desired, [new], {("a", "a1"): 1, ("a", "a2"): 0}) == {"a"}
    assert rollout.awaited(desired, [new], {("a", "a2"): 1}) == rollout.awaited(desired, [new]) == set()


def test_recreate_starts_nothing_before_the_last_old_pod_has_ended() -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": 2, "b": 1})
    desired = goal({"a": "a2", "b": "b1"}, {"a": 2, "b": 1}, strategy="Recreate")
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 0, "a2": 0}
    world.finish(("a", "a1"))
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 0, "a2": 0}
    world.finish(("a", "a1"))
    world.act(desired)
    assert spec_of(world, "a") == {"a1": 0, "a2": 2}
    assert spec_of(world, "b") == {"b1": 1}


def test_recreate_and_the_end_of_a_roll_do_not_wait_for_pods_that_are_lost() -> None:
    desired = goal({"a": "a2"}, {"a": 1}, strategy="Recreate")
    coordinator = Workload(
        unit=COORDINATOR, revision="c", name="c", uid="c", replicas=1, pods=(ObservedPod(name="c", ready=True),)
    )

    def decided(*pods: ObservedPod) -> rollout.Decision:
        old = Workload(unit="a", revision="a1", name="a1", uid="a1", replicas=0, pods=pods)
        return rollout.decide(desired, [coordinator, old], {"a": "a1"})

    drains, lost = ObservedPod(name="x", terminating=True), ObservedPod(name="y", terminating=True, lost=True)
    for pods, rolling in (((drains,), True), ((drains, lost), True), ((lost,), False), ((), False)):
        found = decided(*pods)
        assert (found.replicas["a", "a2"], found.rolling) == (0 if rolling else 1, rolling), pods
    kept = Workload(unit="a", revision="a1", name="a1", uid="a1", replicas=0, pods=(lost,))
    history = goal({"a": "a2"}, {"a": 1}, history=0)
    assert rollout.decide(history, [coordinator, kept], {}).retired == (), "its Deployment stays while it has a pod"


def test_a_paused_roll_stays_where_it_is_and_units_outside_it_scale() -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": 2, "b": 1})
    world.act(goal({"a": "a2", "b": "b1"}, {"a": 2, "b": 1}))
    world.start(("a", "a2"))
    world.run(goal({"a": "a2", "b": "b1"}, {"a": 2, "b": 3}, paused=True))
    assert spec_of(world, "a") == {"a1": 2, "a2": 1}
    assert spec_of(world, "b") == {"b1": 3}


def test_a_change_made_while_paused_makes_nothing() -> None:
    world = running({"a": "a1"}, {"a": 2})
    world.run(goal({"a": "a2"}, {"a": 2}, paused=True))
    assert spec_of(world, "a") == {"a1": 2}


def test_a_pause_without_a_surge_makes_no_pod_before_the_old_one_has_ended() -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": 2, "b": 1})
    bounds = {"max_surge": 0, "max_unavailable": 1}
    world.act(goal({"a": "a2", "b": "b2"}, {"a": 2, "b": 1}, **bounds))
    assert (spec_of(world, "a"), spec_of(world, "b")) == ({"a1": 1, "a2": 0}, {"b1": 0, "b2": 0})
    paused = goal({"a": "a2", "b": "b2"}, {"a": 2, "b": 1}, paused=True, **bounds)
    world.act(paused)
    assert spec_of(world, "b") == {"b1": 0, "b2": 0}, "the old pod of b has its GPU still"
    world.finish(("b", "b1"))
    world.run(paused)
    assert (spec_of(world, "a"), spec_of(world, "b")) == ({"a1": 1, "a2": 0}, {"b1": 0, "b2": 1})


def test_a_unit_that_is_removed_or_regrouped_while_paused_stays_until_the_pause_ends() -> None:
    for left in ({"a": "a1"}, {"ab": "x1"}):
        world = running({"a": "a1", "b": "b1"}, {"a": 2, "b": 1})
        desired = goal(left, {"a": 2, "ab": 2}, paused=True)
        world.run(desired)
        assert (spec_of(world, "a"), spec_of(world, "b"), spec_of(world, "ab")) == ({"a1": 2}, {"b1": 1}, {})
        assert world.act(desired).complete == (1 if "a" in left else 0)
        world.run(goal(left, {"a": 2, "ab": 2}))
        assert {key: held.replicas for key, held in world.held.items() if held.replicas} == {
            **dict.fromkeys(left.items(), 2),
            (COORDINATOR, "c"): 1,
        }


def test_a_pause_stops_the_coordinators_roll_too_where_it_is_and_they_scale_outside_a_roll() -> None:
    def wanted(revision: str, replicas: int, *, paused: bool) -> Goal:
        units = goal({"a": "a1"}, {"a": 1}).units
        return Goal(units=units, coordinator=rollout.DesiredUnit(revision=revision, replicas=replicas), paused=paused)

    world = running({"a": "a1"}, {"a": 1})
    world.run(wanted("c", 3, paused=True))
    assert spec_of(world, COORDINATOR) == {"c": 3}
    world.run(wanted("c2", 3, paused=True))
    assert spec_of(world, COORDINATOR) == {"c": 3}, "an edit made while paused makes nothing"
    for _ in range(2):
        world.act(wanted("c2", 3, paused=False))
        world.start((COORDINATOR, "c2"))
    halfway = spec_of(world, COORDINATOR)
    assert halfway == {"c": 2, "c2": 2}
    world.run(wanted("c2", 3, paused=True))
    assert spec_of(world, COORDINATOR) == halfway
    world.run(wanted("c2", 3, paused=False))
    assert spec_of(world, COORDINATOR) == {"c": 0, "c2": 3}


def test_suspending_takes_everything_down_and_resuming_brings_it_back() -> None:
    world = running({"a": "a1"}, {"a": 2})
    world.run(goal({"a": "a1"}, {"a": 2}, suspended=True))
    assert {held.replicas for held in world.held.values()} == {0}
    world.run(goal({"a": "a1"}, {"a": 2}))
    assert spec_of(world, "a") == {"a1": 2}
    assert world.held[COORDINATOR, "c"].replicas == 1


def test_suspending_in_mid_roll_scales_old_and_new_to_zero() -> None:
    world = running({"a": "a1"}, {"a": 2})
    world.act(goal({"a": "a2"}, {"a": 2}))
    world.act(goal({"a": "a2", "b": "b1"}, {"a": 2, "b": 1}, suspended=True))
    asked = {key: held.replicas for key, held in world.held.items()}
    assert asked == dict.fromkeys([("a", "a1"), ("a", "a2"), ("b", "b1"), (COORDINATOR, "c")], 0)


def test_of_several_old_revisions_the_one_that_served_last_stays_longest() -> None:
    world = running({"a": "a1"}, {"a": 2})
    world.held["a", "a2"] = SimulatedDeployment(replicas=2, ready=2, born=world.time + 1)  # complete, and never served
    world.held["a", "a3"] = SimulatedDeployment(replicas=1, ready=1, born=world.time + 2)
    world.act(goal({"a": "a3"}, {"a": 2}))
    assert spec_of(world, "a") == {"a1": 1, "a2": 0, "a3": 2}


def test_old_deployments_beyond_the_history_go_oldest_first() -> None:
    world = RolloutSimulation(serving={"a": "a9"})
    for age in range(5):
        world.held["a", f"a{age}"] = SimulatedDeployment(born=age)
    world.held["a", "a9"] = SimulatedDeployment(replicas=1, ready=1, born=9)
    made = world.reconcile(goal({"a": "a9"}, {"a": 1}, history=2))
    assert sorted(each.revision for each in made.retired) == ["a0", "a1", "a2"]


def test_the_coordinator_rolls_beside_the_old_one() -> None:
    world = running({"a": "a1"}, {"a": 1})
    desired = Goal(units=goal({"a": "a1"}, {"a": 1}).units, coordinator=rollout.DesiredUnit(revision="c2", replicas=1))
    world.act(desired)
    assert spec_of(world, COORDINATOR) == {"c": 1, "c2": 1}
    world.start((COORDINATOR, "c2"))
    world.act(desired)
    assert spec_of(world, COORDINATOR) == {"c": 0, "c2": 1}


def test_several_coordinators_roll_one_at_a_time_and_are_scaled_without_a_roll() -> None:
    def wanted(revision: str, replicas: int) -> Goal:
        units = goal({"a": "a1"}, {"a": 1}).units
        return Goal(units=units, coordinator=rollout.DesiredUnit(revision=revision, replicas=replicas))

    world = running({"a": "a1"}, {"a": 1})
    world.run(wanted("c", 3))
    assert spec_of(world, COORDINATOR) == {"c": 3}
    for _ in range(10):
        world.act(wanted("c2", 3))
        assert world.replicas_of(COORDINATOR) <= 4
        assert world.ready(COORDINATOR) >= 3
        world.start((COORDINATOR, "c2"))
    assert spec_of(world, COORDINATOR) == {"c": 0, "c2": 3}


def entry(revision: str, **units: str) -> PipelineRevision:
    return PipelineRevision(revision=revision, units=units, groups={}, stages={}, entry="a", terminals=("a",), edges=())


def test_a_pipeline_revision_stays_in_the_list_while_all_its_units_have_pods() -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": 1, "b": 1})
    first, second, third = entry("1", a="a1", b="b1"), entry("2", a="a2", b="b1"), entry("3", a="a3", b="b1")
    world.held["a", "a2"] = SimulatedDeployment()
    assert rollout.entries(third, (first, second), world.observed()) == (first, third)
    assert rollout.entries(first, (first, second, third), world.observed()) == (first,)


# --- anything ---------------------------------------------------------------------------------------------------

counts = st.fixed_dictionaries({unit: st.integers(1, 4) for unit in UNITS})
revisions = st.fixed_dictionaries({unit: st.sampled_from([f"{unit}{n}" for n in (1, 2, 3)]) for unit in UNITS})
keys = st.tuples(st.sampled_from(UNITS), st.integers(1, 3)).map(lambda pair: (pair[0], f"{pair[0]}{pair[1]}"))
happenings = st.lists(st.tuples(st.sampled_from(["start", "finish", "reconcile", "control"]), keys), max_size=80)
held = st.builds(
    SimulatedDeployment,
    replicas=st.integers(0, 4),
    starting=st.integers(0, 3),
    ready=st.integers(0, 3),
    leaving=st.integers(0, 2),
)
worlds = st.builds(
    RolloutSimulation,
    held=st.dictionaries(keys, held, max_size=9),
    serving=st.one_of(st.just({}), revisions),
)

BOUNDS = st.sampled_from([(1, 0), (2, 0), (3, 0), (0, 1), (0, 2), (1, 1), (1, 3)]).map(
    lambda pair: {"max_surge": pair[0], "max_unavailable": pair[1]}
)


@settings(max_examples=examples(100), deadline=None)
@given(worlds, revisions, counts, BOUNDS, st.sampled_from(["Coherent", "Recreate"]))
def test_from_any_state_the_goal_is_reached_and_then_nothing_changes(
    world: RolloutSimulation, desired: dict[str, str], replicas: dict[str, int], bounds: dict[str, int], strategy: str
) -> None:
    world.settle()
    asked = goal(desired, replicas, strategy=strategy, **bounds)
    world.run(asked)
    for unit in UNITS:
        assert {rev: n for rev, n in spec_of(world, unit).items() if n} == {desired[unit]: replicas[unit]}
    before = {key: each.replicas for key, each in world.held.items()}
    again = world.act(asked)
    assert dict(again.replicas) == before
    assert not again.rolling


@pytest.mark.proves("roll-out")
@settings(max_examples=examples(100), deadline=None)
@given(counts, revisions, BOUNDS, happenings, st.sets(keys))
def test_a_roll_is_never_below_capacity_and_never_above_its_surge(
    replicas: dict[str, int],
    desired: dict[str, str],
    bounds: dict[str, int],
    events: list[tuple[str, tuple[str, str]]],
    broken: set[tuple[str, str]],
) -> None:
    world = running(OLD, replicas)
    world.broken = broken - set(OLD.items())
    asked, surge = goal(desired, replicas, **bounds), bounds["max_surge"]
    alone = not surge and any(replicas[unit] == 1 and desired[unit] != OLD[unit] for unit in UNITS)
    for what, key in events:
        if what == "reconcile":
            world.reconcile(asked)
        else:
            getattr(world, what)(key)
        for unit in UNITS:
            assert world.ready(unit) >= replicas[unit] - bounds["max_unavailable"]
            assert world.replicas_of(unit) <= replicas[unit] + surge
            assert world.staying(unit) <= replicas[unit] + surge
            assert surge or world.holding(unit) <= replicas[unit], "old pods that end have their GPUs still"
        complete = [min(world.ready(unit, one[unit]) for unit in UNITS) for one in (OLD, desired)]
        assert alone or max(complete) >= 1, "no revision has a complete set"


@settings(max_examples=examples(70), deadline=None)
@given(counts, st.lists(revisions, min_size=2, max_size=4), BOUNDS, happenings)
def test_edits_in_mid_roll_never_take_the_capacity_that_is_there(
    replicas: dict[str, int],
    edits: list[dict[str, str]],
    bounds: dict[str, int],
    events: list[tuple[str, tuple[str, str]]],
) -> None:
    world = running(OLD, replicas)
    every = max(len(events) // len(edits), 1)
    for index, (what, key) in enumerate(events):
        if what == "reconcile":
            world.reconcile(goal(edits[min(index // every, len(edits) - 1)], replicas, **bounds))
        else:
            getattr(world, what)(key)
        for unit in UNITS:
            assert world.ready(unit) >= replicas[unit] - bounds["max_unavailable"]
    world.run(goal(edits[-1], replicas, **bounds))
    for unit in UNITS:
        assert {rev: n for rev, n in spec_of(world, unit).items() if n} == {edits[-1][unit]: replicas[unit]}


def _goal(replicas: int) -> Goal:
    """A roll of a unit and of the coordinator."""
    coordinator = DesiredUnit(revision="c2", replicas=1)
    return msgspec.structs.replace(goal({"a": "a2"}, {"a": replicas}), coordinator=coordinator)


def _keyed(unit: str, revision: str, secret: str, *, replicas: int, terminating: bool = False) -> Workload:
    pods = tuple(
        ObservedPod(name=f"{unit}-{revision}-{n}", uid=f"{unit}{revision}{n}", ready=True, terminating=terminating)
        for n in range(max(replicas, int(terminating)))
    )
    return Workload(
        unit=unit,
        revision=revision,
        name=f"p-{unit}-{revision}",
        uid=f"{unit}{revision}",
        replicas=replicas,
        created_at=0.0 if revision.endswith("1") else 1.0,
        pods=pods,
        control_secret=secret,
    )


def test_across_two_keys_old_units_outlast_the_old_coordinator_and_it_the_roll() -> None:
    desired = _goal(2)
    serving = {"a": "a1"}

    def decided(*observed: Workload) -> dict[tuple[str, str], int]:
        return dict(rollout.decide(desired, observed, serving).replicas)

    old, new = _keyed("a", "a1", "k1", replicas=2), _keyed("a", "a2", "k2", replicas=1)
    coordinators = _keyed(COORDINATOR, "c1", "k1", replicas=1), _keyed(COORDINATOR, "c2", "k2", replicas=1)
    half = decided(old, new, *coordinators)
    assert half == {("a", "a1"): 1, ("a", "a2"): 1, (COORDINATOR, "c1"): 1, (COORDINATOR, "c2"): 1}

    last, new = _keyed("a", "a1", "k1", replicas=1), _keyed("a", "a2", "k2", replicas=2)
    complete = decided(last, new, *coordinators)
    assert complete == {("a", "a1"): 1, ("a", "a2"): 2, (COORDINATOR, "c1"): 0, (COORDINATOR, "c2"): 1}

    draining = _keyed(COORDINATOR, "c1", "k1", replicas=0, terminating=True)
    assert decided(last, new, draining, coordinators[1])["a", "a1"] == 1, "kept connections send requests to it"
    gone = _keyed(COORDINATOR, "c1", "k1", replicas=0)
    assert decided(last, new, gone, coordinators[1])["a", "a1"] == 0


def test_an_old_coordinator_stays_while_requests_wait_at_it_for_new_pods_of_its_key() -> None:
    desired = msgspec.structs.replace(_goal(1), strategy="Recreate")
    old, new = _keyed(COORDINATOR, "c1", "k", replicas=1), _keyed(COORDINATOR, "c2", "k", replicas=1)

    def decided(old: Workload, *observed: Workload) -> int:
        return rollout.decide(desired, [old, new, *observed], {"a": "a1"}).replicas[COORDINATOR, "c1"]

    starts = msgspec.structs.replace(_keyed("a", "a2", "k", replicas=1), pods=(ObservedPod(name="x"),))
    assert decided(old, _keyed("a", "a1", "k", replicas=1)) == 1
    assert decided(old, starts) == 1
    assert decided(old, _keyed("a", "a2", "k", replicas=1)) == 0
    assert decided(_keyed(COORDINATOR, "c1", "k1", replicas=1), starts) == 0, "it will never meet them"


def test_with_one_key_old_units_go_as_soon_as_the_new_ones_are_ready() -> None:
    desired = _goal(1)
    observed = [
        _keyed("a", "a1", "k", replicas=1),
        _keyed("a", "a2", "k", replicas=1),
        _keyed(COORDINATOR, "c1", "k", replicas=1),
        _keyed(COORDINATOR, "c2", "k", replicas=1),
    ]
    assert rollout.decide(desired, observed, {"a": "a1"}).replicas["a", "a1"] == 0


def test_a_revision_without_replicas_ends_once_coordinators_have_the_new_one() -> None:
    world = running({"a": "a1", "b": "b1"}, {"a": 1, "b": 1})
    world.held["a", "a2"] = SimulatedDeployment(replicas=1, ready=1)
    first, second = entry("1", a="a1", b="b1"), entry("2", a="a2", b="b1")
    both, decided = world.observed(), {("a", "a1"): 0, ("a", "a2"): 1, ("b", "b1"): 1}
    assert rollout.entries(second, (first,), both) == (first, second)
    assert rollout.entries(second, (first,), both, kept=decided) == (second,)
    assert rollout.entries(second, (first,), both, kept=decided | {("a", "a1"): 1}) == (first, second)


def test_a_revision_whose_units_sleep_ends_once_coordinators_have_the_new_one() -> None:
    """A request starts the new revision's pods alone: Ready would wait for the old one until a request comes."""
    observed = running({"a": "a1", "b": "b1"}, {"a": 0, "b": 1}).observed()
    first, second = entry("1", a="a1", b="b1"), entry("2", a="a2", b="b1")
    asleep, decided = frozenset({"a"}), {("a", "a1"): 0, ("a", "a2"): 0, ("b", "b1"): 1}
    assert rollout.entries(second, (first,), observed, asleep=asleep) == (first, second)
    assert rollout.entries(second, (first,), observed, kept=decided, asleep=asleep) == (second,)
    # one that still has pods is served while they end, also without the unit that sleeps in both
    third, ending = entry("3", a="a1", b="b2"), {("a", "a1"): 0, ("b", "b1"): 1, ("b", "b2"): 1}
    assert rollout.entries(third, (first,), observed, kept=ending, asleep=asleep) == (first, third)
    # all units sleep
    one, two = entry("1", a="a1"), entry("2", a="a2")
    assert rollout.entries(two, (one,), [], kept={("a", "a2"): 0}, asleep=asleep) == (two,)


def test_a_roll_of_a_pipeline_without_prefill_pods_ends_and_keeps_the_old_revision_served() -> None:
    world = running({"a": "a1", "p": "p1"}, {"a": 1, "p": 0})
    desired = goal({"a": "a2", "p": "p2"}, {"a": 1, "p": 0})
    world.act(desired)
    assert (spec_of(world, "a"), spec_of(world, "p")) == ({"a1": 1, "a2": 1}, {"p1": 0, "p2": 0})
    world.run(desired)
    assert (spec_of(world, "a"), spec_of(world, "p")) == ({"a1": 0, "a2": 1}, {"p1": 0, "p2": 0})


def test_prefill_is_scaled_to_none_and_back_while_nothing_rolls() -> None:
    world = running({"a": "a1", "p": "p1"}, {"a": 1, "p": 2})
    world.run(goal({"a": "a1", "p": "p1"}, {"a": 1, "p": 0}))
    assert spec_of(world, "p") == {"p1": 0}
    world.run(goal({"a": "a1", "p": "p1"}, {"a": 1, "p": 2}))
    assert (spec_of(world, "p"), spec_of(world, "a")) == ({"p1": 2}, {"a1": 1})


def test_a_revision_stays_served_without_pods_of_prefill_and_not_without_those_of_decode() -> None:
    def of(revision: str, a: str, p: str) -> PipelineRevision:
        return PipelineRevision(
            revision=revision,
            units={"a": a, "p": p},
            groups={"a": "a", "p": "p"},
            stages={"think": "a", "think-prefill": "p"},
            entry="think",
            terminals=("think",),
            edges=(("think-prefill", "think", "kv"),),
        )

    old, new = of("old", "a1", "p1"), of("new", "a2", "p2")
    decode_alone = Workload(unit="a", revision="a1", name="a-1", uid="1", replicas=1)
    prefill_alone = Workload(unit="p", revision="p1", name="p-1", uid="2", replicas=1)
    assert rollout.entries(new, [old], [decode_alone]) == (old, new)
    assert rollout.entries(new, [old], [prefill_alone]) == (new,)
