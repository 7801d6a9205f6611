"""Kubernetes' own PodGroups with its own scheduler: pipelines get all their GPUs or none, and rolls go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnipipeline_operator.kinds import OWN_POD_GROUP
from tests.cluster_kit import Cluster, kit
from tests.operator.gang_scheduling import gang_scheduling
from tests.operator.running import FAKE_GROUP, TOLERATED, Kube, OperatorProcess, eventually, pipeline

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,  # the API server, the controllers and the scheduler start twice
    pytest.mark.timeout(400),
]

#: Four GPUs: one of the simulated nodes.
ONE_NODE = {"tolerations": TOLERATED, "nodeSelector": {"kubernetes.io/hostname": f"{FAKE_GROUP}-1"}}
LATER = "later"  # a Secret without which the last unit gets no pod
LESS = {"maxSurge": 0, "maxUnavailable": 1}
SCHEDULER = {"OMNI_OPERATOR_POD_GROUP_SCHEDULER": "default-scheduler"}
GROUPS = f"{OWN_POD_GROUP.plural}.{OWN_POD_GROUP.version}.{OWN_POD_GROUP.group}"


@pytest.fixture(scope="module")
def gangs(prepared: tuple[Cluster, Path]) -> Iterator[None]:
    program = kit()
    assert program is not None
    with gang_scheduling(prepared[0], program):
        yield


@pytest.fixture
def together(gangs: None, kube: Kube) -> Iterator[Kube]:
    """A namespace that is gone before the API server no longer knows PodGroups."""
    yield kube
    kube("delete", "omnipipelines", "--all", "--cascade=foreground")
    kube.cluster.kubectl("delete", "namespace", kube.namespace, "--timeout=50s")


def of_gpus(name: str = "duo", first: int = 2, *, waits: bool = False, **spec: Any) -> dict[str, Any]:
    """A GPU for each pod: ``first`` ones at once, and the last one, which may wait for the Secret."""
    stages: list[dict[str, Any]] = [
        {"name": "first", "process": "first", "factory": "some.module:first", "next": ["last"], "gpu": [0]},
        {"name": "last", "process": "last", "factory": "some.module:last", "terminal": True, "gpu": [1]},
    ]
    last: dict[str, Any] = {"name": "last", "placement": ONE_NODE}
    if waits:
        last["podTemplate"] = {"spec": {"volumes": [{"name": "extra", "secret": {"secretName": LATER}}]}}
    groups = [{"name": "first", "placement": ONE_NODE, "replicas": first}, last]
    return pipeline(name, stages=stages, processGroups=groups, **spec)


def pods(kube: Kube, name: str) -> dict[str, str]:
    """uid -> node of the pods with GPUs that are to stay; empty where it has none."""
    found = kube.all("pods", f"omnipipeline.dev/pipeline={name},omnipipeline.dev/unit!=coordinator")
    live = [each for each in found if "deletionTimestamp" not in each["metadata"]]
    return {each["metadata"]["uid"]: each["spec"].get("nodeName", "") for each in live}


def placed(kube: Kube, name: str) -> int:
    return sum(map(bool, pods(kube, name).values()))


def waited_for(kube: Kube, name: str = "duo") -> int | None:
    """How many pods the group waits for; None: it does not exist."""
    found = kube("get", GROUPS, name, "--ignore-not-found", "-o", "json")
    return json.loads(found)["spec"]["schedulingPolicy"]["gang"]["minCount"] if found else None


def has_group(kube: Kube) -> bool:
    """Whether there is one that is not being deleted."""
    found = kube("get", GROUPS, "duo", "--ignore-not-found", "-o", "json")
    return bool(found) and "deletionTimestamp" not in json.loads(found)["metadata"]


def lacks_gpus(kube: Kube, name: str) -> bool:
    """Whether the pipeline's status says so."""
    return bool(kube.condition(name, "Scheduled").get("reason") == "Unschedulable")


def begin(kube: Kube) -> None:
    """Two pipelines that need three GPUs of four: two pods of each are made, then the third ones at once."""
    for name in ("one", "two"):
        kube.apply(of_gpus(name, waits=True))
    eventually(lambda: len(pods(kube, "one")) == len(pods(kube, "two")) == 2, what="both have two of their pods")


def test_without_groups_two_pipelines_each_hold_half_of_the_gpus(together: Kube, operator: OperatorProcess) -> None:
    operator.start()
    begin(together)
    eventually(lambda: placed(together, "one") == placed(together, "two") == 2)
    together.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": LATER}})
    eventually(lambda: lacks_gpus(together, "one") and lacks_gpus(together, "two"))
    assert (placed(together, "one"), placed(together, "two")) == (2, 2)


