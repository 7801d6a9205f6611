"""Why a unit is not ready: the worst diagnostic of its pods.

Here: choosing one diagnostic of many, with the reasons that kubectl shows. Not here: reading pods (`workloads`),
conditions (`status`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from omnipipeline_operator.changes.workloads import ObservedPod, Workload

#: Worst first: what a person must fix is before what may pass by itself.
_SEVERITY: Final = (
    "QuotaExceeded",
    "PodSecurity",
    "PodsRefused",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "ReferenceNotFound",
    "DeviceClaimsMissing",
    "Failed",  # FailedMount, FailedPrepareDynamicResources, …: what a kubelet tries again
    "CreateContainerConfigError",
    "CreateContainerError",
    "StartError",
    "CrashLoopBackOff",
    "OOMKilled",
    "StartupDeadlineExceeded",
    "PrefetchFailed",
    "UnexpectedAdmissionError",
    "TopologyAffinityError",
    "NodeAffinity",
    "OutOf",  # OutOfcpu, OutOfpods, …
    "Evicted",
    "NodeLost",
    "GPUsYielded",
    "GPUsOnTheirWay",
    "Unschedulable",
)


_KINDS: Final = ("OutOf", "Failed")  # what reasons begin with whose rest names the resource, or what has failed


class Diagnostic(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why something is not ready."""

    unit: str  #: Empty: it concerns no single unit, such as the prefetch of the model.
    reason: str
    message: str

    @property
    def description(self) -> str:
        return f"unit {self.unit}: {self.message}" if self.unit else self.message

    @property
    def rank(self) -> int:
        reason = _kind(self.reason)
        return _SEVERITY.index(reason) if reason in _SEVERITY else len(_SEVERITY)


def _kind(reason: str) -> str:
    return next((each for each in _KINDS if reason.startswith(each)), reason)


def of_workload(workload: Workload, *, startup_deadline_s: float, now: float) -> Diagnostic | None:
    """The worst diagnostic of one unit revision; None: it is ready or starting."""
    found = [_of_pod(workload.unit, pod, startup_deadline_s, now) for pod in workload.pods if not pod.terminating]
    if workload.refused is not None:
        reason = _refusal(workload.refused)
        refused = _ATTEMPT.sub("pods are forbidden: ", workload.refused)
        found.append(Diagnostic(unit=workload.unit, reason=reason, message=f"{workload.name}: {refused}"))
    found.append(_of_failed_pods(workload, now))
    return worst(each for each in found if each is not None)


def _of_failed_pods(workload: Workload, now: float) -> Diagnostic | None:
    """Why the kubelet refused or evicted the newest of the failed pods; None: the others suffice, or say why not.

    The ReplicaSet replaces such a pod at once, and the API server keeps it for the one who looks for the cause.
    """
    others = [each for each in workload.pods if not (each.finished or each.terminating)]
    telling = [each for each in others if each.ready or each.admitted or each.reason is not None]
    suffice = len(telling) >= workload.replicas and any(each.ready for each in telling)
    if suffice or not workload.replicas:
        return None
    failed = [each for each in workload.pods if each.finished and each.reason is not None]
    newest = max(failed, key=lambda each: (each.created_at, each.name), default=None)
    if newest is None or newest.reason is None or (newest.reason_until is not None and now >= newest.reason_until):
        return None
    number = sum(each.reason == newest.reason for each in failed)
    many = f"{number} pod{'s' * (number > 1)}" if number < 10 else f"{10 ** (len(str(number)) - 1)} pods or more"
    return Diagnostic(
        unit=workload.unit, reason=newest.reason, message=f"pod {newest.name}: {newest.message} ({many} {_SO}"
    )


_SO: Final = "failed so)"  # the number is a power of ten from ten on: each other one would be a write of the status


#: The ReplicaSet controller generates another pod name with each attempt.
_ATTEMPT: Final = re.compile(r'^pods "[^"]*" is forbidden: ')


STEP_PERCENT: Final = 5


