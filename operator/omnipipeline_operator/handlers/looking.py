"""One look at a pipeline: what the store knows of it, in the words that decisions are made in.

Here: gathering, reading back what was pinned. Not here: deciding (`changes`), writing (`writing`). Called by
`reconciling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator.changes import comparing, observed, troubles
from omnipipeline_operator.changes.observed import Workload
from omnipipeline_operator.changes.troubles import Trouble
from omnipipeline_operator.cluster import kinds
from omnipipeline_operator.cluster.kinds import Kind
from omnipipeline_operator.cluster.store import Key, Store
from omnipipeline_operator.desired import config, naming
from omnipipeline_operator.desired.naming import Manifest, Owner
from omnipipeline_spec.plan import PipelineRevision

HANGS_AFTER_S: Final = 60.0
JOB_NAME: Final = "batch.kubernetes.io/job-name"  # on the pods of a Job


class Look:
    """What is there of one pipeline, read when it is asked for: a write's answer is seen at once."""

    def __init__(self, store: Store, key: Key, owner: Owner) -> None:
        self._store = store
        self._key = key
        self.owner = owner

    def child(self, kind: Kind, name: str) -> Manifest | None:
        """One child of ours by name."""
        there = self._store.child(self._key, kind, name)
        return there if there is not None and self._is_ours(there) else None

    def children(self, kind: Kind) -> list[Manifest]:
        return [each for each in self._store.children(self._key, kind) if self._is_ours(each)]

    def claim(self, name: str) -> Manifest | None:
        """The model cache's claim: it has no owner, its label says that it was made for a pipeline of this name."""
        return self._store.child(self._key, kinds.CLAIM, name)

    def pods(self, unit: str | None = None) -> list[Manifest]:
        """Pods by label; their owners are ReplicaSets."""
        pods = self._store.children(self._key, kinds.POD)
        return [each for each in pods if unit is None or each["metadata"]["labels"].get(naming.UNIT_LABEL) == unit]

    def workloads(self) -> list[Workload]:
        by_revision: dict[tuple[str, str], list[Manifest]] = {}
        for pod in self.pods():
            labels = pod["metadata"]["labels"]
            of = (labels.get(naming.UNIT_LABEL, ""), labels.get(naming.REVISION_LABEL, ""))
            by_revision.setdefault(of, []).append(pod)
        found = []
        for deployment in self.children(kinds.DEPLOYMENT):
            labels = deployment["spec"]["selector"]["matchLabels"]
            of = (labels.get(naming.UNIT_LABEL, ""), labels.get(naming.REVISION_LABEL, ""))
            found.append(observed.workload(deployment, by_revision.get(of, ())))
        return found

    def revisions(self) -> Manifest | None:
        return self.child(kinds.CONFIG_MAP, naming.revisions(self.owner.name))

    def entries(self) -> tuple[PipelineRevision, ...]:
        return config.read_revisions(self.revisions())

    def _is_ours(self, there: Mapping[str, Any]) -> bool:
        return comparing.is_ours(there, self.owner) and "deletionTimestamp" not in there["metadata"]


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen once for a pipeline and holds while it lives."""

    image: str
    control_secret: str
    rekeyed: str | None = None  #: Names the occasion on which a lost Secret got a successor.
    is_new: bool  #: The Secret may not have been made yet.


def pins(look: Look, seen: Sequence[Workload], *, units: Mapping[str, str], image: str, random_id: str) -> Pins:
    """Read back from the revisions ConfigMap, else from the Deployments, else chosen now.

    units: the wanted revision of each unit: when none of them is there yet, the image of the day is taken.
    """
    there = look.revisions()
    annotations = there["metadata"].get("annotations", {}) if there else {}
    secrets = [each.control_secret for each in seen if each.control_secret]
    secret = annotations.get(naming.SECRET_PIN) or (secrets[0] if secrets else None)
    running = [each for each in seen if each.unit in units]
    keeps_image = any(units[each.unit] == each.revision for each in running)
    pinned = annotations.get(naming.IMAGE_PIN) if keeps_image else None
    return Pins(
        image=pinned or image,
        control_secret=secret or naming.control_secret(look.owner.name, random_id),
        rekeyed=annotations.get(naming.REKEYED_PIN),
        is_new=secret not in secrets,
    )


def rekeyed(look: Look) -> str | None:
    """What is added to every unit's revision since a Secret was lost."""
    there = look.revisions()
    pinned = there["metadata"].get("annotations", {}).get(naming.REKEYED_PIN) if there else None
    return None if pinned is None else str(pinned)


def fetching(look: Look, created: Sequence[Manifest], model: str) -> Trouble | None:
    """Why units wait for the Job that fetches their model; None: there is none, or it is done."""
    for wanted in created:
        if wanted["kind"] != kinds.JOB.name:
            continue
        name = wanted["metadata"]["name"]
        status = (look.child(kinds.JOB, name) or {}).get("status", {})
        if status.get("succeeded"):
            return None
        own = [each for each in look.pods() if each["metadata"]["labels"].get(JOB_NAME) == name]
        ended = {each["type"] for each in status.get("conditions", ()) if each["status"] == "True"}
        return troubles.of_prefetch(name, model, map(observed.pod, own), gave_up="Failed" in ended)
    return None


def shared_claim(look: Look, created: Sequence[Manifest], pods: int) -> str | None:
    """What to know of the model cache's claim, which is made once: that several pods cannot share it, or that it waits.

    pods: how many are to mount it.
    """
    there = next((look.claim(one["metadata"]["name"]) for one in created if one["kind"] == kinds.CLAIM.name), None)
    if there is None:
        return None
    named, modes = f"claim {there['metadata']['name']}", there["spec"].get("accessModes", [])
    if there.get("status", {}).get("phase") == "Pending":
        return f"{named} ({', '.join(modes)}) has no volume yet"
    if pods > 1 and not {"ReadWriteMany", "ReadOnlyMany"}.intersection(modes):
        cure = "delete it to have another one made, or name one of your own"
        return f"{named} is {', '.join(modes)}: its {pods} pods start on one node only; {cure}"
    return None


def hangs(seen: Sequence[Workload], now: float) -> bool:
    """Whether a pod has been about to start for suspiciously long: what it mounts may not be there."""
    return any(pod.waits_for_volumes and now - pod.created_at > HANGS_AFTER_S for each in seen for pod in each.present)
