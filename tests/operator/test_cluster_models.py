"""The model cache's claim and the Job that fills it, on a real API server, from pending to deleted."""

from __future__ import annotations

import json
import uuid
from functools import partial
from typing import Any

import pytest

from tests.operator.running import Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import deployments

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def cached(model: str, *, prefetch: bool = True, **spec: Any) -> dict[str, Any]:
    cache = {"type": "PersistentVolumeClaim", "size": "1Gi", "storageClassName": "by-hand"}
    return pipeline(modelPath=model, modelCache={**cache, "prefetch": {"enabled": prefetch}}, **spec)


def volume(namespace: str, modes: list[str]) -> dict[str, Any]:
    """The volume that a provisioner would make for the claim of `cached`."""
    name = f"{namespace}-{uuid.uuid4().hex[:8]}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": modes,
            "storageClassName": "by-hand",
            "claimRef": {"namespace": namespace, "name": "duo-models"},
            "hostPath": {"path": "/nowhere"},
        },
    }


def sources(kube: Kube) -> list[str]:
    """The models that the pipeline's Jobs fetch."""
    found = []
    for job in kube.all("jobs", "omnipipeline.dev/pipeline=duo"):
        environment = {
            each["name"]: each.get("value") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]
        }
        found.append(f"{environment['OMNI_MODEL_PATH']}@{environment['OMNI_MODEL_REVISION']}")
    return found


