"""The live objects of one pipeline at one moment, as the store has them.

Here: gathering them, reading back what was pinned. Not here: deciding (`changes`), writing (`writing`). Called by
`reconciling`, which takes one snapshot before its writes and one after them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator.changes import comparing, diagnostics, workloads
from omnipipeline_operator.changes.diagnostics import Diagnostic
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster import kinds
from omnipipeline_operator.cluster.kinds import Kind
from omnipipeline_operator.cluster.store import Key, Store
from omnipipeline_operator.desired import config, naming
from omnipipeline_operator.desired.naming import Manifest, Owner
from omnipipeline_spec.types.plan import PipelineRevision

HANGS_AFTER_S: Final = 5.0
JOB_NAME: Final = "batch.kubernetes.io/job-name"  # on the pods of a Job


class Snapshot:
    """What the store has of one pipeline when the snapshot is taken; later changes of the store are not in it."""

    def __init__(self, store: Store, key: Key, owner: Owner) -> None:
        self.owner = owner
        self._labelled = {kind.name: store.children(key, kind) for kind in kinds.WATCHED}

    def child(self, kind: Kind, name: str) -> Manifest | None:
        """One child of ours by name."""
        return next((each for each in self.children(kind) if each["metadata"]["name"] == name), None)

    def children(self, kind: Kind) -> list[Manifest]:
        """Children of ours that are not being deleted."""
        return [each for each in self._labelled[kind.name] if self._is_ours(each)]

    def claim(self, name: str) -> Manifest | None:
        """The model cache's claim: it has no owner, its label says that it was made for a pipeline of this name."""
        return next((each for each in self._labelled[kinds.CLAIM.name] if each["metadata"]["name"] == name), None)

    def pods(self, unit: str | None = None) -> list[Manifest]:
        """Pods by label; their owners are ReplicaSets."""
        pods = self._labelled[kinds.POD.name]
        return [each for each in pods if unit is None or each["metadata"]["labels"].get(naming.UNIT_LABEL) == unit]

    @functools.cached_property
    def workloads(self) -> list[Workload]:
        """The Deployments of all unit revisions, each with its pods."""
        by_revision: dict[tuple[str, str], list[Manifest]] = {}
        for pod in self.pods():
            labels = pod["metadata"]["labels"]
            of = (labels.get(naming.UNIT_LABEL, ""), labels.get(naming.REVISION_LABEL, ""))
            by_revision.setdefault(of, []).append(pod)
        found = []
        for deployment in self.children(kinds.DEPLOYMENT):
            labels = deployment["spec"]["selector"]["matchLabels"]
            of = (labels.get(naming.UNIT_LABEL, ""), labels.get(naming.REVISION_LABEL, ""))
            found.append(workloads.read_workload(deployment, by_revision.get(of, ())))
        return found

    def orphans(self) -> list[Manifest]:
        """Children of an earlier resource of this name, which left them without an owner."""
        live = (each for children in self._labelled.values() for each in children)
        return [each for each in live if comparing.is_orphan(each, self.owner)]

    def addresses(self) -> set[tuple[str, str, str]]:
        """(unit, revision, address) of all pods that bear the labels of a unit."""
        found = set()
        for pod in self.pods():
            labels, address = pod["metadata"]["labels"], pod.get("status", {}).get("podIP", "")
            found.add((labels.get(naming.UNIT_LABEL, ""), labels.get(naming.REVISION_LABEL, ""), address))
        return found

    def revisions(self) -> Manifest | None:
        """The ConfigMap that lists the pipeline revisions."""
        return self.child(kinds.CONFIG_MAP, naming.revisions(self.owner.name))

    def entries(self) -> tuple[PipelineRevision, ...]:
        """The pipeline revisions that it lists."""
        return config.read_revisions(self.revisions())

    def _is_ours(self, live: Mapping[str, Any]) -> bool:
        return comparing.is_ours(live, self.owner) and "deletionTimestamp" not in live["metadata"]


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen once and holds while a pipeline revision (its image) or the pipeline (its key) lives."""

    image: str
    images: Mapping[str, str]  #: Of other pipeline revisions.
    control_secret: str
    rekeyed: str | None = None  #: Names the occasion on which all units were made anew: a lost Secret, mixed images.
    is_new: bool  #: The Secret may not have been made yet.
    is_mixed: bool = False  #: Units of the wanted revision run different images, and more of it is to be made.


def pins(
    snapshot: Snapshot,
    observed: Sequence[Workload],
    *,
    update: PipelineRevision,
    coordinator: str,
    image: str | None,
    of_the_day: str,
    random_id: str,
) -> Pins:
    """Read back from the revisions ConfigMap and the Deployments, else chosen now.

    update: the wanted revision. coordinator: its coordinator's. image: that the spec names.
    """
    live = snapshot.revisions()
    annotations = live["metadata"].get("annotations", {}) if live else {}
    secrets = [each.control_secret for each in observed if each.control_secret]
    secret = annotations.get(naming.SECRET_PIN) or (secrets[0] if secrets else None)
    desired = {**update.units, naming.COORDINATOR: coordinator}
    own = [each for each in observed if desired.get(each.unit) == each.revision]
    images = config.read_images(live)
    chosen = image or pinned_image(own, images.get(update.revision), of_the_day)
    busy = [each for each in own if not each.idle]
    return Pins(
        image=chosen,
        images=images,
        control_secret=secret or naming.control_secret(snapshot.owner.name, random_id),
        rekeyed=annotations.get(naming.REKEYED_PIN),
        is_new=secret not in secrets,
        is_mixed=image is None and len({each.image for each in busy if each.started}) > 1 and len(busy) < len(desired),
    )


def pinned_image(own: Sequence[Workload], remembered: str | None, of_the_day: str) -> str:
    """The one image of a pipeline revision, for units whose spec names none.

    What runs decides: it is not restarted, and the rest is to be like it. Where nothing runs and the image cannot be
    had, the image of the day: it may be the cure. Else what the revision was made with.

    own: the revision's Deployments.
    """
    running = [each.image for each in own if each.started]
    if running:
        return max(set(running), key=lambda each: (running.count(each), each))
    if any(each.waits_for_image for each in own):
        return of_the_day
    made = sorted((each for each in own if each.image), key=lambda each: (not each.idle, each.created_at))
    return remembered or (made[-1].image if made else of_the_day)


def rekeyed(snapshot: Snapshot) -> str | None:
    """What is added to every unit's revision since a Secret was lost."""
    live = snapshot.revisions()
    pinned = live["metadata"].get("annotations", {}).get(naming.REKEYED_PIN) if live else None
    return None if pinned is None else str(pinned)