@pytest.mark.proves("gangs")
def test_one_of_two_pipelines_gets_all_its_gpus_and_the_other_none_until_it_has_gone(
    together: Kube, operator: OperatorProcess
) -> None:
    operator.start(**SCHEDULER)
    begin(together)
    eventually(lambda: waited_for(together, "one") == waited_for(together, "two") == 3)
    assert (placed(together, "one"), placed(together, "two")) == (0, 0)
    together.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": LATER}})
    winner = eventually(
        lambda: next((each for each in ("one", "two") if placed(together, each)), ""), what="one is placed"
    )
    other = {"one": "two", "two": "one"}[winner]
    together.wait_ready(winner)
    eventually(lambda: lacks_gpus(together, other))
    assert (placed(together, winner), placed(together, other)) == (3, 0)
    together("delete", "omnipipeline", winner)
    assert together.wait_ready(other)["status"]["gpus"]["ready"] == 3


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"first": 1}, id="a pod more of each unit"),
        pytest.param({"first": 3, "rollout": LESS}, id="a pod less of each unit"),
        pytest.param({"first": 3, "rollout": {"strategy": "Recreate"}}, id="all at once"),
    ],
)
def test_a_roll_waits_for_no_pod_that_does_not_come(
    together: Kube, operator: OperatorProcess, spec: dict[str, Any]
) -> None:
    operator.start(**SCHEDULER)
    together.apply(of_gpus(**spec))
    together.wait_ready("duo")
    before = pods(together, "duo")
    together.apply(of_gpus(**spec, restartedAt="now"))
    together.wait_ready("duo")
    eventually(lambda: len(after := pods(together, "duo")) == len(before) and not after.keys() & before.keys())


def test_a_group_follows_the_number_of_its_pods_while_they_run(together: Kube, operator: OperatorProcess) -> None:
    operator.start(**SCHEDULER)
    together.apply(of_gpus(first=4))
    eventually(lambda: len(pods(together, "duo")) == 5)
    eventually(lambda: lacks_gpus(together, "duo"))
    assert (waited_for(together), placed(together, "duo")) == (5, 0), "it is larger than the cluster"
    together.apply(of_gpus(first=2))
    eventually(lambda: waited_for(together) == 3)
    together.wait_ready("duo")
    before = pods(together, "duo")
    together.apply(of_gpus(first=3))
    eventually(lambda: waited_for(together) == 4)
    together.wait_ready("duo")
    assert before.keys() < pods(together, "duo").keys(), "its pods stay"
    together.apply(of_gpus(first=1))
    eventually(lambda: len(pods(together, "duo")) == waited_for(together) == 2)
    [first, _] = pods(together, "duo")
    together("delete", "pods", "-l", "omnipipeline.dev/unit=first")
    eventually(
        lambda: placed(together, "duo") == 2 and first not in pods(together, "duo"), what="a lost pod is replaced"
    )


def test_groups_are_switched_on_and_off_without_a_roll_and_rolls_between_them_end(
    together: Kube, operator: OperatorProcess
) -> None:
    def roll(at: str) -> None:
        before = pods(together, "duo").keys()
        together.apply(of_gpus(rollout=LESS, restartedAt=at))
        eventually(lambda: len(after := pods(together, "duo").keys()) == 3 and not after & before)
        together.wait_ready("duo")

    operator.start()
    together.apply(of_gpus(rollout=LESS))
    together.wait_ready("duo")
    before = pods(together, "duo")
    assert operator.stop() == 0
    operator.start(**SCHEDULER).managing()
    together.apply(of_gpus(rollout=LESS, suspend=False))
    together.wait_ready("duo")
    assert (pods(together, "duo"), waited_for(together)) == (before, None)
    roll("one")
    eventually(lambda: waited_for(together) == 3, what="all of its pods are members")

    before = pods(together, "duo")
    together("delete", GROUPS, "duo", "--wait=false")
    eventually(lambda: has_group(together), what="a deleted group is made again")
    assert operator.stop() == 0
    operator.start().managing()
    together.apply(of_gpus(first=3, rollout=LESS, restartedAt="one"))
    eventually(lambda: waited_for(together) == 4, what="pods name it, so it is kept")
    together.wait_ready("duo")
    assert before.keys() < pods(together, "duo").keys()
    together.apply(of_gpus(rollout=LESS, restartedAt="one"))
    eventually(lambda: len(pods(together, "duo")) == waited_for(together) == 3)
    roll("two")
    eventually(lambda: waited_for(together) is None, what="no pod names it any more")


def test_an_autoscaled_pipeline_grows_and_shrinks_beside_its_group(together: Kube, operator: OperatorProcess) -> None:
    def scale(replicas: int) -> None:
        """Write what an operator wrote that was told the load, and start another one."""
        assert operator.stop() == 0
        patch = {"status": {"units": [{"name": "first", "replicas": replicas}]}}
        together("patch", "omnipipeline", "duo", "--subresource=status", "--type=merge", "-p", json.dumps(patch))
        operator.start(**SCHEDULER).managing()
        eventually(lambda: placed(together, "duo") == len(pods(together, "duo")) == replicas + 1)

    scaled = of_gpus()
    [first, _] = scaled["spec"]["processGroups"]
    first |= {"autoscaling": {"minReplicas": 1, "maxReplicas": 3}}
    del first["replicas"]
    operator.start(**SCHEDULER)
    together.apply(scaled)
    together.wait_ready("duo")
    for replicas in (3, 1):
        scale(replicas)
        assert waited_for(together) == 2
    before = pods(together, "duo").keys()
    together("delete", "pods", "-l", "omnipipeline.dev/unit=first")
    eventually(lambda: placed(together, "duo") == 2 and pods(together, "duo").keys() != before)
