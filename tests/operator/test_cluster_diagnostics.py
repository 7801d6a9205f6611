"""Failures on a real API server are reported in conditions, with their cause."""

from __future__ import annotations

import itertools
import re
import time
from functools import partial
from typing import Any

import pytest

from omnipipeline_spec import loading, planning
from tests.operator.running import Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import SETTLE_S, deployments

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SHARED = {"gpu": [0], "gpuMemory": {"fraction": 0.4}}
GPU_STAGES: list[dict[str, Any]] = [
    {"name": "first", "process": "first", "factory": "some.module:first", "next": ["second"], **SHARED},
    {"name": "second", "process": "second", "factory": "some.module:second", "next": ["last"], **SHARED},
    {"name": "last", "process": "last", "factory": "some.module:last", "terminal": True},
]


def wait_reason(kube: Kube, kind: str, reason: str) -> dict[str, Any]:
    return eventually(
        lambda: kube.condition("duo", kind).get("reason") == reason and kube.condition("duo", kind),
        what=f"{kind} says {reason}: {kube.condition('duo', kind)}",
    )


def test_too_many_gpus_are_explained_and_fewer_are_scheduled(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline(stages=GPU_STAGES, processGroups=[{"name": "first", "replicas": 13}]))
    found = wait_reason(kube, "Scheduled", "Unschedulable")
    assert "nvidia.com/gpu" in found["message"] and "unit first" in found["message"]
    kube.apply(pipeline(stages=GPU_STAGES, processGroups=[{"name": "first", "replicas": 3}]))
    ready = kube.wait_ready("duo")
    assert ready["status"]["gpus"]["requested"] == 3, "two process groups share each"
    assert [each["name"] for each in ready["status"]["units"]] == ["first", "last", "coordinator"]
    eventually(lambda: kube.get("omnipipeline", "duo")["status"]["gpus"]["ready"] == 3)
    assert kube.condition("duo", "Scheduled")["status"] == "True"


def test_a_roll_without_capacity_names_what_to_free_and_recreate_succeeds(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    full = [{"name": "first", "replicas": 12}]
    kube.apply(pipeline(stages=GPU_STAGES, processGroups=full))
    kube.wait_ready("duo")
    kube.apply(pipeline(stages=GPU_STAGES, processGroups=full, envDefaults={"CHANGED": "1"}))
    squeezed = wait_reason(kube, "Progressing", "InsufficientCapacity")
    assert squeezed["status"] == "False" and "Recreate" in squeezed["message"]
    assert kube.condition("duo", "Available")["status"] == "True"
    kube.apply(
        pipeline(stages=GPU_STAGES, processGroups=full, envDefaults={"CHANGED": "1"}, rollout={"strategy": "Recreate"})
    )
    kube.wait_ready("duo")


def test_an_exceeded_quota_is_reported(kube: Kube, operator: OperatorProcess) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    kube.apply(quota)
    operator.start()
    kube.apply(pipeline())
    found = wait_reason(kube, "Scheduled", "QuotaExceeded")
    assert "exceeded quota: few" in found["message"]


def test_a_quota_on_secrets_that_is_used_up_stops_no_roll_out(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"secrets": "1"}},
    }
    kube.apply(quota)
    eventually(lambda: kube.get("resourcequota", "few").get("status", {}).get("used") == {"secrets": "1"})
    kube.apply(pipeline(envDefaults={"A": "1"}))
    kube.wait_ready("duo")


