"""Finds what keeps pods from starting: missing ConfigMaps and Secrets, an API for claims, warnings of kubelets.

Here: asking the API server, only about workloads that have not started. Not here: how it is reported
(`changes.reporting.status`), which Deployments are not made because of it (`writing`). Called by `reconciling`. Whether
a Secret exists is found by a dry run of creating it: the operator may not read Secrets.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.changes import workloads
from omnipipeline_operator.changes.deciding import rollout
from omnipipeline_operator.changes.reporting import diagnostics
from omnipipeline_operator.changes.reporting.diagnostics import Diagnostic
from omnipipeline_operator.changes.workloads import ObservedPod, Workload
from omnipipeline_operator.cluster.applying import Applier
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.desired import children, naming, references
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.references import Reference
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.types import quantities

log = logging.getLogger(__name__)

MOUNT_GRACE_S: Final = 3.0  # a mount takes no longer when nothing is missing
MIN_CHECK_S: Final = 2.0
MAX_CHECK_S: Final = 30.0
RETRY_REFUSED_S: Final = 10.0  # the ReplicaSet controller's own back-off ends at a quarter of an hour
STUCK_MOUNT_S: Final = 5.0
RECENT_S: Final = 150.0  # a kubelet retries a mount at least every 122 s; an older Event is obsolete
MAX_RETRY_REFUSED_S: Final = 60.0
_COMBINED: Final = "(combined from similar events): "  # client-go's, once there are ten of them in ten minutes
_CREATING: Final = "Error creating: "
_SCHEDULING: Final = "FailedScheduling"  # the pod's condition reports it, and its end


class MissingReferences(msgspec.Struct, frozen=True, kw_only=True):
    """The references of one pipeline that were not found."""

    diagnostics: tuple[Diagnostic, ...] = ()
    held: frozenset[rollout.UnitRevision] = frozenset()  #: They get no pods yet: these could not start.
    prefetch_held: bool = False
    refused: Mapping[str, str] = {}  #: Deployment -> why its pods are refused now, if known.
    again_s: float | None = None  #: When to check again; no watch reports it.


class ReferenceChecker:
    """Checks one pipeline during one reconcile; asks for each object once."""

    def __init__(self, client: Client, applier: Applier, owner: Owner, *, now: float) -> None:
        self._client = client
        self._apply = applier
        self._owner = owner
        self._now = now
        self._known: dict[tuple[str, str], bool] = {}

    async def check(
        self,
        desired: children.Children,
        observed: Sequence[Workload],
        decided: Mapping[rollout.UnitRevision, int],
        *,
        every_s: float,
        podless_job: Manifest | None = None,
        lacking: Mapping[str, str] = {},
    ) -> MissingReferences:
        """Check all workloads that should have pods.

        every_s:     least time until missing references are checked again.
        podless_job: the live Job that fetches the model, when it has no pod.
        lacking:     kinds that the cluster lacks -> the API server's refusal. It drops fields that it does not know: a
                     pod that asks for claims would run without a GPU.
        """
        by_key = {(each.unit, each.revision): each for each in observed}
        found: list[Diagnostic] = []
        held: set[rollout.UnitRevision] = set()
        again: list[float] = []
        for each in desired.workloads:
            key, template = (each.unit, each.revision), each.deployment["spec"]["template"]
            workload = by_key.get(key)
            if not decided.get(key):
                continue
            if workload is not None and workload.started:
                found += await self._check_mounts(workload, again)
                continue
            if each.devices is not None and each.devices["kind"] in lacking:
                held.add(key)
                found.append(_lacks_claims(each.unit, lacking[each.devices["kind"]]))
                continue
            missing = await self._missing(references.required(template))
            if missing:
                held.add(key)
                again.append(every_s)
                found.append(_missing(each.unit, missing))
            elif workload is not None:
                found += await self._check_pods(workload, template, again)
        job = next((each for each in desired.created if each["kind"] == kinds.JOB.name), None)
        lost = await self._missing(references.required(job["spec"]["template"])) if job else []
        if lost:
            found.append(_missing("", lost))
            again.append(every_s)
        elif podless_job is not None:
            found += await self._check_job(podless_job, again)
        return MissingReferences(
            diagnostics=tuple(found),
            held=frozenset(held),
            prefetch_held=bool(lost),
            refused=await self._refusals([each.name for each in observed if each.refused is not None]),
            again_s=min(again, default=None),
        )

    async def _refusals(self, names: Sequence[str]) -> dict[str, str]:
        """Deployment -> the API server's last refusal of a pod; the ReplicaSet's condition keeps only the first."""
        found: dict[str, str] = {}
        for event in await self.events(kind="ReplicaSet") if names else ():
            of = str(event.get("involvedObject", {}).get("name", "")).rpartition("-")[0]
            if event.get("reason") == "FailedCreate" and of in names:
                found.setdefault(of, _message(event).removeprefix(_CREATING))
        return found

    async def events(self, **about: str) -> list[Manifest]:
        """Warning Events about objects, newest first; empty when they cannot be read."""
        try:
            listed = await self._client.warnings(self._owner.namespace, **about)
        except errors.ClusterError as error:
            log.info("%s/%s: cannot read events: %s", self._owner.namespace, self._owner.name, error)
            return []
        return sorted(listed, key=_last_observed_at, reverse=True)

    async def _check_pods(
        self, workload: Workload, template: Mapping[str, Any], again: list[float]
    ) -> list[Diagnostic]:
        """Why no container of a workload has started, as far as the pods' status does not report it."""
        for pod in workload.present:
            if pod.reason in workloads.UNPULLABLE:
                missing = await self._missing(references.pull_secrets(template))
                also = f"; {_named(missing)}" if missing else ""
                return [
                    Diagnostic(unit=workload.unit, reason=pod.reason, message=f"pod {pod.name}: {pod.message}{also}")
                ]
        return await self._check_mounts(workload, again)

    async def _check_mounts(self, workload: Workload, again: list[float]) -> list[Diagnostic]:
        """Why a pod waits for its volumes, as the kubelet's last Event says."""
        waiting = [pod for pod in workload.present if pod.waits_for_volumes]
        if not waiting:
            return []
        pod = min(waiting, key=lambda each: each.created_at)  # only the oldest: each pod would cost a request
        age = self._now - pod.created_at
        again.append(_check_after(age))
        for event in await self.events(uid=pod.uid) if age > MOUNT_GRACE_S else ():
            reason, is_recent = str(event.get("reason", "")), self._now - _last_observed_at(event) < RECENT_S
            if is_recent and reason.startswith("Failed") and reason != _SCHEDULING:
                message = " ".join(_message(event).split())
                return [_of_event(workload.unit, pod, reason, message)]
        return []

    async def _check_job(self, job: Mapping[str, Any], again: list[float]) -> list[Diagnostic]:
        """Why a Job has no pod: the API server's last refusal of one. The Job's status does not have it."""
        metadata = job["metadata"]
        again.append(_check_after(self._now - workloads.timestamp(metadata.get("creationTimestamp"))))
        for event in await self.events(uid=metadata["uid"]):
            if event.get("reason") == "FailedCreate":
                message = _message(event).removeprefix(_CREATING)
                return [diagnostics.of_refused_job(metadata["name"], message)]
        return []

    async def _missing(self, desired: Iterable[Reference]) -> list[Reference]:
        return [each for each in desired if not await self._exists(each)]

    async def _exists(self, reference: Reference) -> bool:
        key = (reference.kind, reference.name)
        if key not in self._known:
            try:
                self._known[key] = await self._reference_exists(reference)
            except errors.ClusterError as error:  # assume it exists, the kubelet will report it if not
                log.info("%s/%s: cannot check %s: %s", self._owner.namespace, self._owner.name, reference, error)
                self._known[key] = True
        return self._known[key]

    async def _reference_exists(self, reference: Reference) -> bool:
        if not quantities.is_object_name(reference.name):
            return False  # a podTemplate may hold any text, and this one becomes a part of a path
        if reference.kind == kinds.CONFIG_MAP.name:
            try:
                await self._client.get(kinds.CONFIG_MAP, self._owner.namespace, reference.name)
            except errors.NotFound:
                return False
            return True
        head = naming.child(kinds.SECRET, reference.name, self._owner, of={})
        del head["metadata"]["ownerReferences"]
        return not await self._apply.secret_is_missing(head)


