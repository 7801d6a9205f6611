"""A crash has one reason and one message in every state of the container."""

from __future__ import annotations

from typing import Any

import pytest

from omnipipeline_operator.changes import workloads
from omnipipeline_operator.changes.reporting import diagnostics
from omnipipeline_operator.changes.reporting.diagnostics import Diagnostic
from omnipipeline_operator.changes.workloads import ObservedPod, Workload
from omnipipeline_spec import crashes

BEGAN, ENDED, AGAIN = "2026-01-01T00:00:00Z", "2026-01-01T00:00:20Z", "2026-01-01T00:00:30Z"
LIFE_S = 20.0


def terminated(message: str = "first: OSError: no weights\n---\nlast line", **more: Any) -> dict[str, Any]:
    return {"reason": "Error", "exitCode": 1, "message": message, "startedAt": BEGAN, "finishedAt": ENDED, **more}


def pod(
    state: dict[str, Any], last: dict[str, Any] | None = None, *, unready_since: str = BEGAN, **more: Any
) -> ObservedPod:
    container = {"name": "stage", "state": state, "lastState": {"terminated": last} if last else {}, **more}
    ready = {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "lastTransitionTime": unready_since}
    status = {"containerStatuses": [container], "conditions": [ready]}
    return workloads.read_pod({"metadata": {"name": "p", "creationTimestamp": BEGAN}, "status": status})


COMPLETED = {"reason": "Completed", "exitCode": 0, "message": "", "startedAt": BEGAN, "finishedAt": ENDED}
RUNS = {"name": "stage", "state": {"running": {"startedAt": AGAIN}}}
INITIALIZES = {"name": "stage", "state": {"waiting": {"reason": "PodInitializing"}}}


def initialized(init: dict[str, Any], stage: dict[str, Any]) -> ObservedPod:
    """A pod with an init container in this state, and one of ours."""
    ready = {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "lastTransitionTime": BEGAN}
    status = {"initContainerStatuses": [{"name": "init", **init}], "containerStatuses": [stage], "conditions": [ready]}
    return workloads.read_pod({"metadata": {"name": "p", "creationTimestamp": BEGAN}, "status": status})


def phases(ended: dict[str, Any]) -> list[ObservedPod]:
    """The states of a crash loop."""
    return [
        pod({"terminated": ended}),
        pod({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}, ended),
        pod({"waiting": {"reason": "ContainerCreating"}}, ended),
        pod({"running": {"startedAt": AGAIN}}, ended),
        pod({"terminated": ended}, ended),
    ]


CONTAINERD = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
)


@pytest.mark.proves("failed-start")
@pytest.mark.parametrize(
    ("ended", "reason", "message"),
    [
        (terminated(), "CrashLoopBackOff", "first: OSError: no weights"),
        (
            terminated("Traceback (most recent call last):\nOSError: no weights\nmake sure"),
            "CrashLoopBackOff",
            "OSError: no weights",
        ),
        (terminated("", exitCode=137), "CrashLoopBackOff", "ended with exit code 137 and no output"),
        (terminated("bye", reason="Completed", exitCode=0), "CrashLoopBackOff", "bye"),
        (COMPLETED, "CrashLoopBackOff", "no output; if a probe failed, the pod's Events say so"),
        (terminated("", exitCode=137), "CrashLoopBackOff", "no output; if a probe failed, the pod's Events say so"),
        (terminated("", exitCode=2), "CrashLoopBackOff", "container stage: ended with exit code 2 and no output"),
        (terminated("loading", reason="OOMKilled", exitCode=137), "OOMKilled", "resources.limits.memory"),
        (
            terminated("a: no progress for 60 s\n---\n", exitCode=crashes.EXIT_HUNG),
            "StartupDeadlineExceeded",
            "a: no progress",
        ),
        (
            terminated(
                f'{CONTAINERD}unable to start container process: exec: "x": not found: unknown', reason="StartError"
            ),
            "StartError",
            'container stage: exec: "x": not found',
        ),
    ],
)
def test_a_crash_has_one_reason_and_message_in_all_its_phases(ended: dict[str, Any], reason: str, message: str) -> None:
    observed = {(each.reason, each.message) for each in phases(ended)}
    assert len(observed) == 1
    [(found, text)] = observed
    assert found == reason and message in text and text.startswith("container stage: ")


@pytest.mark.parametrize(
    "init",
    [
        {"state": {"terminated": COMPLETED}, "ready": True},
        {"state": {"terminated": COMPLETED}, "lastState": {"terminated": terminated()}},
        {"state": {"running": {"startedAt": AGAIN}}, "lastState": {"terminated": COMPLETED}},  # of a new sandbox
        {"state": {"waiting": {"reason": "PodInitializing"}}, "lastState": {"terminated": COMPLETED}},
    ],
    ids=["completed", "completed at last", "runs again", "will run again"],
)
@pytest.mark.parametrize("stage", [RUNS, INITIALIZES], ids=["loads", "waits"])
def test_an_init_container_that_has_completed_is_no_crash(init: dict[str, Any], stage: dict[str, Any]) -> None:
    assert initialized(init, stage).reason is None


