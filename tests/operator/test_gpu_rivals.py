"""Two pipelines that want the same GPUs: whole reconciles against an API server in memory, which gives no pods."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from omnipipeline_operator.changes.conditions import rfc3339
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, GroupLoad
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import QUEUE_LABEL
from omnipipeline_operator.desired.pod_templates import pods
from omnipipeline_operator.kinds import CONFIG_MAP, DEPLOYMENT, PIPELINE, POD
from tests.operator.test_reconcile_snapshots import KEY, SETTINGS, Operator

GPUS = [
    {"name": "first", "factory": "m:first", "next": ["last"], "gpu": [0, 1], "tpSize": 2},
    {"name": "last", "process": "last", "factory": "m:last", "terminal": True, "gpu": [2]},
]
NAMES = ("older", "duo")
PATIENCE_S = SETTINGS.gpu_patience_s


class Rivals(Operator):
    """Both pipelines; `reconcile` is of the younger one, duo."""

    def __init__(self, **labels: str) -> None:
        super().__init__()
        for age_s, name in zip((200, 100), NAMES, strict=True):
            metadata = {"name": name, "namespace": KEY[0], "uid": f"u-{name}", "generation": 1, "labels": labels}
            metadata["creationTimestamp"] = rfc3339(self.now - age_s)
            resource: dict[str, Any] = {"kind": PIPELINE.name, "metadata": metadata, "spec": {"stages": GPUS}}
            self.watch({"apiVersion": PIPELINE.api_version, **resource})

    async def both(self) -> None:
        for name in NAMES:
            self.again_s = await self._reconciler.reconcile((KEY[0], name))

    def place(
        self, name: str, unit: str, *, node: str | None, ready: bool = False, priority: int = 0, preempts: bool = False
    ) -> None:
        """The pod of a unit, made ``PATIENCE_S`` ago where it has no node."""
        [its] = [one for one in self.deployments(name) if one["metadata"]["name"].startswith(f"{name}-{unit}-")]
        scheduled = {"type": "PodScheduled", "status": str(node is not None), "message": "0/1 nodes are available"}
        conditions = [scheduled, {"type": "Ready", "status": str(ready), "lastTransitionTime": rfc3339(self.now)}]
        metadata = {"name": f"{name}-{unit}-x", "namespace": KEY[0], "uid": f"{name}-{unit}"}
        metadata |= {"labels": its["spec"]["selector"]["matchLabels"]}
        metadata["creationTimestamp"] = rfc3339(self.now - PATIENCE_S)
        pod: dict[str, Any] = {"kind": POD.name, "metadata": metadata, "status": {"conditions": conditions}}
        policy = "PreemptLowerPriority" if preempts else "Never"
        spec = {"priority": priority, "preemptionPolicy": policy, "containers": [{"name": "stage"}]}
        self.watch({**pod, "spec": spec | ({"nodeName": node} if node else {})})

    def deployments(self, name: str) -> list[dict[str, Any]]:
        labelled = {"omnipipeline.dev/pipeline": name}.items()
        found = [one for (kind, _, _), one in self.server.objects.items() if kind == DEPLOYMENT.name]
        return [one for one in found if labelled <= one["metadata"]["labels"].items()]

    def replicas(self, name: str) -> dict[str, int]:
        named = {one["metadata"]["labels"]["omnipipeline.dev/unit"]: one for one in self.deployments(name)}
        return {unit: one["spec"]["replicas"] for unit, one in named.items()}

    def conditions(self, name: str) -> dict[str, Any]:
        return {each["type"]: each for each in self.live(PIPELINE, name)["status"]["conditions"]}

    async def the_older_one_waits(self, *, preempts: bool = False) -> None:
        """The younger one serves with three GPUs; the older one has come to its priority, and gets one of four."""
        await self.both()
        for unit in ("first", "last", "coordinator"):
            self.place("duo", unit, node="n", ready=True, priority=1)
        await self.reconcile()
        assert self.conditions("duo")["Available"]["status"] == "True"
        self.place("older", "first", node=None, priority=1000, preempts=preempts)
        self.place("older", "last", node="n", priority=1000, preempts=preempts)
        await self._reconciler.reconcile((KEY[0], "older"))


WHOLE = {"first": 1, "last": 1, "coordinator": 2}
AWAY = {"first": 0, "last": 0, "coordinator": 2}


async def half_each(**labels: str) -> Rivals:
    operator = Rivals(**labels)
    await operator.both()
    for name in NAMES:
        operator.place(name, "first", node="n")
        operator.place(name, "last", node=None)
    await operator.both()
    return operator


async def test_the_younger_one_lets_go_says_so_and_the_older_one_keeps_what_it_holds() -> None:
    operator = await half_each()
    assert (operator.replicas("older"), operator.replicas("duo")) == (WHOLE, AWAY)
    found = operator.conditions("duo")
    assert {found[kind]["reason"] for kind in ("Ready", "Scheduled", "StagesReady")} == {"GPUsYielded"}
    assert "space/older waits for GPUs" in found["Ready"]["message"]
    yielded = operator.live(PIPELINE, "duo")["status"]["yielded"]
    assert yielded == {"since": rfc3339(operator.now), "to": "space/older", "gpus": 4, "tries": 1, "failed": 0}
    assert operator.conditions("older")["Scheduled"]["reason"] == "Unschedulable"
    assert operator.again_s is not None and operator.again_s <= PATIENCE_S / 10


@pytest.mark.parametrize("passed_s", [10, -3600])
async def test_it_comes_back_when_the_older_one_is_gone_whatever_the_clock_says(passed_s: float) -> None:
    operator = await half_each()
    for unit in ("first", "last"):
        operator.store.drop(operator.live(POD, f"duo-{unit}-x"))
    await operator.reconcile()
    assert operator.replicas("duo") == AWAY
    operator.store.drop(operator.live(PIPELINE, "older"))
    operator.now += passed_s
    await operator.reconcile()
    assert operator.replicas("duo") == WHOLE


async def test_pods_of_units_have_the_queue_of_their_pipeline() -> None:
    operator = Rivals(**{QUEUE_LABEL: "gpus"})
    await operator.both()
    templates = {
        one["metadata"]["labels"]["omnipipeline.dev/unit"]: one["spec"]["template"]
        for one in operator.deployments("duo")
    }
    queues = {unit: one["metadata"]["labels"].get(QUEUE_LABEL) for unit, one in templates.items()}
    assert queues == {"first": "gpus", "last": "gpus", "coordinator": None}


@pytest.mark.proves("priority")
async def test_one_that_serves_lets_go_for_a_higher_priority_and_both_say_so() -> None:
    operator = Rivals()
    await operator.the_older_one_waits()
    assert operator.woken == [KEY], "nothing has happened to the lower one itself"
    await operator.reconcile()
    assert (operator.replicas("older"), operator.replicas("duo")) == (WHOLE, AWAY)
    found = operator.conditions("duo")
    assert found["Scheduled"]["reason"] == "GPUsYielded"
    assert "space/older waits for GPUs and has a higher priority" in found["Scheduled"]["message"]
    yielded = operator.live(PIPELINE, "duo")["status"]["yielded"]
    counts = {"gpus": 4, "tries": 1, "failed": 0, "given": 3, "priority": 1}
    assert yielded == {"since": rfc3339(operator.now), "to": "space/older", **counts}
    operator.now += 3
    await operator._reconciler.reconcile((KEY[0], "older"))
    found = operator.conditions("older")
    assert found["Scheduled"]["reason"] == "GPUsOnTheirWay"
    assert "let go of them: space/duo (3)" in found["Scheduled"]["message"]
    await operator.reconcile()
    assert operator.replicas("duo") == AWAY, "its pods are ready until they end"


async def test_a_priority_class_that_preempts_is_remarked_on() -> None:
    operator = Rivals()
    await operator.the_older_one_waits(preempts=True)
    assert "preempts pod by pod" in operator.conditions("older")["Accepted"]["message"]
    assert "preempts" not in operator.conditions("duo")["Accepted"]["message"]


async def test_a_pipeline_that_lacks_more_than_lower_ones_hold_gets_nothing() -> None:
    operator = Rivals()
    await operator.both()
    operator.place("duo", "first", node="n", ready=True, priority=1)
    operator.place("duo", "coordinator", node="n", ready=True, priority=1)
    operator.place("older", "first", node=None, priority=1000)
    operator.place("older", "last", node=None, priority=1000)
    await operator.both()
    await operator.reconcile()
    assert operator.replicas("duo") == WHOLE


class Sleepers(Rivals):
    """Both may sleep, and requests wait for both all the time."""

    def __init__(self) -> None:
        super().__init__()
        waits = {group: GroupLoad(waiting=1, held=1) for group in ("first", "last")}
        self.coordinators.answers = [CoordinatorStatus(groups=waits)]
        limits = {"minReplicas": 0, "maxReplicas": 1}
        for name in NAMES:
            groups = [{"name": group, "autoscaling": limits} for group in ("first", "last")]
            resource = self.live(PIPELINE, name)
            self.watch({**resource, "spec": {"stages": GPUS, "processGroups": groups}})

    def hold(self, name: str, *, placed: bool, priority: int = 0) -> None:
        """Its pods have GPUs and are ready, or wait for a node."""
        for unit in ("first", "last"):
            self.place(name, unit, node="n" if placed else None, ready=placed, priority=priority)
        self.place(name, "coordinator", node="n", ready=True)

    async def step(self) -> None:
        for _ in range(2):
            self.now += 3
            await self.both()

    def end(self, name: str) -> None:
        for unit in ("first", "last"):
            self.store.drop(self.live(POD, f"{name}-{unit}-x"))


@pytest.mark.proves("gangs")
async def test_two_that_may_sleep_and_are_both_wanted_take_turns_and_say_so() -> None:
    operator = Sleepers()
    await operator.both()
    assert operator.replicas("older") == operator.replicas("duo") == WHOLE, "requests wait for both"
    for has, waits in (("older", "duo"), ("duo", "older")):
        operator.hold(has, placed=True)
        operator.hold(waits, placed=False)
        await operator.step()
        assert operator.replicas(has) == WHOLE, "its own turn has just begun"
        operator.now += PATIENCE_S
        await operator.step()
        assert (operator.replicas(has), operator.replicas(waits)) == (AWAY, WHOLE)
        found = operator.conditions(has)["Scheduled"]
        assert found["reason"] == "GPUsYielded" and f"it is the turn of space/{waits}" in found["message"]
        assert operator.live(PIPELINE, has)["status"]["yielded"]["turn"] is True
        assert (
            f"that have had their turn, which let go of them: space/{has} (3)"
            in (operator.conditions(waits)["Scheduled"]["message"])
        )
        operator.end(has)
        await operator.step()
        assert operator.replicas(has) == AWAY, "the other one has no GPU yet"
        operator.hold(waits, placed=True)
        await operator.step()
        assert operator.replicas(has) == WHOLE, "it waits for its next turn"
        assert operator.conditions(waits)["Available"]["status"] == "True"


@pytest.mark.proves("priority")
async def test_a_turn_that_has_just_begun_ends_for_a_higher_priority() -> None:
    operator = Sleepers()
    await operator.both()
    operator.hold("duo", placed=True)
    operator.hold("older", placed=False, priority=1000)
    await operator.step()
    assert operator.replicas("duo") == AWAY
    assert "has a higher priority" in operator.conditions("duo")["Scheduled"]["message"]


def _annotated(deployment: dict[str, Any]) -> None:
    deployment["metadata"].setdefault("annotations", {})[naming.RETRIED_AT] = "soon"


def _counted(deployment: dict[str, Any]) -> None:
    deployment["spec"]["template"]["metadata"]["annotations"][pods.CLAIMED_GPUS] = "9" * 5000


def _selecting_otherwise(deployment: dict[str, Any]) -> None:
    expression = {"key": "app", "operator": "Exists"}
    deployment["spec"]["selector"] = {"matchExpressions": [expression]}


@pytest.mark.parametrize("edit", [_annotated, _counted, _selecting_otherwise])
async def test_what_somebody_writes_into_a_deployment_stops_no_other_pipeline(
    edit: Callable[[dict[str, Any]], None],
) -> None:
    operator = await half_each()
    edited = copy.deepcopy(operator.deployments("older")[0])
    edit(edited)
    operator.watch(edited)
    operator.now += 60
    await operator.reconcile()
    assert operator.conditions("duo")["Accepted"]["status"] == "True"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "field, value", [("groups", {}), ("stages", {"first": "ghost"}), ("edges", [["x", "last", "kv"]])]
)
async def test_a_list_of_revisions_that_somebody_edited_stops_no_pipeline_and_is_written_again(
    name: str, field: str, value: Any
) -> None:
    operator = await half_each()
    operator.place(name, "coordinator", node="n", ready=True)
    listed = copy.deepcopy(operator.live(CONFIG_MAP, f"{name}-revisions"))
    before = listed["data"]["revisions.json"]
    [only] = json.loads(before)
    listed["data"]["revisions.json"] = json.dumps([{**only, "revision": "other", field: value}, only])
    operator.watch(listed)
    operator.now += 60
    await operator.reconcile()
    await operator.both()
    assert operator.live(CONFIG_MAP, f"{name}-revisions")["data"]["revisions.json"] == before
