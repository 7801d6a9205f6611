"""The units that wait for the nodes of the units that they are to be near."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_operator.changes.deciding import nearness
from omnipipeline_operator.changes.workloads import ObservedPod, Workload
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import DEPLOYMENT, PIPELINE
from tests.operator.test_reconcile_snapshots import KEY, Operator

A, B, C = ("a", "1"), ("b", "1"), ("c", "1")
ONE_EACH = {A: 1, B: 1, C: 1}
NEAR = {A: (B,), B: (), C: ()}


def pod(*, node: str | None = "n", unschedulable: bool = False, **more: Any) -> ObservedPod:
    return ObservedPod(name="p", node=node, unschedulable=unschedulable, **more)


def workload(of: tuple[str, str], *pods: ObservedPod, refused: str | None = None) -> Workload:
    unit, revision = of
    return Workload(unit=unit, revision=revision, name=unit, uid=unit, replicas=1, pods=pods, refused=refused)


@pytest.mark.parametrize(
    ("replicas", "observed", "waiting"),
    [
        pytest.param(1, [], {A}, id="not made"),
        pytest.param(1, [workload(B)], {A}, id="made without a pod"),
        pytest.param(1, [workload(B, pod(node=None))], {A}, id="the scheduler has not looked"),
        pytest.param(1, [workload(B, pod())], set(), id="it has a node"),
        pytest.param(1, [workload(B, pod(node=None, unschedulable=True))], set(), id="no node has room"),
        pytest.param(1, [workload(B, pod(terminating=True))], {A}, id="a pod that ends"),
        pytest.param(1, [workload(B, pod(finished=True))], {A}, id="a pod that has ended"),
        pytest.param(2, [workload(B, pod())], {A}, id="one of two"),
        pytest.param(2, [workload(B, pod(), pod())], set(), id="two of two"),
        pytest.param(1, [workload(B, pod(), pod())], set(), id="more than wanted"),
        pytest.param(0, [], set(), id="none is wanted"),
        pytest.param(1, [workload(B, refused="exceeded quota")], set(), id="a quota refuses them"),
        pytest.param(1, [workload(("b", "0"), pod())], {A}, id="a pod of another revision"),
    ],
)
def test_a_unit_waits_until_the_scheduler_has_looked_at_the_other_ones_pods(
    replicas: int, observed: list[Workload], waiting: set[tuple[str, str]]
) -> None:
    found = nearness.waiting(NEAR, {A: 1, B: replicas, C: 1}, observed)
    assert found == waiting


def test_nobody_waits_for_a_unit_that_gets_no_pods_for_another_reason() -> None:
    assert nearness.waiting(NEAR, ONE_EACH, [], held={B}) == set()
    assert nearness.waiting(NEAR, {A: 1}, []) == set(), "a paused roll makes none of it"


def test_of_units_that_name_each_other_the_first_does_not_wait() -> None:
    circle = {A: (B,), B: (C,), C: (A,)}
    assert nearness.waiting(circle, ONE_EACH, []) == {C}
    assert nearness.waiting(circle, ONE_EACH, [workload(A, pod())]) == set()


UNITS = [(name, "1") for name in "abcde"]


@given(st.dictionaries(st.sampled_from(UNITS), st.lists(st.sampled_from(UNITS), unique=True)))
def test_all_units_start_whoever_names_whom(near: dict[tuple[str, str], list[tuple[str, str]]]) -> None:
    near = {unit: [each for each in near.get(unit, ()) if each != unit] for unit in UNITS}
    placed: set[tuple[str, str]] = set()
    while len(placed) < len(UNITS):
        waits = nearness.waiting(near, dict.fromkeys(UNITS, 1), [workload(each, pod()) for each in placed])
        started = set(UNITS) - waits - placed
        assert started, "all that are left wait for each other"
        placed |= started


def replicas(operator: Operator) -> dict[str, int]:
    """Those of the Deployment of each unit that has one."""
    found = [one["spec"] for (kind, _, _), one in operator.server.objects.items() if kind == DEPLOYMENT.name]
    return {one["selector"]["matchLabels"][naming.UNIT_LABEL]: one["replicas"] for one in found}


def add_pod(operator: Operator, unit: str, number: int, spec: dict[str, Any]) -> None:
    found = [one for (kind, _, _), one in operator.server.objects.items() if kind == DEPLOYMENT.name]
    labels = [one["spec"]["selector"]["matchLabels"] for one in found]
    its = next(each for each in labels if each[naming.UNIT_LABEL] == unit)
    metadata = {"name": f"{unit}-{number}", "namespace": KEY[0], "labels": its}
    operator.watch({"kind": "Pod", "metadata": metadata, "spec": spec, "status": {}})


async def test_deployments_are_made_and_scaled_when_those_that_they_are_near_have_nodes() -> None:
    operator = Operator()
    near = [{"name": "first", "placement": {"near": ["last"]}}]
    operator.edit(operator.live(PIPELINE, "duo"), processGroups=near)
    await operator.reconcile()
    await operator.reconcile()
    assert replicas(operator) == {"coordinator": 2, "last": 1}
    add_pod(operator, "last", 0, {})
    await operator.reconcile()
    assert replicas(operator) == {"coordinator": 2, "last": 1}, "the scheduler has not looked at it"
    add_pod(operator, "last", 0, {"nodeName": "n"})
    await operator.reconcile()
    assert replicas(operator) == {"coordinator": 2, "first": 1, "last": 1}
    more = [{**near[0], "replicas": 2}, {"name": "last", "replicas": 2}]
    operator.edit(operator.live(PIPELINE, "duo"), processGroups=more)
    await operator.reconcile()
    assert replicas(operator) == {"coordinator": 2, "first": 1, "last": 2}
    add_pod(operator, "last", 1, {"nodeName": "n"})
    await operator.reconcile()
    assert replicas(operator) == {"coordinator": 2, "first": 2, "last": 2}
