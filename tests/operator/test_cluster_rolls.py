"""Specs are edited during a roll-out on a real API server. A watch records every state of the pods."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from omnipipeline_spec import loading, planning
from tests.operator.pod_recorder import PodRecorder, Ready
from tests.operator.running import Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import deployments

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

REPLICAS = {"first": 2, "last": 3}
GROUPS = [{"name": name, "replicas": count} for name, count in REPLICAS.items()]
NOWHERE: dict[str, Any] = {"placement": {"nodeSelector": {"fake": "nowhere"}}}


def trio(*, size: int, first: str = "first", last: str = "last", **refined: Any) -> dict[str, Any]:
    """Both stages take ``size``: another size changes both units, which then do not fit each other's old revision."""
    arguments = {"factoryArgs": {"size": size}}
    return pipeline(
        stages=[
            {"name": "first", "process": first, "factory": "some.module:first", "next": ["last"], **arguments},
            {"name": "last", "process": last, "factory": "some.module:last", "terminal": True, **arguments},
        ],
        processGroups=[
            {"name": process, "replicas": REPLICAS[stage], **refined}
            for stage, process in (("first", first), ("last", last))
            if stage == "first" or first != last
        ],
    )


def units_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """unit -> revision, as planned here."""
    return dict(planning.plan(loading.from_resource(manifest).spec, name="duo").current.units)


def is_whole(state: Ready, revisions: list[dict[str, str]]) -> bool:
    """Whether requests could be bound: a ready pod of each unit of one pipeline revision, and a coordinator."""
    coordinated = any(unit == "coordinator" for unit, _ in state)
    return coordinated and any(all(state.get(each) for each in one.items()) for one in revisions)


def uids(kube: Kube, revisions: Mapping[str, str]) -> set[str]:
    """Pods of these unit revisions that are not terminating."""
    return {
        pod["metadata"]["uid"]
        for pod in kube.all("pods")
        if "deletionTimestamp" not in pod["metadata"]
        and revisions.get(pod["metadata"]["labels"]["omnipipeline.dev/unit"])
        == pod["metadata"]["labels"]["omnipipeline.dev/revision"]
    }