@pytest.mark.parametrize(
    "init, message",
    [
        ({"state": {"terminated": terminated()}}, "first: OSError: no weights"),
        (
            {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": terminated()}},
            "first: OSError: no weights",
        ),
        (
            {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": COMPLETED}},
            "ended with exit code 0 and no output; if a probe failed, the pod's Events say so",
        ),
    ],
    ids=["failed", "failed and waits", "a sidecar that does not stay"],
)
def test_an_init_container_that_fails_and_a_sidecar_in_back_off_are_crashes(init: dict[str, Any], message: str) -> None:
    observed = initialized(init, INITIALIZES)
    assert (observed.reason, observed.message) == ("CrashLoopBackOff", f"container init: {message}")


def test_an_image_that_cannot_be_pulled_has_one_reason_and_message() -> None:
    why = 'failed to pull and unpack image "x:typo": not found'
    states = [
        {"reason": "ErrImagePull", "message": why},
        {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "x:typo": ErrImagePull: {why}'},
    ]
    assert {(found.reason, found.message) for found in (pod({"waiting": each}) for each in states)} == {
        ("ImagePullBackOff", f"container stage: {why}")
    }


def test_a_container_that_has_been_ready_since_its_crash_is_not_crashing() -> None:
    later = "2026-01-01T00:05:00Z"
    assert pod({"running": {"startedAt": AGAIN}}, terminated(), unready_since=later).reason is None
    assert pod({"running": {"startedAt": AGAIN}}, terminated(), ready=True).reason is None


def test_a_container_that_runs_longer_than_before_its_crash_counts_as_starting() -> None:
    observed = pod({"running": {"startedAt": AGAIN}}, terminated())
    again = workloads.timestamp(AGAIN)
    workload = Workload(unit="first", revision="r", name="d", uid="u", replicas=1, pods=(observed,))

    def diagnosed(after_s: float) -> Diagnostic | None:
        return diagnostics.of_workload(workload, startup_deadline_s=1800, now=again + after_s)

    crashed = diagnosed(2 * LIFE_S)
    assert crashed is not None and crashed.reason == "CrashLoopBackOff"
    assert diagnosed(max(workloads.MIN_RUNNING_S, 2 * LIFE_S) + 1) is None
    late = diagnosed(1801)
    assert late is not None and late.reason == "StartupDeadlineExceeded"


def test_a_pod_that_was_ready_long_ago_is_not_late_in_starting() -> None:
    observed = pod({"running": {"startedAt": AGAIN}}, unready_since="2026-01-02T00:00:00Z")
    workload = Workload(unit="first", revision="r", name="d", uid="u", replicas=1, pods=(observed,))
    assert (
        diagnostics.of_workload(workload, startup_deadline_s=60, now=workloads.timestamp("2026-01-03T00:00:00Z"))
        is None
    )


@pytest.mark.parametrize("reason", ["FailedMount", "FailedPrepareDynamicResources", "FailedCreatePodSandBox"])
def test_what_a_kubelet_tries_again_comes_before_what_the_scheduler_waits_for(reason: str) -> None:
    failed, placed = (Diagnostic(unit="u", reason=each, message="m") for each in (reason, "Unschedulable"))
    pulled = Diagnostic(unit="u", reason="ImagePullBackOff", message="m")
    assert diagnostics.worst([placed, failed]) == failed
    assert diagnostics.worst([failed, pulled]) == pulled


def test_the_same_diagnostic_with_other_numbers_keeps_its_message() -> None:
    def diagnostic(message: str, reason: str = "CrashLoopBackOff") -> Diagnostic:
        return Diagnostic(unit="first", reason=reason, message=message)

    before = "401 for Request ID 1-67ab-9f at 0x7f10"
    again = diagnostic("401 for Request ID 1-99cd-1a at 0x7abc")
    assert diagnostics.stabilized(again, "CrashLoopBackOff", before).message == before
    assert diagnostics.stabilized(again, "OOMKilled", before) == again
    assert diagnostics.stabilized(diagnostic("403 denied"), "CrashLoopBackOff", "401 denied").message == "403 denied"
    hung = diagnostic("no progress for 61 s", "StartupDeadlineExceeded")
    assert (
        diagnostics.stabilized(hung, "StartupDeadlineExceeded", "no progress for 60 s").message
        == "no progress for 60 s"
    )
    claims = diagnostic("claim 1f6e8a4c-9a9c: no driver", "FailedPrepareDynamicResources")
    kept = diagnostics.stabilized(claims, claims.reason, "claim 7d12a0b3-11fe: no driver")
    assert kept.message == "claim 7d12a0b3-11fe: no driver"
    nodes = diagnostic("0/4 nodes", "Unschedulable")
    assert diagnostics.stabilized(nodes, "Unschedulable", "0/3 nodes") == nodes, "how many is what one wants to know"
    vague = diagnostic('pod p: container c: Back-off pulling image "x"', "ImagePullBackOff")
    assert diagnostics.stabilized(vague, "ImagePullBackOff", "pod p: container c: not found").message.endswith(
        "not found"
    )


def test_a_refusal_does_not_name_the_attempted_pod() -> None:
    refused = 'pods "duo-first-x-{}" is forbidden: exceeded quota: few'
    diagnosed = set()
    for attempt in ("a1", "b2"):
        workload = Workload(unit="f", revision="r", name="duo", uid="u", replicas=1, refused=refused.format(attempt))
        diagnosed.add(diagnostics.of_workload(workload, startup_deadline_s=60, now=0.0))
    assert diagnosed == {
        Diagnostic(unit="f", reason="QuotaExceeded", message="duo: pods are forbidden: exceeded quota: few")
    }
