"""The PodGroup of a pipeline: who is a member, how many are waited for, and pods that were made before or after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from omnipipeline_operator import errors
from omnipipeline_operator.changes import workloads
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster import applying, store
from omnipipeline_operator.desired import children, podgroups
from omnipipeline_operator.desired.pod_templates import pods
from omnipipeline_operator.desired.podgroups import Grouped, Groups
from omnipipeline_operator.kinds import DEPLOYMENT, OWN_POD_GROUP, PIPELINE, POD_GROUP, Kind
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
SLEEPS = {"minReplicas": 0, "maxReplicas": 4}
BOTH = pytest.mark.parametrize("kind", [POD_GROUP, OWN_POD_GROUP], ids=["of scheduler-plugins", "of Kubernetes"])


def made(kind: Kind | None, grouped: Mapping[str, Grouped] | None = None, **more: Any) -> children.Children:
    given = spec(stages=GPUS, **more)
    groups = Groups(kind=kind, scheduler=SCHEDULER, grouped=grouped or {})
    facts = msgspec.structs.replace(FACTS, groups=groups)
    return children.children(given, planning.plan(given, name="demo"), facts)


def least(found: children.Children, kind: Kind) -> int | None:
    """How many pods the group of this kind waits for; no other kind has one."""
    groups = [each for each in found.applied if each["kind"] == "PodGroup"]
    assert all(each["apiVersion"] == kind.api_version for each in groups)
    if not groups:
        return None
    if kind is POD_GROUP:
        return groups[0]["spec"]["minMember"]  # type: ignore[no-any-return]
    return groups[0]["spec"]["schedulingPolicy"]["gang"]["minCount"]  # type: ignore[no-any-return]


def members(found: children.Children, kind: Kind) -> dict[str, str]:
    """unit -> the scheduler of its pods, where they name a group of this kind."""
    templates = {each.unit: each.deployment["spec"]["template"] for each in found.workloads}
    named = {
        unit: each["metadata"]["labels"].get(podgroups.LABEL)
        if kind is POD_GROUP
        else each["spec"].get("schedulingGroup", {}).get("podGroupName")
        for unit, each in templates.items()
    }
    grouped = {unit for unit, group in named.items() if group == "demo"}
    assert {unit for unit, each in templates.items() if podgroups.key_in(each)} == grouped
    assert {unit for unit, each in templates.items() if "schedulerName" in each["spec"]} == grouped
    return {unit: templates[unit]["spec"]["schedulerName"] for unit in grouped}


@BOTH
def test_pods_with_gpus_are_members_and_all_of_them_are_waited_for(kind: Kind) -> None:
    found = made(kind, processGroups=[{"name": "a", "replicas": 3}])
    [group] = [each for each in found.applied if each["kind"] == "PodGroup"]
    assert group["metadata"]["name"] == "demo"
    assert group["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert least(found, kind) == 4
    assert members(found, kind) == {"a": SCHEDULER, "b": SCHEDULER}


def test_the_objects_are_those_that_each_api_defines() -> None:
    shown = [
        {key: each[key] for key in ("apiVersion", "kind", "spec")}
        for kind in (POD_GROUP, OWN_POD_GROUP)
        for each in made(kind).applied
        if each["kind"] == "PodGroup"
    ]
    gang = {"schedulingPolicy": {"gang": {"minCount": 2}}}
    assert shown == [
        {"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup", "spec": {"minMember": 2}},
        {"apiVersion": "scheduling.k8s.io/v1alpha2", "kind": "PodGroup", "spec": gang},
    ]


NOT_WANTED = {"wanted": False}


@BOTH
@pytest.mark.parametrize(
    "more, waited_for, of",
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
        pytest.param({"grouped": Grouped(apart=True)}, 1, {"a", "b"}, id="pods of a roll that replaces others"),
        pytest.param(NOT_WANTED, None, set(), id="new pods name none"),
        pytest.param(
            {**NOT_WANTED, "grouped": Grouped(units=frozenset({"a"}), others=frozenset({"b"}), any=True)},
            1,
            set(),
            id="pods of a scheduler that is not named any more",
        ),
        pytest.param({**NOT_WANTED, "grouped": Grouped(any=True)}, 1, set(), id="old pods alone"),
    ],
)
def test_no_pod_waits_for_members_that_do_not_come(
    kind: Kind, more: dict[str, Any], waited_for: int | None, of: set[str]
) -> None:
    given = {key: value for key, value in more.items() if key not in ("wanted", "grouped")}
    grouped = {kind.key: more["grouped"]} if "grouped" in more else {}
    found = made(kind if more.get("wanted", True) else None, grouped, **given)
    assert (least(found, kind), set(members(found, kind))) == (waited_for, of)


def test_pods_keep_the_kind_of_group_that_they_name_when_new_ones_get_another() -> None:
    old = Grouped(units=frozenset("a"), others=frozenset("b"), any=True)
    found = made(POD_GROUP, {POD_GROUP.key: Grouped(others=frozenset("a")), OWN_POD_GROUP.key: old})
    groups = {each["apiVersion"]: each["spec"] for each in found.applied if each["kind"] == "PodGroup"}
    assert groups == {
        POD_GROUP.api_version: {"minMember": 1},
        OWN_POD_GROUP.api_version: {"schedulingPolicy": {"gang": {"minCount": 1}}},
    }


@pytest.mark.parametrize(
    "scheduler, lacking, queue, kind",
    [
        ("", [], "", None),
        (SCHEDULER, [], "", POD_GROUP),
        (SCHEDULER, [POD_GROUP.key], "", OWN_POD_GROUP),
        (SCHEDULER, [OWN_POD_GROUP.key], "", POD_GROUP),
        (SCHEDULER, [POD_GROUP.key, OWN_POD_GROUP.key], "", None),
        pytest.param(SCHEDULER, [], "team", None, id="Kueue admits the pods"),
    ],
)
def test_new_pods_name_the_first_kind_that_the_cluster_has(
    scheduler: str, lacking: list[str], queue: str, kind: Kind | None
) -> None:
    assert podgroups.chosen(scheduler, lacking, queue) is kind


@BOTH
def test_what_pods_name_is_read_from_their_templates(kind: Kind) -> None:
    templates = {each.unit: each.deployment for each in made(kind).workloads}
    live = {"kind": "Deployment", "metadata": {"uid": "u", "name": "x"}, "spec": {}}
    read = {
        unit: workloads.read_workload(store.slimmed({**live, "spec": {**each["spec"], "replicas": 1}}), []).grouped
        for unit, each in templates.items()
    }
    assert read == {"a": kind.key, "b": kind.key, "c": "", "coordinator": ""}

    def workload(unit: str, revision: str, grouped: str, *, replicas: int = 1) -> Workload:
        return Workload(unit=unit, revision=revision, name=unit, uid=unit, replicas=replicas, gpus=1, grouped=grouped)

    seen = [workload("a", "new", kind.key, replicas=0), workload("b", "new", ""), workload("b", "old", kind.key)]
    desired, others = {"a": "new", "b": "new"}, Grouped(others=frozenset("b"))
    assert workloads.grouped(seen, desired, "ab", wanted=None) == {
        kind.key: Grouped(units=frozenset("a"), others=frozenset("b"), any=True)
    }
    assert workloads.grouped(seen[:2], desired, "ab", wanted=kind)[kind.key].any is False
    assert workloads.grouped(seen[1:2], desired, "ab", wanted=kind) == {kind.key: others}
    assert workloads.grouped(seen[1:2], desired, "ab", wanted=None) == {}
    [other] = [each for each in podgroups.KINDS if each is not kind]
    assert workloads.grouped(seen, desired, "ab", wanted=other)[other.key] == Grouped(
        others=frozenset("ab"), apart=True
    )


@BOTH
@pytest.mark.parametrize(
    "given, apart",
    [
        pytest.param({}, True, id="a roll replaces them"),
        pytest.param({"unit": "gone"}, True, id="their unit is regrouped"),
        pytest.param({"revision": "new"}, False, id="they stay"),
        pytest.param({"unit": "near"}, False, id="their successors are not members, either"),
        pytest.param({"gpus": 0}, False, id="they hold no GPU"),
        pytest.param({"replicas": 0}, False, id="none is left"),
        pytest.param({"grouped": True}, False, id="they are members"),
    ],
)
def test_members_wait_for_one_of_them_while_pods_outside_of_the_group_are_replaced(
    kind: Kind, given: dict[str, Any], apart: bool
) -> None:
    given = {**given, "grouped": kind.key if given.get("grouped") else ""}
    old = Workload(**{"unit": "a", "revision": "old", "name": "x", "uid": "u", "replicas": 2, "gpus": 1, **given})
    [found] = workloads.grouped([old], {"a": "new", "near": "new"}, {"a"}, wanted=kind).values()
    assert found.apart is apart


def test_a_pipeline_without_gpus_has_no_group() -> None:
    given = spec(stages=[{**each, "gpu": []} for each in GPUS])
    facts = msgspec.structs.replace(FACTS, groups=Groups(kind=POD_GROUP, scheduler=SCHEDULER))
    plan = planning.plan(given, name="demo")
    assert least(children.children(given, plan, facts), POD_GROUP) is None
    assert podgroups.remark(plan, SCHEDULER, {each.key: "gone" for each in podgroups.KINDS}) is None


@BOTH
async def test_a_cluster_without_both_kinds_places_pods_one_by_one_and_the_status_says_so(kind: Kind) -> None:
    gone = errors.NotFound("GET", 404, "could not find the requested resource")
    lacking: dict[str, errors.ClusterError] = {each.key: gone for each in podgroups.KINDS}
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
    assert accepted().endswith(
        "podGroupScheduler needs PodGroup of scheduling.x-k8s.io/v1alpha1 or scheduling.k8s.io/v1alpha2, which the "
        "operator cannot read in this cluster (could not find the requested resource): pods come one by one"
    )
    del lacking[kind.key]
    operator.now += 10
    await operator.reconcile()
    assert not [of for of, _, _ in operator.server.objects if of == kind.key], "pods stay as they are"
    assert "podGroupScheduler" not in accepted()
    operator.edit(operator.live(PIPELINE, "duo"), stages=stages, restartedAt="now")
    await operator.reconcile()
    waits = {"minMember": 1}  # for one: the pods of before go as members come
    own = {"schedulingPolicy": {"gang": {"minCount": 1}}}
    assert operator.live(kind, "duo")["spec"] == (own if kind is OWN_POD_GROUP else waits)


async def test_a_group_of_kubernetes_is_made_anew_beneath_its_protection() -> None:
    gone = errors.NotFound("GET", 404, "gone")
    settings = Settings(stage_image="stage:1", group_scheduler=SCHEDULER)
    operator = Operator(settings, lacking=lambda: {POD_GROUP.key: gone})
    stages = [{**each, "gpu": [number]} for number, each in enumerate(STAGES)]

    def edit(replicas: int) -> None:
        groups = [{"name": "first", "replicas": replicas}]
        operator.edit(operator.live(PIPELINE, "duo"), stages=stages, processGroups=groups)

    def group(**metadata: Any) -> dict[str, Any]:
        """The group as it is, with what Kubernetes adds to it."""
        live = operator.live(OWN_POD_GROUP, "duo")
        operator.watch({**live, "metadata": {**live["metadata"], **metadata}})
        return live

    edit(1)
    await operator.reconcile()
    for replicas, ended in ((3, {}), (1, {}), (1, {"deletionTimestamp": "now"})):
        before = group(finalizers=[applying.PROTECTION], **ended)
        edit(replicas)
        writes = [write[0] for write in await operator.reconcile() if write[1] == "PodGroup"]
        assert writes == [*([] if ended else ["delete"]), "apply", "merge", "apply"]
        after = operator.live(OWN_POD_GROUP, "duo")
        assert after["metadata"]["uid"] != before["metadata"]["uid"]
        assert after["spec"] == {"schedulingPolicy": {"gang": {"minCount": replicas + 1}}}
        assert await operator.reconcile() == []

    before = group(finalizers=[applying.PROTECTION, "example.org/other"], deletionTimestamp="now")
    await operator.reconcile()
    assert operator.live(OWN_POD_GROUP, "duo")["metadata"]["uid"] == before["metadata"]["uid"], "somebody else keeps it"
    assert "example.org/other" in str(operator.live(PIPELINE, "duo")["status"]["conditions"])
