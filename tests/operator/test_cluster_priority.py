"""Four GPUs of a real cluster are taken when a pipeline of a higher priority comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.operator.running import Kube, OperatorProcess, pipeline
from tests.operator.test_cluster_gangs import ONE_NODE, placed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

CLASSES = {"omni-test-low": 10, "omni-test-high": 1000}


@pytest.fixture
def classes(kube: Kube) -> Iterator[None]:
    head = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "preemptionPolicy": "Never"}
    kube.apply(*({**head, "metadata": {"name": name}, "value": value} for name, value in CLASSES.items()))
    yield
    kube("delete", "priorityclass", *CLASSES, "--wait=false")


def of_three_gpus(name: str, priority: str) -> dict[str, Any]:
    """Two units, of two GPUs and of one."""
    placement = {**ONE_NODE, "priorityClassName": priority}
    stages: list[dict[str, Any]] = [
        {"name": "first", "factory": "some.module:first", "next": ["last"], "gpu": [0, 1], "tpSize": 2},
        {"name": "last", "process": "last", "factory": "some.module:last", "terminal": True, "gpu": [2]},
    ]
    return pipeline(
        name, stages=stages, processGroups=[{"name": one, "placement": placement} for one in ("first", "last")]
    )


@pytest.mark.proves("priority")
@pytest.mark.usefixtures("classes")
def test_a_pipeline_that_serves_gives_its_gpus_to_a_higher_priority_and_comes_back(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start(OMNI_OPERATOR_GPU_PATIENCE_SECONDS="8", OMNI_OPERATOR_GPU_PRIORITY_SECONDS="2")
    kube.apply(of_three_gpus("low", "omni-test-low"))
    kube.wait_ready("low")
    kube.apply(of_three_gpus("high", "omni-test-high"))

    ready = kube.wait_ready("high")
    assert ready["status"]["gpus"]["ready"] == 3 and "yielded" not in ready["status"]
    found = kube.condition("low", "Scheduled")
    assert found["reason"] == "GPUsYielded", found
    assert f"{kube.namespace}/high waits for GPUs and has a higher priority" in found["message"]
    assert kube.get("omnipipeline", "low")["status"]["yielded"]["given"] == 3
    said = {(each["involvedObject"]["name"], each["reason"]) for each in kube.all("events")}
    assert ("low", "GPUsYielded") in said
    assert not [name for name, reason in said if reason == "Preempted"], "the scheduler has ended no pod"
    assert not placed(kube, "low")

    kube("delete", "omnipipeline", "high")
    ready = kube.wait_ready("low")
    assert ready["status"]["gpus"]["ready"] == 3 and "yielded" not in ready["status"]