def of_prefetch(
    job: str, model: str, pods: Iterable[ObservedPod], *, gave_up: bool, done: tuple[int, int] | None = None
) -> Diagnostic:
    """Why units are still waiting for the Job that fetches their model.

    pods:    the Job's; a failed pod is kept, so that its termination message can be read.
    gave_up: the Job has reached its backoff limit.
    done:    (bytes that are fetched, bytes of the model), as the pod that runs says; None: no pod says so.

    The pod that follows a failed one says the bytes of the model once its store has answered it: from there on the
    model is being fetched, and why the pod before it failed is a remark.
    """
    in_order = sorted((each for each in pods if each.reason is not None), key=lambda each: each.created_at)
    failed = [each for each in in_order if each.finished]
    why = failed[-1].message if failed else "has failed"
    share = _share(done)
    if gave_up or (failed and not share):
        then = "delete the Job to retry" if gave_up else "it is retried"
        return Diagnostic(unit="", reason="PrefetchFailed", message=f"Job {job}: {why}; {then}")
    for each in in_order:
        if not each.finished:
            return Diagnostic(unit="", reason=str(each.reason), message=f"pod {each.name}: {each.message}")
    before = f"; a pod before this one failed: {why}" if failed else ""
    return Diagnostic(unit="", reason="Prefetching", message=f"Job {job} fetches {model}{share}{before}")


def of_fetching_pod(pod: str, model: str, *, done: tuple[int, int] | None = None) -> Diagnostic:
    """Why units are still waiting for pods that fetch their model first. done: as in `of_prefetch`."""
    return Diagnostic(unit="", reason="Prefetching", message=f"pod {pod} fetches {model} to its node{_share(done)}")


def _share(done: tuple[int, int] | None) -> str:
    """The share in steps, since each other message is a write of the status."""
    if done is None or not done[1]:
        return ""
    share = min(100 * done[0] // done[1], 100) // STEP_PERCENT * STEP_PERCENT
    total = f"{done[1] / 1e9:.1f} GB" if done[1] >= 1e9 else f"{done[1] / 1e6:.1f} MB"
    return f": {share} % of {total}"


def of_refused_job(job: str, message: str) -> Diagnostic:
    """Why the Job that fetches the model has no pod: the API server refuses it."""
    refused = _ATTEMPT.sub("pods are forbidden: ", message)
    return Diagnostic(unit="", reason=_refusal(message), message=f"Job {job}: {refused}")


def worst(diagnostics: Iterable[Diagnostic]) -> Diagnostic | None:
    """The one to report."""
    return min(diagnostics, key=lambda each: (each.rank, each.message), default=None)


def stabilized(diagnostic: Diagnostic, reason: str | None, message: str | None) -> Diagnostic:
    """``diagnostic`` with the message reported before, when only numbers in it differ.

    Request ids, addresses and process ids differ with every attempt; each difference would be a write of the status.
    """
    if diagnostic.reason != reason or message is None:
        return diagnostic
    if diagnostic.message.endswith(_SO):
        same = _POD.sub("", diagnostic.message) == _POD.sub("", message)
        return msgspec.structs.replace(diagnostic, message=message) if same else diagnostic
    if _kind(diagnostic.reason) not in _REPEATED:
        return diagnostic
    vague = _BACK_OFF in diagnostic.message
    same = _NUMBERS.sub("#", diagnostic.message) == _NUMBERS.sub("#", message)
    return msgspec.structs.replace(diagnostic, message=message) if same or vague else diagnostic


#: Reasons whose message is made anew with every attempt.
_REPEATED: Final = (
    "StartError",
    "CrashLoopBackOff",
    "StartupDeadlineExceeded",
    "ImagePullBackOff",
    "CreateContainerError",
    "Failed",
    "QuotaExceeded",
    "PodsRefused",
    "PodSecurity",
)
#: Addresses, ids, process ids, times. Not short numbers: 401 differs from 403.
_NUMBERS: Final = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]+(?:-[0-9a-fA-F]+)+\b|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}\b|\b\d{4,}\b|"
    r"\b\d+(?:\.\d+)? ?(?:s|ms|seconds)\b"
)
_POD: Final = re.compile(r"^pod \S+: ")
_BACK_OFF: Final = "Back-off pulling image"  # from older kubelets, which omit the cause


def _of_pod(unit: str, pod: ObservedPod, startup_deadline_s: float, now: float) -> Diagnostic | None:
    if pod.ready or pod.finished:
        return None
    if pod.reason is not None and (pod.reason_until is None or now < pod.reason_until):
        return Diagnostic(unit=unit, reason=pod.reason, message=f"pod {pod.name}: {pod.message}")
    if pod.starting_since and now - pod.starting_since > startup_deadline_s:
        late = f"pod {pod.name}: not ready after {startup_deadline_s:g} s (startup.deadlineSeconds)"
        return Diagnostic(unit=unit, reason="StartupDeadlineExceeded", message=late)
    return None


def _refusal(message: str) -> str:
    if "exceeded quota" in message:
        return "QuotaExceeded"
    return "PodSecurity" if "violates PodSecurity" in message else "PodsRefused"
