"""Somebody else removes the scheduling gates of pods, as Kueue does, on a real API server and scheduler.

Kueue itself is not here. Its webhook gives pods with the label of a queue a gate, and its controller removes the gate
when the quota has room; here the pods' template has the gate, and the test removes it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.operator.running import FAKE_GROUP, TOLERATED, Kube, OperatorProcess, eventually, pipeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

QUEUE, GATE = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/admission"


def gated(name: str) -> dict[str, Any]:
    template = {"spec": {"schedulingGates": [{"name": GATE}]}}
    placement = {"tolerations": TOLERATED, "nodeSelector": {"fake": FAKE_GROUP}}
    groups = [{"name": each, "placement": placement, "podTemplate": template} for each in ("first", "last")]
    made = pipeline(name, processGroups=groups)
    made["metadata"]["labels"] = {QUEUE: "team"}
    return made


def test_a_pipeline_waits_for_its_queue_says_so_and_serves_when_all_its_pods_are_admitted(
    kube: Kube, operator: OperatorProcess
) -> None:
    def waiting() -> list[dict[str, Any]]:
        return [one for one in kube.all("pods", "omnipipeline.dev/pipeline") if one["spec"].get("schedulingGates")]

    def admit(pod: dict[str, Any]) -> None:
        """The part of Kueue's controller."""
        patch = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
        kube("patch", "pod", pod["metadata"]["name"], "--type=json", f"--patch={patch}")

    operator.start()
    kube.apply(gated("queued"))
    both = eventually(lambda: len(found := waiting()) == 2 and found, what="pods of both units wait")
    assert {one["metadata"]["labels"][QUEUE] for one in both} == {"team"}
    eventually(lambda: kube.condition("queued", "CoordinatorReady").get("status") == "True")
    coordinators = kube.all("pods", "omnipipeline.dev/unit=coordinator")
    assert [QUEUE in one["metadata"]["labels"] for one in coordinators] == [False], "a queue holds no coordinator back"
    scheduled = eventually(lambda: (one := kube.condition("queued", "Scheduled")).get("status") == "False" and one)
    assert "scheduling gate" in scheduled["message"]
    admit(both[0])
    eventually(lambda: len(waiting()) == 1)
    assert kube.condition("queued", "Ready")["status"] == "False"
    admit(both[1])
    kube.wait_ready("queued")