def test_a_prefetch_is_reported_while_it_waits_or_fails_and_is_deleted_with_its_source(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    kube.apply(cached("some/model"))
    waiting = eventually(
        lambda: "unbound" in kube.condition("duo", "Ready").get("message", "") and kube.condition("duo", "Ready")
    )
    assert waiting["reason"] == "Unschedulable"
    assert "claim duo-models (ReadWriteMany) has no volume yet" in kube.condition("duo", "Accepted")["message"]
    assert set(deployments(kube)) == {"coordinator"}, "stages wait for their model"
    (job,) = kube.names("jobs")
    waiting_job = kube.get("job", job)["metadata"]["uid"]
    labelled = {"metadata": {"labels": {"sidecar.istio.io/inject": "false"}}}
    corrected = cached("some/model")
    corrected["spec"]["coordinator"]["podTemplate"] = labelled
    kube.apply(corrected)
    eventually(
        lambda: (live := kube.get("job", job)) and live["metadata"]["uid"] != waiting_job,
        what="a Job that still waits is replaced when its pod is edited",
    )
    (pod,) = eventually(
        lambda: (
            (found := kube.all("pods", "batch.kubernetes.io/job-name,sidecar.istio.io/inject=false"))
            and len(found) == 1
            and found
        ),
        what="the new Job's pod has the author's label",
    )
    assert pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] == job
    assert "omnipipeline.dev/unit" not in pod["metadata"]["labels"]
    eventually(lambda: len(kube.all("pods", "batch.kubernetes.io/job-name")) == 1, what="the old Job's pod ends")

    (pod,) = kube.all("pods", f"batch.kubernetes.io/job-name={job}")
    kube("patch", "job", job, "--type=merge", "-p", '{"spec":{"backoffLimit":0}}')
    ended = {"exitCode": 1, "reason": "Error", "message": "one line\nno such model: some/model"}
    container = {"name": "prefetch", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    failed = {
        "phase": "Failed",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{**container, "state": {"terminated": ended}}],
    }
    name = pod["metadata"]["name"]
    kube("patch", "pod", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": failed}))
    condition = eventually(
        lambda: "delete the Job" in kube.condition("duo", "Ready").get("message", "") and kube.condition("duo", "Ready")
    )
    assert condition["reason"] == "PrefetchFailed" and "no such model: some/model" in condition["message"]

    made = volume(kube.namespace, ["ReadWriteMany"])
    kube.apply(made)
    kube.apply(cached("some/other", modelRevision="v2"))
    kube.wait_ready("duo")
    assert sources(kube) == ["some/other@v2"], "a failed one goes when its source does"
    assert set(deployments(kube)) == {"first", "last", "coordinator"}
    pods = {each["metadata"]["uid"] for each in kube.all("pods", "omnipipeline.dev/unit")}
    claim = kube.get("persistentvolumeclaim", "duo-models")["metadata"]["uid"]
    kube.apply(cached("some/other", modelRevision="v2", prefetch=False))
    eventually(lambda: not kube.names("jobs"), what="no Job that nobody asks for")
    kube.wait_ready("duo")
    assert {each["metadata"]["uid"] for each in kube.all("pods", "omnipipeline.dev/unit")} == pods
    kube("delete", "omnipipeline", "duo", "--wait=true", "--timeout=50s")
    for kind in ("deployments", "pods"):
        eventually(partial(lambda kind: not kube.names(kind), kind), what=f"no {kind} left")
    assert kube.get("persistentvolumeclaim", "duo-models")["metadata"]["uid"] == claim, "what was fetched stays"
    kube("delete", "persistentvolume", made["metadata"]["name"], "--wait=false")


def test_a_claim_grows_where_its_class_allows_it_and_a_refusal_is_quoted(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    made = volume(kube.namespace, ["ReadWriteMany"])
    kube.apply(made)
    kube.apply(cached("some/model", prefetch=False))
    kube.wait_ready("duo")
    larger = cached("some/model", prefetch=False)
    larger["spec"]["modelCache"]["size"] = "2Gi"
    kube.apply(larger)
    message = eventually(lambda: "grow" in (message := kube.condition("duo", "Accepted")["message"]) and message)
    assert "claim duo-models cannot grow from 1Gi to 2Gi: " in message and "resize" in message
    expandable = {"provisioner": "nobody", "allowVolumeExpansion": True, "metadata": {"name": "by-hand"}}
    kube.apply({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", **expandable})
    try:
        kube("label", "pod", "--all", "hint=reconcile")
        eventually(lambda: "grow" not in kube.condition("duo", "Accepted")["message"])
        claim = kube.get("persistentvolumeclaim", "duo-models")
        assert claim["spec"]["resources"]["requests"] == {"storage": "2Gi"}
        assert "app.kubernetes.io/instance" not in claim["metadata"]["labels"]
    finally:
        kube("delete", "storageclass", "by-hand")
        kube("delete", "persistentvolume", made["metadata"]["name"], "--wait=false")


def test_a_quota_that_refuses_the_prefetch_is_reported_and_one_on_requests_does_not(
    kube: Kube, operator: OperatorProcess
) -> None:
    def quota(**hard: str) -> dict[str, Any]:
        return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": hard}}

    kube.apply(quota(pods="0"))
    operator.start()
    kube.apply(cached("some/model"))
    condition = eventually(
        lambda: (
            "Job duo-prefetch" in kube.condition("duo", "Scheduled").get("message", "")
            and kube.condition("duo", "Scheduled")
        )
    )
    assert condition["reason"] == "QuotaExceeded"
    assert "pods are forbidden: exceeded quota: few" in condition["message"]
    kube.apply(quota(**{"requests.memory": "8Gi", "requests.cpu": "2"}))
    eventually(lambda: kube.all("pods", "batch.kubernetes.io/job-name"), within_s=150, what="the Job gets its pod")
    eventually(lambda: "unbound" in kube.condition("duo", "Ready").get("message", ""))


def test_a_claim_that_several_pods_cannot_share_is_reported(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    made = volume(kube.namespace, ["ReadWriteOnce"])
    kube.apply(made)
    one = {"name": "first", "process": "first", "factory": "some.module:first", "terminal": True}
    kube.apply(cached("some/model", stages=[one], rollout={"strategy": "Recreate"}))
    kube.wait_ready("duo")
    assert "claim" not in kube.condition("duo", "Accepted")["message"]
    kube.apply(cached("some/model", stages=[one]))
    eventually(lambda: "in a roll-out the new pod" in kube.condition("duo", "Accepted")["message"])
    mounts = {
        pod["metadata"]["labels"]["omnipipeline.dev/unit"]: "models"
        in {each["name"] for each in pod["spec"]["volumes"]}
        for pod in kube.all("pods", "omnipipeline.dev/unit")
    }
    assert mounts == {"first": True, "coordinator": False}
    kube.apply(cached("some/model", stages=[one], processGroups=[{"name": "first", "replicas": 2}]))
    expected = "claim duo-models is ReadWriteOnce: its 2 pods can start on one node only"
    eventually(lambda: expected in kube.condition("duo", "Accepted")["message"], what=expected)
    kube("delete", "persistentvolume", made["metadata"]["name"], "--wait=false")
