"""Units whose replicas follow their load: whole reconciles against an API server and coordinators in memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnipipeline_operator.changes.deciding import rollout
from omnipipeline_operator.changes.deciding.rollout import DesiredUnit
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, GroupLoad
from omnipipeline_operator.kinds import CONFIG_MAP, DEPLOYMENT, PIPELINE
from omnipipeline_spec.types.pods import ON_DEMAND_FILE
from tests.operator.test_reconcile_snapshots import KEY, Operator
from tests.operator.test_status import PLAN, READY, all_of, conditions_of, coordinator, inputs

LIMITS = {"minReplicas": 0, "maxReplicas": 4, "scaleDownDelaySeconds": 10}
STEP_S = 2.0


def scaled(**limits: Any) -> Operator:
    operator = Operator()
    groups = [{"name": "last", "autoscaling": {**LIMITS, **limits}}]
    operator.edit(operator.live(PIPELINE, "duo"), processGroups=groups)
    return operator


def replicas(operator: Operator) -> int:
    """The replicas of the Deployment of the unit that is scaled."""
    found = [one for (kind, _, name), one in operator.server.objects.items() if kind == DEPLOYMENT.name]
    [its] = [one for one in found if one["metadata"]["name"].startswith("duo-last-")]
    return int(its["spec"]["replicas"])


def unit(operator: Operator) -> dict[str, Any]:
    units: list[dict[str, Any]] = operator.live(PIPELINE, "duo")["status"]["units"]
    return next(each for each in units if each["name"] == "last")


def available(operator: Operator) -> tuple[str, str]:
    conditions = operator.live(PIPELINE, "duo")["status"]["conditions"]
    return next((each["status"], each["reason"]) for each in conditions if each["type"] == "Available")


async def step(operator: Operator, **load: Any) -> int:
    operator.now += STEP_S
    operator.coordinators.answers = [CoordinatorStatus(groups={"first": GroupLoad(ready=1), "last": GroupLoad(**load)})]
    await operator.reconcile()
    assert operator.again_s == STEP_S, "no watch reports a load"
    return replicas(operator)


async def test_a_unit_follows_its_load_from_none_and_back_and_its_status_says_why() -> None:
    operator = scaled()
    await operator.reconcile()
    assert (replicas(operator), unit(operator)["scaling"]) == (0, "starts with 0")
    listed = operator.live(CONFIG_MAP, "duo-revisions")["data"]
    assert listed[ON_DEMAND_FILE] == '["last"]'
    assert await step(operator) == 0
    assert await step(operator, waiting=3, held=3) == 1
    assert unit(operator)["scaling"] == "up to 1: 3 wait for the first instance"
    assert await step(operator, waiting=3, held=3) == 1, "its pod is on its way"
    assert await step(operator, arrivals_per_s=3.0, service_s=1.0) == 4
    assert unit(operator)["replicas"] == 4
    operator.coordinators.answers = []
    operator.now += 60
    await operator.reconcile()
    assert replicas(operator) == 4, "nobody reports"
    found = [await step(operator, arrivals_per_s=0.0, service_s=1.0) for _ in range(8)]
    assert found[0] == 4 and found[-1] == 0
    assert unit(operator)["scaling"] == "down to 0: no request for 10 s"
    assert not await operator.reconcile(), "a load that does not change writes nothing"


async def test_a_pipeline_whose_coordinators_do_not_answer_the_operator_says_so_after_a_while() -> None:
    def said() -> str:
        return str(operator.live(PIPELINE, "duo")["status"]["conditions"][0]["message"])

    operator = scaled(minReplicas=1)
    await operator.reconcile()
    deployments = [one for (kind, _, _), one in operator.server.objects.items() if kind == DEPLOYMENT.name]
    [template] = [one["spec"]["template"] for one in deployments if "-coordinator-" in one["metadata"]["name"]]
    metadata = {**template["metadata"], "name": "pod", "namespace": KEY[0], "uid": "pod"}
    ready = {"type": "Ready", "status": "True"}
    status = {"podIP": "10.0.0.1", "conditions": [ready]}
    operator.watch({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status})
    for _ in range(12):
        operator.now += STEP_S
        await operator.reconcile()
        assert "no coordinator answers" not in said()
    for _ in range(5):
        operator.now += STEP_S
        await operator.reconcile()
    assert "no coordinator answers the operator at port 8081" in said()
    await step(operator)
    assert said() == "2 pod units are planned"


async def test_an_operator_that_restarts_goes_on_with_what_was_decided_and_gives_up_nothing_at_once() -> None:
    operator = scaled(minReplicas=1)
    await operator.reconcile()
    assert await step(operator, arrivals_per_s=3.0, service_s=1.0) == 4
    operator._reconciler._seen.clear()
    assert await step(operator, arrivals_per_s=0.1, service_s=1.0) == 4
    assert unit(operator)["scaling"].startswith("up to 4: load 3.0")
    assert [await step(operator, arrivals_per_s=0.1, service_s=1.0) for _ in range(8)][-1] == 1


async def test_a_pipeline_that_is_suspended_has_none_whatever_its_load() -> None:
    operator = scaled(minReplicas=1)
    await operator.reconcile()
    operator.edit(operator.live(PIPELINE, "duo"), processGroups=[{"name": "last", "autoscaling": LIMITS}], suspend=True)
    operator.coordinators.answers = [CoordinatorStatus(groups={"last": GroupLoad(waiting=9)})]
    await operator.reconcile()
    assert replicas(operator) == 0


async def test_a_refused_edit_leaves_a_pipeline_with_a_unit_that_sleeps_available() -> None:
    operator = scaled()
    await operator.reconcile()
    for kind, _, name in list(operator.server.objects):
        if kind == DEPLOYMENT.name and not name.startswith("duo-last-"):
            template = operator.live(DEPLOYMENT, name)["spec"]["template"]["metadata"]
            metadata = {**template, "name": name, "namespace": KEY[0], "uid": name}
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            operator.watch({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": ready})
    await operator.reconcile()
    groups, refused = [{"name": "last", "autoscaling": LIMITS}], [{"name": "not a name", "value": "1"}]
    assert available(operator) == ("True", "Serving")
    operator.edit(operator.live(PIPELINE, "duo"), processGroups=groups, env=refused)
    await operator.reconcile()
    assert available(operator) == ("True", "Serving"), "requests start it still"


@pytest.mark.proves("starts-on-demand")
def test_a_pipeline_with_a_unit_that_sleeps_is_available_and_ready() -> None:
    sleeping = PLAN.units[-1].name
    observed = (*(each for each in all_of(PLAN, READY) if each.unit != sleeping), coordinator(READY))
    asleep = DesiredUnit(revision=PLAN.units[-1].revision, replicas=0, asleep=True)
    given = inputs(*observed)
    goal = msgspec.structs.replace(given.goal, units={**given.goal.units, sleeping: asleep})
    decision = rollout.decide(goal, observed, {})
    found = conditions_of(msgspec.structs.replace(given, goal=goal, decision=decision))
    assert (found["Available"], found["Ready"]) == (("True", "Serving"), ("True", "Serving"))
    assert conditions_of(given)["Available"][0] == "False", "of a unit that does not sleep one is missing"