def test_edits_reverts_and_regroupings_in_mid_roll_never_leave_half_a_set(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    one, stuck, two = trio(size=1), trio(size=9, **NOWHERE), trio(size=2)
    kube.apply(one)
    kube.wait_ready("duo")
    pods = uids(kube, units_of(one))
    with PodRecorder(kube, "duo") as recorder:
        kube.apply(stuck)
        for unit, revision in units_of(stuck).items():
            eventually(
                partial(lambda unit, revision: deployments(kube)[unit].get(revision), unit, revision),
                what="a roll begins",
            )
        eventually(lambda: kube.condition("duo", "Progressing").get("reason") == "InsufficientCapacity")
        assert kube.condition("duo", "Available")["status"] == "True"
        kube.apply(one)
        kube.wait_ready("duo")
        assert uids(kube, units_of(one)) == pods, "going back restarts nothing"
        kube.apply(stuck)
        eventually(lambda: deployments(kube)["last"].get(units_of(stuck)["last"]), what="the roll begins again")
        kube.apply(two)
        kube.wait_ready("duo")
        assert {
            unit: revisions[units_of(two)[unit]] for unit, revisions in deployments(kube).items() if unit in REPLICAS
        } == (REPLICAS)
    states = list(recorder.states())
    assert len(states) > 10
    for state in states:
        assert is_whole(state, [units_of(one), units_of(two)]), state
        for unit, desired in REPLICAS.items():
            assert sum(count for (name, _), count in state.items() if name == unit) >= desired, state


@pytest.mark.proves("roll-out")
def test_without_a_surge_a_roll_takes_one_pod_of_each_unit_and_leaves_complete_sets(
    kube: Kube, operator: OperatorProcess
) -> None:
    alone = {"maxSurge": 0, "maxUnavailable": 1}
    operator.start()
    one, two = (trio(size=size) for size in (1, 2))
    for each in (one, two):
        each["spec"]["rollout"] = alone
    kube.apply(one)
    kube.wait_ready("duo")
    with PodRecorder(kube, "duo") as recorder:
        kube.apply(two)
        kube.wait_ready("duo")
    states = list(recorder.states())
    assert len(states) > 6
    for state in states:
        assert is_whole(state, [units_of(one), units_of(two)]), state
        for unit, desired in REPLICAS.items():
            assert desired - 1 <= sum(count for (name, _), count in state.items() if name == unit) <= desired, state


def test_processes_are_renamed_and_regrouped_without_a_gap(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    shapes = [trio(size=1), trio(size=1, last="final"), trio(size=1, first="both", last="both"), trio(size=1)]
    kube.apply(shapes[0])
    kube.wait_ready("duo")
    with PodRecorder(kube, "duo") as recorder:
        for shape in shapes[1:]:
            kube.apply(shape)
            ready = kube.wait_ready("duo")
            counted = {unit: count for unit, counts in deployments(kube).items() if (count := sum(counts.values()))}
            assert set(counted) == {*units_of(shape), "coordinator"}
            assert {each["name"] for each in ready["status"]["units"]} == set(counted)
    for state in recorder.states():
        assert is_whole(state, [units_of(shape) for shape in shapes]), state


@pytest.mark.proves("coordinators-scaled")
def test_several_coordinators_are_scaled_without_a_restart_and_roll_one_at_a_time(
    kube: Kube, operator: OperatorProcess
) -> None:
    """Unasked there are two, on nodes of their own."""

    def with_coordinators(replicas: int | None, **coordinator: Any) -> dict[str, Any]:
        manifest = pipeline(disruption={"podDisruptionBudget": {}})
        manifest["spec"]["coordinator"] |= {"replicas": replicas, **coordinator}
        if replicas is None:
            del manifest["spec"]["coordinator"]["replicas"], manifest["spec"]["disruption"]
        return manifest

    def coordinators() -> dict[str, str]:
        """uid -> revision of the coordinators' pods that are not terminating."""
        found = [each["metadata"] for each in kube.all("pods", "omnipipeline.dev/unit=coordinator")]
        return {
            each["uid"]: each["labels"]["omnipipeline.dev/revision"]
            for each in found
            if "deletionTimestamp" not in each
        }

    def allowed_disruptions() -> dict[str, int]:
        found = kube.all("poddisruptionbudgets")
        units = [each["spec"]["selector"]["matchLabels"]["omnipipeline.dev/unit"] for each in found]
        allowed = [each.get("status", {}).get("disruptionsAllowed") for each in found]
        return dict(zip(units, allowed, strict=True))

    def nodes() -> set[str]:
        found = kube.all("pods", "omnipipeline.dev/unit=coordinator")
        return {each["spec"]["nodeName"] for each in found if each["metadata"]["uid"] in coordinators()}

    operator.start()
    kube.apply(with_coordinators(None))
    kube.wait_ready("duo")
    eventually(lambda: len(coordinators()) == len(nodes()) == 2)
    eventually(lambda: allowed_disruptions() == {"coordinator": 1})
    kube.apply(with_coordinators(3))
    ready = eventually(lambda: len(coordinators()) == 3 and kube.wait_ready("duo"))
    assert len(nodes()) == 3
    three = eventually(lambda: len(found := coordinators()) == 3 and found)
    [reported] = [each for each in ready["status"]["units"] if each["name"] == "coordinator"]
    assert (reported["replicas"], reported["ready"], reported["updated"]) == (3, 3, 3)
    eventually(lambda: allowed_disruptions() == {"first": 1, "last": 1, "coordinator": 1})
    kube.apply(with_coordinators(1))
    one = eventually(lambda: len(found := coordinators()) == 1 and found)
    assert one.items() <= three.items()
    kube.apply(with_coordinators(4))
    four = eventually(lambda: len(found := coordinators()) == 4 and found)
    assert one.items() <= four.items()
    kube.apply(with_coordinators(3))
    eventually(lambda: len(coordinators()) == 3)
    kube.wait_ready("duo")
    [old] = set(coordinators().values())
    with PodRecorder(kube, "duo") as recorder:
        kube.apply(with_coordinators(3, retries=3))
        kube.wait_ready("duo")
        [new] = set(eventually(lambda: len(found := coordinators()) == 3 and found).values())
    assert deployments(kube)["coordinator"] == {old: 0, new: 3}
    counts = [(state.get(("coordinator", old), 0), state.get(("coordinator", new), 0)) for state in recorder.states()]
    assert old != new and len(set(counts)) > 3
    assert all(3 <= before + after <= 4 for before, after in counts), counts
