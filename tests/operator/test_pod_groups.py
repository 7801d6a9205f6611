"""The PodGroup of a pipeline: who is a member, how many are waited for, and pods that were made before or after it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.changes import workloads
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.desired import children, podgroups
from omnipipeline_operator.desired.pod_templates import pods
from omnipipeline_operator.desired.podgroups import Grouped
from omnipipeline_operator.kinds import DEPLOYMENT, PIPELINE, POD_GROUP
from omnipipeline_operator.settings import Settings
from omnipipeline_spec import planning
from tests.operator.test_children import FACTS, spec
from tests.operator.test_reconcile_snapshots import STAGES, Operator

SCHEDULER = "scheduler-plugins-scheduler"
GPUS: list[dict[str, Any]] = [
    {"name": "a", "process": "a", "factory": "m:a", "next": ["b"], "gpu": [0]},
    {"name": "b", "process": "b", "factory": "m:b", "next": ["c"], "gpu": [1]},
    {"name": "c", "process": "c", "factory": "m:c", "terminal": True},
]
NONE = Grouped()
SLEEPS = {"minReplicas": 0, "maxReplicas": 4}


def made(grouped: Grouped = NONE, scheduler: str = SCHEDULER, queue: str = "", **more: Any) -> children.Children:
    given = spec(stages=GPUS, **more)
    facts = msgspec.structs.replace(FACTS, group_scheduler=scheduler, grouped=grouped, queue=queue)
    return children.children(given, planning.plan(given, name="demo"), facts)


def group_of(found: children.Children) -> dict[str, Any] | None:
    return next((each for each in found.applied if each["kind"] == "PodGroup"), None)


def members(found: children.Children) -> dict[str, str]:
    """unit -> the scheduler of its pods, where they have the group's label."""
    templates = {each.unit: each.deployment["spec"]["template"] for each in found.workloads}
    labelled = {unit: each for unit, each in templates.items() if podgroups.LABEL in each["metadata"]["labels"]}
    assert {each["metadata"]["labels"][podgroups.LABEL] for each in labelled.values()} <= {"demo"}
    assert {unit for unit, each in templates.items() if "schedulerName" in each["spec"]} == labelled.keys()
    return {unit: each["spec"]["schedulerName"] for unit, each in labelled.items()}


def test_pods_with_gpus_are_members_and_all_of_them_are_waited_for() -> None:
    found = made(processGroups=[{"name": "a", "replicas": 3}])
    group = group_of(found)
    assert group is not None
    assert (group["apiVersion"], group["metadata"]["name"]) == ("scheduling.x-k8s.io/v1alpha1", "demo")
    assert group["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert group["spec"] == {"minMember": 4}
    assert members(found) == {"a": SCHEDULER, "b": SCHEDULER}


@pytest.mark.parametrize(
    "more, least, of",
    [
        pytest.param({"processGroups": [{"name": "a", "autoscaling": SLEEPS}]}, 1, {"a", "b"}, id="one may sleep"),
        pytest.param(
            {"processGroups": [{"name": name, "autoscaling": SLEEPS} for name in "ab"]}, 1, {"a", "b"}, id="both may"
        ),
        pytest.param(
            {"processGroups": [{"name": "b", "placement": {"near": ["a"]}}]},
            1,
            {"a"},
            id="pods that are made when others have nodes",
        ),
        pytest.param({"grouped": Grouped(others=frozenset({"a"}))}, 1, {"a", "b"}, id="pods that were made before"),
        pytest.param({"queue": "team"}, None, set(), id="Kueue admits them"),
        pytest.param({"scheduler": ""}, None, set(), id="no scheduler is named"),
        pytest.param(
            {"scheduler": "", "grouped": Grouped(units=frozenset({"a"}), others=frozenset({"b"}), any=True)},
            1,
            set(),
            id="pods of a scheduler that is not named any more",
        ),
        pytest.param({"scheduler": "", "grouped": Grouped(any=True)}, 1, set(), id="old pods alone"),
    ],
)
def test_no_pod_waits_for_members_that_do_not_come(more: dict[str, Any], least: int | None, of: set[str]) -> None:
    found = made(**more)
    group = group_of(found)
    assert (None if group is None else group["spec"]["minMember"]) == least
    assert set(members(found)) == of


def test_what_pods_have_is_read_from_their_templates() -> None:
    templates = {each.unit: each.deployment for each in made().workloads}
    live = {"metadata": {"uid": "u", "name": "x"}, "spec": {}}
    read = {
        unit: workloads.read_workload({**live, "spec": {**each["spec"], "replicas": 1}}, []).grouped
        for unit, each in templates.items()
    }
    assert read == {"a": True, "b": True, "c": False, "coordinator": False}

    def workload(unit: str, revision: str, *, grouped: bool, replicas: int = 1) -> Workload:
        return Workload(unit=unit, revision=revision, name=unit, uid=unit, replicas=replicas, grouped=grouped)

    seen = [
        workload("a", "new", grouped=True, replicas=0),
        workload("b", "new", grouped=False),
        workload("b", "old", grouped=True),
    ]
    desired = {"a": "new", "b": "new"}
    assert workloads.grouped(seen, desired, wanted=False) == Grouped(
        units=frozenset("a"), others=frozenset("b"), any=True
    )
    assert workloads.grouped(seen[:2], desired, wanted=True).any is False
    assert workloads.grouped(seen[1:2], desired, wanted=True) == Grouped(others=frozenset("b"))
    assert workloads.grouped(seen[1:2], desired, wanted=False) == Grouped()


def test_a_pipeline_without_gpus_has_no_group() -> None:
    given = spec(stages=[{**each, "gpu": []} for each in GPUS])
    facts = msgspec.structs.replace(FACTS, group_scheduler=SCHEDULER)
    assert group_of(children.children(given, planning.plan(given, name="demo"), facts)) is None
    assert podgroups.remark(planning.plan(given, name="demo"), SCHEDULER, "gone") is None


async def test_a_cluster_without_the_kind_places_pods_one_by_one_and_the_status_says_so() -> None:
    gone = {POD_GROUP.name: errors.NotFound("GET", 404, "could not find the requested resource")}
    lacking: dict[str, errors.ClusterError] = {**gone}
    operator = Operator(Settings(stage_image="stage:1", group_scheduler=SCHEDULER), lacking=lambda: lacking)

    def of_stages() -> list[dict[str, Any]]:
        found = [made for (kind, _, _), made in operator.server.objects.items() if kind == DEPLOYMENT.name]
        return [each["spec"]["template"] for each in found if pods.gpus(each)]

    def accepted() -> str:
        found = operator.live(PIPELINE, "duo")["status"]["conditions"]
        [message] = [each["message"] for each in found if each["type"] == "Accepted"]
        return str(message)

    stages = [{**each, "gpu": [number]} for number, each in enumerate(STAGES)]
    operator.edit(operator.live(PIPELINE, "duo"), stages=stages)
    await operator.reconcile()
    assert [each["spec"].get("schedulerName") for each in of_stages()] == [None] * len(stages)
    assert "podGroupScheduler needs PodGroup of scheduling.x-k8s.io/v1alpha1" in accepted()
    lacking.clear()
    operator.now += 10
    await operator.reconcile()
    assert not [kind for kind, _, _ in operator.server.objects if kind == kinds.POD_GROUP.name], "pods stay as they are"
    assert "podGroupScheduler" not in accepted()
    operator.edit(operator.live(PIPELINE, "duo"), stages=stages, restartedAt="now")
    await operator.reconcile()
    assert operator.live(POD_GROUP, "duo")["spec"] == {"minMember": len(stages)}