def pods_are_stuck(observed: Sequence[Workload], now: float) -> bool:
    """Whether a pod has waited suspiciously long for its volumes: a mounted Secret may be missing."""
    return any(
        pod.waits_for_volumes and now - pod.created_at > STUCK_MOUNT_S for each in observed for pod in each.present
    )


def retry_at(refused: Workload, now: float) -> float:
    """When to retry its refused pods: every 10 s at first, every 60 s after ten minutes."""
    wait = min(max(RETRY_REFUSED_S, (now - refused.refused_since) / 10), MAX_RETRY_REFUSED_S)
    tried_at = refused.tried_at if refused.tried_at <= now else 0.0  # the clock was set back
    return max(tried_at, refused.refused_since) + wait


def _check_after(age_s: float) -> float:
    """When to look again at what no watch reports, of something so old."""
    return min(max(MIN_CHECK_S, age_s / 2), MAX_CHECK_S)


def _missing(unit: str, missing: Collection[Reference]) -> Diagnostic:
    return Diagnostic(unit=unit, reason="ReferenceNotFound", message=_named(missing))


def _lacks_claims(unit: str, refusal: str) -> Diagnostic:
    kind = f"{kinds.DEVICES.name} of {kinds.DEVICES.api_version}"
    message = f"gpuClaim needs {kind}, which the operator cannot read in this cluster: {refusal}"
    return Diagnostic(unit=unit, reason="DeviceClaimsMissing", message=message)


def _named(missing: Collection[Reference]) -> str:
    return f"{', '.join(map(str, missing))} {'does' if len(missing) == 1 else 'do'} not exist"


def _of_event(unit: str, pod: ObservedPod, reason: str, message: str) -> Diagnostic:
    return Diagnostic(unit=unit, reason=reason, message=f"pod {pod.name}: {message}")


def _message(event: Mapping[str, Any]) -> str:
    return str(event.get("message", "")).removeprefix(_COMBINED)


def _last_observed_at(event: Mapping[str, Any]) -> float:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((workloads.timestamp(each) for each in times if each), 0.0)
