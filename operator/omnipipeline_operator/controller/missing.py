"""What units wait for that is not there, and what kubelets say of pods that cannot start.

Here: asking the API server, about pods that have not started only. Not here: what is told of it (`changes.status`),
what is held back for it (`writing`). Called by `reconciling`. Whether a Secret is there is asked by a dry run of
making it: the operator may read none.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.changes import rollout, workloads
from omnipipeline_operator.changes.diagnostics import Diagnostic
from omnipipeline_operator.changes.workloads import Pod, Workload
from omnipipeline_operator.cluster.applying import Applier
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.desired import children, naming, references
from omnipipeline_operator.desired.naming import Manifest, Owner
from omnipipeline_operator.desired.references import Reference

log = logging.getLogger(__name__)

MOUNT_GRACE_S: Final = 3.0  # a mount takes no longer, where nothing is missing
MIN_CHECK_S: Final = 2.0
MAX_CHECK_S: Final = 30.0
RETRY_REFUSED_S: Final = 10.0  # the ReplicaSet controller's own retries end at one in a quarter of an hour
STUCK_MOUNT_S: Final = 5.0
RECENT_S: Final = 150.0  # a kubelet tries a mount again at least every 122 s; what it said before that is over
MAX_RETRY_REFUSED_S: Final = 60.0
_SCHEDULING: Final = "FailedScheduling"  # a pod condition says that, and when it is over


class MissingReferences(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    diagnostics: tuple[Diagnostic, ...] = ()
    held: frozenset[rollout.Key] = frozenset()  #: Unit revisions whose pods could not start now.
    prefetch_held: bool = False
    refused: Mapping[str, str] = {}  #: Deployment -> why its pods are refused now, where that is known.
    again_s: float | None = None  #: When to ask again: nothing will tell us.


class ReferenceChecker:
    """Asks for one pipeline, during one look at it; each object once."""

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
        decided: Mapping[rollout.Key, int],
        *,
        every_s: float,
    ) -> MissingReferences:
        """every_s: the least time until what is missing is asked for again."""
        by_key = {(each.unit, each.revision): each for each in observed}
        found: list[Diagnostic] = []
        held: set[rollout.Key] = set()
        again: list[float] = []
        for each in desired.workloads:
            key, template = (each.unit, each.revision), each.deployment["spec"]["template"]
            workload = by_key.get(key)
            if not decided.get(key) or (workload is not None and workload.started):
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
        return MissingReferences(
            diagnostics=tuple(found),
            held=frozenset(held),
            prefetch_held=bool(lost),
            refused=await self._refusals([each.name for each in observed if each.refused is not None]),
            again_s=min(again, default=None),
        )

    async def _refusals(self, names: Sequence[str]) -> dict[str, str]:
        """What the API server said of the last attempt; a ReplicaSet's condition keeps what it said of the first."""
        found: dict[str, str] = {}
        for event in await self.events(kind="ReplicaSet") if names else ():
            of = str(event.get("involvedObject", {}).get("name", "")).rpartition("-")[0]
            if event.get("reason") == "FailedCreate" and of in names:
                found.setdefault(of, str(event.get("message", "")).removeprefix("Error creating: "))
        return found

    async def events(self, **about: str) -> list[Manifest]:
        """Warnings about objects, the newest first; none where they cannot be read."""
        try:
            listed = await self._client.warnings(self._owner.namespace, **about)
        except errors.ClusterError as error:
            log.info("%s/%s: events: %s", self._owner.namespace, self._owner.name, error)
            return []
        return sorted(listed, key=_last_observed_at, reverse=True)

    async def _check_pods(
        self, workload: Workload, template: Mapping[str, Any], again: list[float]
    ) -> list[Diagnostic]:
        """Of pods of which no container has started: why not, as far as their status does not say it."""
        for pod in workload.present:
            if pod.reason in workloads.UNPULLABLE:
                missing = await self._missing(references.pull_secrets(template))
                also = f"; {_named(missing)}" if missing else ""
                return [
                    Diagnostic(unit=workload.unit, reason=pod.reason, message=f"pod {pod.name}: {pod.message}{also}")
                ]
        waiting = [pod for pod in workload.present if pod.waits_for_volumes]
        if not waiting:
            return []
        pod = min(waiting, key=lambda each: each.created_at)  # one stands for all: each is a request
        age = self._now - pod.created_at
        again.append(min(max(MIN_CHECK_S, age / 2), MAX_CHECK_S))
        for event in await self.events(uid=pod.uid) if age > MOUNT_GRACE_S else ():
            reason, is_recent = str(event.get("reason", "")), self._now - _last_observed_at(event) < RECENT_S
            if is_recent and reason.startswith("Failed") and reason != _SCHEDULING:
                message = " ".join(str(event.get("message", "")).split())
                return [_of_event(workload.unit, pod, reason, message)]
        return []

    async def _missing(self, desired: Iterable[Reference]) -> list[Reference]:
        return [each for each in desired if not await self._exists(each)]

    async def _exists(self, reference: Reference) -> bool:
        key = (reference.kind, reference.name)
        if key not in self._known:
            try:
                self._known[key] = await self._reference_exists(reference)
            except errors.ClusterError as error:  # a quota, a policy: the kubelet will know
                log.info("%s/%s: %s: %s", self._owner.namespace, self._owner.name, reference, error)
                self._known[key] = True
        return self._known[key]

    async def _reference_exists(self, reference: Reference) -> bool:
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
    """Whether a pod has been about to start for suspiciously long: what it mounts may not be there."""
    return any(
        pod.waits_for_volumes and now - pod.created_at > STUCK_MOUNT_S for each in observed for pod in each.present
    )


def retry_at(refused: Workload, now: float) -> float:
    """When to have its pods tried again: often at first, each minute when it has gone on for ten."""
    wait = min(max(RETRY_REFUSED_S, (now - refused.refused_since) / 10), MAX_RETRY_REFUSED_S)
    return max(refused.tried_at, refused.refused_since) + wait


def _missing(unit: str, missing: Collection[Reference]) -> Diagnostic:
    return Diagnostic(unit=unit, reason="ReferenceNotFound", message=_named(missing))


def _named(missing: Collection[Reference]) -> str:
    return f"{', '.join(map(str, missing))} {'is' if len(missing) == 1 else 'are'} not there"


def _of_event(unit: str, pod: Pod, reason: str, message: str) -> Diagnostic:
    return Diagnostic(unit=unit, reason=reason, message=f"pod {pod.name}: {message}")


def _last_observed_at(event: Mapping[str, Any]) -> float:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((workloads.timestamp(each) for each in times if each), 0.0)
