"""Two pipelines on a real API server each hold half of what both need."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.running import FAKE_GROUP, TOLERATED, Kube, OperatorProcess, eventually, pipeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

#: Four GPUs: one of the simulated nodes.
ONE_NODE = {"tolerations": TOLERATED, "nodeSelector": {"kubernetes.io/hostname": f"{FAKE_GROUP}-1"}}
LATER = "later"  # a Secret without which the second unit gets no pod


def of_three_gpus(name: str) -> dict[str, Any]:
    """Two GPUs at once, the third when the Secret is there."""
    mounted = {"spec": {"volumes": [{"name": "extra", "secret": {"secretName": LATER}}]}}
    stages: list[dict[str, Any]] = [
        {"name": "first", "factory": "some.module:first", "next": ["last"], "gpu": [0, 1], "tpSize": 2},
        {"name": "last", "process": "last", "factory": "some.module:last", "terminal": True, "gpu": [2]},
    ]
    groups = [{"name": "first", "placement": ONE_NODE}, {"name": "last", "placement": ONE_NODE, "podTemplate": mounted}]
    return pipeline(name, stages=stages, processGroups=groups)


def placed(kube: Kube, name: str) -> set[str]:
    """uids of the pods that have GPUs."""
    found = kube.all("pods", f"omnipipeline.dev/pipeline={name},omnipipeline.dev/unit!=coordinator")
    return {each["metadata"]["uid"] for each in found if each["spec"].get("nodeName")}


@pytest.mark.proves("gangs")
def test_the_younger_of_two_pipelines_that_wait_for_each_other_lets_go_and_comes_back(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start(OMNI_OPERATOR_GPU_PATIENCE_SECONDS="4")
    kube.apply(of_three_gpus("older"))
    eventually(lambda: len(placed(kube, "older")) == 1)
    kube.apply(of_three_gpus("younger"))
    eventually(lambda: len(placed(kube, "younger")) == 1, what="each holds two of four")
    half = placed(kube, "older")
    kube.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": LATER}})
    eventually(lambda: kube.condition("older", "Scheduled").get("reason") == "Unschedulable")

    found = eventually(lambda: (one := kube.condition("younger", "Ready")).get("reason") == "GPUsYielded" and one)
    assert f"{kube.namespace}/older waits for GPUs" in found["message"]
    assert "for all 3 that it needs" in found["message"]
    ready = kube.wait_ready("older")
    assert ready["status"]["gpus"]["ready"] == 3
    assert half < placed(kube, "older"), "the older one has let go of nothing"
    events = [each for each in kube.all("events") if each["reason"] == "GPUsYielded"]
    assert {each["involvedObject"]["name"] for each in events} == {"younger"}

    kube("delete", "omnipipeline", "older")
    ready = kube.wait_ready("younger")
    assert ready["status"]["gpus"]["ready"] == 3
    eventually(lambda: "yielded" not in kube.get("omnipipeline", "younger")["status"], what="it has come back")