def fetching(snapshot: Snapshot, created: Sequence[Manifest], model: str) -> Diagnostic | None:
    """Why units wait for the Job that fetches their model; None: there is none, or it is done."""
    for desired in created:
        if desired["kind"] != kinds.JOB.name:
            continue
        name = desired["metadata"]["name"]
        status = (snapshot.child(kinds.JOB, name) or {}).get("status", {})
        if status.get("succeeded"):
            return None
        own = [each for each in snapshot.pods() if each["metadata"]["labels"].get(JOB_NAME) == name]
        ended = {each["type"] for each in status.get("conditions", ()) if each["status"] == "True"}
        return diagnostics.of_prefetch(name, model, map(workloads.read_pod, own), gave_up="Failed" in ended)
    return None


def shared_claim(snapshot: Snapshot, created: Sequence[Manifest], pods: int) -> str | None:
    """What to know of the model cache's claim, which is made once: that several pods cannot share it, or that it waits.

    pods: how many are to mount it.
    """
    live = next((snapshot.claim(one["metadata"]["name"]) for one in created if one["kind"] == kinds.CLAIM.name), None)
    if live is None:
        return None
    named, modes = f"claim {live['metadata']['name']}", live["spec"].get("accessModes", [])
    if live.get("status", {}).get("phase") == "Pending":
        return f"{named} ({', '.join(modes)}) has no volume yet"
    if pods > 1 and not {"ReadWriteMany", "ReadOnlyMany"}.intersection(modes):
        cure = "delete it to have another one made, or name one of your own"
        return f"{named} is {', '.join(modes)}: its {pods} pods start on one node only; {cure}"
    return None


def hangs(observed: Sequence[Workload], now: float) -> bool:
    """Whether a pod has been about to start for suspiciously long: what it mounts may not be there."""
    return any(
        pod.waits_for_volumes and now - pod.created_at > HANGS_AFTER_S for each in observed for pod in each.present
    )