def test_our_pods_satisfy_the_restricted_standard_and_a_violation_is_reported(
    kube: Kube, operator: OperatorProcess
) -> None:
    kube("label", "namespace", kube.namespace, "pod-security.kubernetes.io/enforce=restricted")
    operator.start(OMNI_OPERATOR_ALLOW_PRIVILEGED="1")  # else it refuses the template itself
    kube.apply(pipeline())
    kube.wait_ready("duo")
    loose: dict[str, Any] = {"spec": {"containers": [{"name": "stage", "securityContext": {"runAsNonRoot": False}}]}}
    loose["spec"] |= {"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}
    kube.apply(pipeline(processGroups=[{"name": "first", "podTemplate": loose}]))
    found = wait_reason(kube, "Scheduled", "PodSecurity")
    assert "violates PodSecurity" in found["message"]
    assert kube.condition("duo", "Available")["status"] == "True"


def test_a_privileged_pod_template_is_refused_by_path(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline(processGroups=[{"name": "first", "podTemplate": {"spec": {"hostNetwork": True}}}]))
    found = wait_reason(kube, "Accepted", "NotAllowed")
    assert "podTemplate.spec.hostNetwork" in found["message"]
    assert kube.names("deployments") == set()


def test_a_pod_template_that_the_api_server_refuses_is_reported_and_running_pods_stay(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    pods = {each["metadata"]["uid"] for each in kube.all("pods")}
    wrong: list[dict[str, Any]] = [{"terminationGracePeriodSeconds": -1}, {"containrs": []}, {"volumes": "none"}]
    for patch in wrong:
        kube.apply(pipeline(processGroups=[{"name": "first", "podTemplate": {"spec": patch}}]))
        (field,) = patch
        eventually(
            partial(lambda field: field in kube.condition("duo", "Accepted").get("message", ""), field), what=field
        )
        assert kube.condition("duo", "Accepted")["reason"] == "ChildRefused"
        assert kube.condition("duo", "Available")["status"] == "True"
    kube.apply(pipeline())
    kube.wait_ready("duo")
    assert {each["metadata"]["uid"] for each in kube.all("pods")} == pods


def test_nothing_is_created_in_a_terminating_namespace(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    kube("delete", "namespace", kube.namespace, "--wait=false")
    eventually(lambda: not kube.get("namespace", kube.namespace), within_s=200, what="the namespace is gone")
    time.sleep(SETTLE_S)
    assert "unexpected error" not in operator.log.read_text()


def test_the_plan_is_the_same_through_kubectl_and_offline(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    golden = pipeline(
        envDefaults={"A": "1.0", "B": "on"},
        runtimeOverrides={"first": {"ratio": 1.0, "big": 1e3, "deep": {"z": [1, 2.5], "a": None}}},
        gpuMemoryLimit=0.9,
        restartedAt="2026-01-01",
    )
    kube.apply(golden)
    kube.wait_ready("duo")
    plan = planning.plan(loading.from_resource(golden).spec, name="duo")
    assert kube.get("omnipipeline", "duo")["status"]["revision"]["update"] == plan.current.revision
    desired = {unit.name: unit.revision for unit in plan.units} | {"coordinator": plan.coordinator.revision}
    assert {unit: next(iter(revisions)) for unit, revisions in deployments(kube).items()} == desired


def test_events_are_posted_for_transitions_only_and_conditions_carry_their_generation(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    kube.apply(pipeline())
    first = kube.wait_ready("duo")
    kube.apply(pipeline(processGroups=[{"name": "first", "replicas": 2}]))
    second = kube.wait_ready("duo")
    kube.apply(pipeline(suspend=True))
    eventually(lambda: not kube.all("pods"), what="no pods")
    third = eventually(
        lambda: kube.condition("duo", "CoordinatorReady")["reason"] == "Suspended" and kube.get("omnipipeline", "duo")
    )
    for observed in (first, second, third):
        assert len(observed["status"]["conditions"]) == 9
        for condition in observed["status"]["conditions"]:
            assert condition["observedGeneration"] == observed["metadata"]["generation"]
            assert re.fullmatch("([A-Z][a-z]+)+", condition["reason"]), condition
    kube.apply(pipeline())
    kube.wait_ready("duo")
    time.sleep(SETTLE_S)
    events = [each for each in kube.all("events") if each["involvedObject"]["kind"] == "OmniPipeline"]
    by_condition: dict[str, list[tuple[str, str]]] = {}
    for each in sorted(events, key=lambda event: str(event["eventTime"])):
        for condition, status in re.findall("(Accepted|Available|Ready|Progressing) is (True|False)", each["message"]):
            by_condition.setdefault(condition, []).append((status, each["reason"]))
    # The first start reports nothing, where pods were ready before anything could be said.
    assert by_condition["Ready"][-1] == ("True", "Serving") and ("False", "Suspended") in by_condition["Ready"]
    for changes in by_condition.values():
        assert all(one != following for one, following in itertools.pairwise(changes)), changes
