"""The PodGroup of a pipeline on a real API server: made, kept equal, and left with the pods that need it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_kit import Cluster
from tests.operator import pod_groups
from tests.operator.running import FAKE_GROUP, TOLERATED, Kube, OperatorProcess, eventually, pipeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

#: The kit's own scheduler: it ignores the label, so pods run without a plugin for groups.
GROUPED = {"OMNI_OPERATOR_POD_GROUP_SCHEDULER": "default-scheduler"}
PLACED = {"tolerations": TOLERATED, "nodeSelector": {"fake": FAKE_GROUP}}
LABEL = "scheduling.x-k8s.io/pod-group"


@pytest.fixture
def kind_of_groups(prepared: tuple[Cluster, Path]) -> Iterator[None]:
    cluster, _ = prepared
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(pod_groups.CRD))
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{pod_groups.NAME}", "--timeout=50s")
    yield
    cluster.kubectl("delete", "crd", pod_groups.NAME, "--ignore-not-found", "--timeout=50s")


def of_gpus(replicas: int, **spec: Any) -> dict[str, Any]:
    stages: list[dict[str, Any]] = [
        {"name": "first", "process": "first", "factory": "some.module:first", "next": ["last"], "gpu": [0]},
        {"name": "last", "process": "last", "factory": "some.module:last", "terminal": True, "gpu": [1]},
    ]
    groups = [{"name": "first", "placement": PLACED, "replicas": replicas}, {"name": "last", "placement": PLACED}]
    return pipeline("duo", stages=stages, processGroups=groups, **spec)


def members(kube: Kube) -> int | None:
    found = [each["spec"]["minMember"] for each in kube.all("podgroups")]
    return found[0] if found else None


def labelled(kube: Kube) -> set[str]:
    pods = [each["metadata"]["labels"] for each in kube.all("pods")]
    return {each["omnipipeline.dev/unit"] for each in pods if each.get(LABEL) == "duo"}


@pytest.mark.proves("gangs")
def test_a_group_waits_for_the_pods_that_are_always_there_and_stays_as_long_as_pods_name_it(
    kube: Kube, operator: OperatorProcess, kind_of_groups: None
) -> None:
    operator.start(**GROUPED)
    kube.apply(of_gpus(1))
    ready = kube.wait_ready("duo")
    assert (members(kube), labelled(kube)) == (2, {"first", "last"})
    [group] = kube.all("podgroups")
    assert group["metadata"]["ownerReferences"][0]["uid"] == ready["metadata"]["uid"]
    kube.apply(of_gpus(2))
    eventually(lambda: members(kube) == 3, what="the group grows with the pipeline")
    kube("delete", "podgroups", "duo")
    eventually(lambda: members(kube) == 3, what="a deleted group is made again")
    kube.wait_ready("duo")

    assert operator.stop() == 0
    operator.start().managing()
    kube.apply(of_gpus(1))
    eventually(lambda: members(kube) == 2, what="pods have the label, so the group stays")
    kube.apply(of_gpus(1, restartedAt="now"))
    eventually(lambda: members(kube) is None and not labelled(kube), what="no pod names it any more")
    kube.wait_ready("duo")
