"""The fetch of a model (by a Job, or by pods of units) and the claim that keeps it, as the status reports them.

Here: reading both from a snapshot. Not here: their manifests (`desired.storage`). Called by `reporting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from omnipipeline_operator import kinds
from omnipipeline_operator.changes import workloads
from omnipipeline_operator.changes.reporting import diagnostics
from omnipipeline_operator.changes.reporting.diagnostics import Diagnostic
from omnipipeline_operator.changes.workloads import ObservedPod
from omnipipeline_operator.cluster.status_client import StatusClient
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.types import quantities

JOB_NAME: Final = "batch.kubernetes.io/job-name"  # on the pods of a Job
MOST_ASKED: Final = 4  # of pods that fetch at the same time, for the share in the status
JOB_UID: Final = "batch.kubernetes.io/controller-uid"  # there, too: a Job that was replaced had the same name


async def progress(
    status_client: StatusClient, snapshot: Snapshot, created: Sequence[Manifest]
) -> tuple[bool, tuple[int, int] | None]:
    """Whether a pod fetches the model now, and (bytes that are there, bytes of the model) if it says so."""
    addresses = [each.ip for each in _fetching_pods(snapshot) if each.ip]
    if addresses:
        told = [await status_client.fetch(each) for each in addresses[:MOST_ASKED]]
        most = max((each for each in told if each is not None), key=lambda each: each.bytes_total, default=None)
        return True, None if most is None else (most.bytes_done, most.bytes_total)
    for desired in created:
        live = snapshot.child(kinds.JOB, desired["metadata"]["name"]) if desired["kind"] == kinds.JOB.name else None
        if live is None or live.get("status", {}).get("succeeded"):
            continue
        pods = [workloads.read_pod(each) for each in _pods_of(snapshot, live)]
        running = [each.ip for each in pods if each.ip and not each.finished and not each.terminating]
        for address in running[-1:]:
            found = await status_client.fetch(address)
            return True, None if found is None else (found.bytes_done, found.bytes_total)
    return False, None


def fetching(
    snapshot: Snapshot, created: Sequence[Manifest], model: str, done: tuple[int, int] | None = None
) -> Diagnostic | None:
    """Why units are waiting for their model; None: no pod of theirs fetches it, and no Job has to."""
    pods = _fetching_pods(snapshot)
    if pods:
        return diagnostics.of_fetching_pod(pods[0].name, model, done=done)
    for desired in created:
        if desired["kind"] != kinds.JOB.name:
            continue
        name = desired["metadata"]["name"]
        live = snapshot.child(kinds.JOB, name)
        status = (live or {}).get("status", {})
        if status.get("succeeded"):
            return None
        own = _pods_of(snapshot, live) if live else []
        ended = {each["type"] for each in status.get("conditions", ()) if each["status"] == "True"}
        return diagnostics.of_prefetch(name, model, map(workloads.read_pod, own), gave_up="Failed" in ended, done=done)
    return None


def _fetching_pods(snapshot: Snapshot) -> list[ObservedPod]:
    """Pods of units that fetch the model to their node, the oldest first: one of a node fetches, others wait for it."""
    found = [pod for each in snapshot.workloads for pod in each.pods if pod.fetches and not pod.terminating]
    return sorted(found, key=lambda each: (each.created_at, each.name))


def podless_job(snapshot: Snapshot, created: Sequence[Manifest]) -> Manifest | None:
    """The live Job when it has not ended and has no pod: it has just been made, or its pods are refused."""
    for desired in created:
        if desired["kind"] != kinds.JOB.name:
            continue
        live = snapshot.child(kinds.JOB, desired["metadata"]["name"])
        status = (live or {}).get("status", {})
        ended = {each["type"] for each in status.get("conditions", ()) if each["status"] == "True"}
        has_pod = live is not None and bool(_pods_of(snapshot, live))
        return None if has_pod or status.get("succeeded") or "Failed" in ended else live
    return None


def is_outdated(desired: Manifest, live: Manifest) -> bool:
    """Whether a live Job is replaced: it has not succeeded, and would be made with another pod now.

    A pod that waits for its image, its node or a volume never fails, so the Job would wait for ever with what the
    author has corrected since. One without a hash is of an earlier operator, and is replaced once.
    """
    if live.get("status", {}).get("succeeded"):
        return False
    made_with = live["metadata"].get("annotations", {}).get(naming.TEMPLATE)
    return bool(made_with != desired["metadata"]["annotations"][naming.TEMPLATE])


def _pods_of(snapshot: Snapshot, job: Manifest) -> list[Manifest]:
    labels = {JOB_NAME: job["metadata"]["name"], JOB_UID: job["metadata"]["uid"]}
    return [each for each in snapshot.pods() if labels.items() <= each["metadata"]["labels"].items()]


def requested(claim: Manifest) -> str:
    """The storage that a claim requests."""
    return str(claim["spec"].get("resources", {}).get("requests", {}).get("storage", "0"))


def must_grow(desired: Manifest, live: Manifest) -> bool:
    """Whether a live claim is to request more storage. One without a volume cannot be changed."""
    is_bound = live.get("status", {}).get("phase") == "Bound"
    return is_bound and quantities.parse_quantity(requested(desired)) > quantities.parse_quantity(requested(live))


def other_claim(snapshot: Snapshot, created: Sequence[Manifest], refusal: str | None) -> str | None:
    """A remark on what the spec asks of the claim that the operator makes, and the live one does not have.

    refusal: why it cannot grow.
    """
    desired, live = _claims(snapshot, created)
    if desired is None or live is None:
        return None
    named, has, wanted = f"claim {live['metadata']['name']}", requested(live), requested(desired)
    remarks = []
    if refusal is not None:
        remarks.append(f"{named} cannot grow from {has} to {wanted}: {refusal}")
    elif quantities.parse_quantity(wanted) < quantities.parse_quantity(has):
        remarks.append(f"{named} requests {has}, and no claim shrinks to modelCache.size {wanted}")
    wanted_class, has_class = desired["spec"].get("storageClassName"), live["spec"].get("storageClassName")
    if wanted_class is not None and wanted_class != has_class:
        remarks.append(f"{named} has storage class {has_class or 'none'} and keeps it, not {wanted_class}")
    if not remarks:
        return None
    return f"{', '.join(remarks)}; to have another claim, delete it when no pod uses it, or name your own"


def _claims(snapshot: Snapshot, created: Sequence[Manifest]) -> tuple[Manifest | None, Manifest | None]:
    """The claim that the operator makes, and the live one."""
    desired = next((each for each in created if each["kind"] == kinds.CLAIM.name), None)
    return desired, snapshot.claim(desired["metadata"]["name"]) if desired else None


def shared_claim(snapshot: Snapshot, created: Sequence[Manifest], pods: int, *, surge: int) -> str | None:
    """A remark on the model cache's claim: it has no volume yet, or several pods cannot share it; None: neither.

    pods:  how many will mount it.
    surge: how many more of a unit will mount it in a roll-out.
    """
    _, live = _claims(snapshot, created)
    if live is None:
        return None
    named, modes = f"claim {live['metadata']['name']}", live["spec"].get("accessModes", [])
    if live.get("status", {}).get("phase") == "Pending":
        return f"{named} ({', '.join(modes)}) has no volume yet"
    if {"ReadWriteMany", "ReadOnlyMany"}.intersection(modes):
        return None
    is_single = f"{named} is {', '.join(modes)}"
    if pods > 1:
        cure = "delete it, and the operator makes another one, or name your own claim"
        return f"{is_single}: its {pods} pods can start on one node only; {cure}"
    if surge:
        cure = "rollout.strategy: Recreate ends the old one first"
        return f"{is_single}: in a roll-out the new pod can start on the old one's node only; {cure}"
    return None
