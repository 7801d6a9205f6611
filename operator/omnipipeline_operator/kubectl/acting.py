"""Restarts a pipeline, rotates its key and drains its pods.

Here: the order of requests, and waiting. Not here: what follows from them (the operator rolls out a new revision; a
drained pod's Deployment makes another one). Called by the commands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import Manifest
from omnipipeline_operator.kubectl.access import Kubectl, KubectlError, first_line

POLL_S: Final = 1.0

Report = Callable[[str], None]


def restart(kubectl: Kubectl, name: str, *, now: datetime | None = None) -> str:
    """Make new revisions of all units, which the operator rolls out. Returns the time that was set."""
    stamp = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
    kubectl.patch(name, {"restartedAt": stamp})
    return stamp


def rotate_key(kubectl: Kubectl, name: str, *, now: datetime | None = None) -> str:
    """The same as `restart`, and the new pods have a new control key. Returns the time that was set.

    Raises: KubectlError: the pipeline has no key.
    """
    security = kubectl.pipeline(name).get("spec", {}).get("control", {}).get("security", {})
    if security.get("mode", "Curve") != "Curve":
        raise KubectlError(f"{name} has no control key: control.security.mode is {security['mode']}")
    stamp = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
    kubectl.patch(name, {"restartedAt": stamp}, annotations={naming.KEY_ROTATION: stamp})
    return stamp


def delete_old_keys(kubectl: Kubectl, name: str) -> list[str]:
    """Delete the Secrets of keys that no new pod of the pipeline will have. Returns their names."""
    made = kubectl.listed("configmaps", naming.selector(name))
    pinned = {one["metadata"].get("annotations", {}).get(naming.SECRET_PIN) for one in made} - {None}
    if not pinned:
        return []
    listed = [one["metadata"]["name"] for one in kubectl.listed("secrets", naming.selector(name))]
    old = [each for each in listed if each.startswith(naming.control_secret(name, "")) and each not in pinned]
    for each in old:
        kubectl.run("delete", "secret", each, "--ignore-not-found")
    return old


def chosen(
    pods: Sequence[Manifest], *, names: Sequence[str], units: Sequence[str] | None, node: str | None
) -> list[Manifest]:
    """The pods that match all given conditions, without those that are terminating or have ended."""
    return [
        pod
        for pod in pods
        if _is_active(pod)
        and (not names or pod["metadata"]["name"] in names)
        and (units is None or pod["metadata"]["labels"].get(naming.UNIT_LABEL) in units)
        and (node is None or pod.get("spec", {}).get("nodeName") == node)
    ]


def drain(kubectl: Kubectl, name: str, pods: Sequence[Manifest], *, timeout_s: float, report: Report) -> bool:
    """Evict ``pods`` one by one, each when the previous one has ended and its unit is complete again.

    A pod finishes its bound requests before it ends. Returns False if not done within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    for pod in pods:
        reported = False
        while not _evicted(kubectl, pod, report, reported):
            reported = True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        while not _is_replaced(kubectl, name, pod):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        report(f"{pod['metadata']['name']} has ended")
    return True


def _evicted(kubectl: Kubectl, pod: Manifest, report: Report, reported: bool) -> bool:
    try:
        kubectl.evict(pod)
    except KubectlError as error:
        if "(NotFound)" in str(error):
            return True  # it has ended meanwhile
        if "TooManyRequests" not in str(error) and "disruption budget" not in str(error):
            raise
        if not reported:
            report(f"{pod['metadata']['name']} waits: {first_line(error)}")
        return False
    return True


def _is_replaced(kubectl: Kubectl, name: str, left: Manifest) -> bool:
    """Whether the pod no longer exists and every other pod of its unit is ready."""
    unit = left["metadata"]["labels"].get(naming.UNIT_LABEL)
    pods = kubectl.listed("pods", naming.selector(name, unit))
    if any(pod["metadata"]["uid"] == left["metadata"]["uid"] for pod in pods):
        return False
    lasting = [pod for pod in pods if _is_active(pod)]
    return bool(lasting) and all(map(_ready, lasting))


def _is_active(pod: Manifest) -> bool:
    """Whether a pod runs or will run: not one that has ended, nor one that is terminating."""
    over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not over and "deletionTimestamp" not in pod["metadata"]


def _ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
