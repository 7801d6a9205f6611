"""The live objects of one pipeline at one moment, as the store has them.

Here: gathering them. Not here: deciding (`changes`), what was pinned (`pinning`), writing (`writing`). Called by
`reconciling`, which takes one snapshot before its writes and one after them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from omnipipeline_operator import kinds
from omnipipeline_operator.changes import comparing, workloads
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster.store import PipelineKey, Store
from omnipipeline_operator.desired import config, naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Kind, Manifest
from omnipipeline_spec.types.plan import PipelineRevision


class Snapshot:
    """The store's objects of one pipeline when the snapshot is taken; later changes of the store are not in it."""

    def __init__(self, store: Store, key: PipelineKey, owner: Owner, *, now: float) -> None:
        self.owner = owner
        self._now = now
        self._labelled = {kind.key: store.children(key, kind) for kind in kinds.WATCHED}

    def child(self, kind: Kind, name: str) -> Manifest | None:
        """One child of ours by name."""
        return next((each for each in self.children(kind) if each["metadata"]["name"] == name), None)

    def children(self, kind: Kind) -> list[Manifest]:
        """Children of ours that are not being deleted."""
        return [each for each in self._labelled[kind.key] if self._is_ours(each)]

    def claim(self, name: str) -> Manifest | None:
        """The model cache's claim: it has no owner, only the label of the pipeline that it was made for."""
        return next((each for each in self._labelled[kinds.CLAIM.key] if each["metadata"]["name"] == name), None)

    def pods(self, unit: str | None = None) -> list[Manifest]:
        """Pods with the pipeline's label, or with that of one unit; their owners are ReplicaSets."""
        pods = self._labelled[kinds.POD.key]
        return [each for each in pods if unit is None or each["metadata"]["labels"].get(naming.UNIT_LABEL) == unit]

    @functools.cached_property
    def workloads(self) -> list[Workload]:
        """The Deployments of all unit revisions, each with its pods; not one that selects other pods than ours do."""
        by_revision: dict[tuple[str, str], list[Manifest]] = {}
        for pod in self.pods():
            labels = pod["metadata"]["labels"]
            of = (labels.get(naming.UNIT_LABEL, ""), labels.get(naming.REVISION_LABEL, ""))
            by_revision.setdefault(of, []).append(pod)
        found = []
        for deployment in self.children(kinds.DEPLOYMENT):
            labels = deployment["spec"]["selector"].get("matchLabels", {})
            of = (labels.get(naming.UNIT_LABEL, ""), labels.get(naming.REVISION_LABEL, ""))
            if labels != naming.selector(self.owner.name, *of):
                continue
            found.append(workloads.read_workload(deployment, by_revision.get(of, ()), now=self._now))
        return found

    def orphans(self) -> list[Manifest]:
        """Children without an owner that an earlier resource of this name left."""
        live = (each for children in self._labelled.values() for each in children)
        return [each for each in live if comparing.is_orphan(each, self.owner)]

    def addresses(self) -> set[tuple[str, str, str]]:
        """(unit, revision, address) of all pods, by their labels."""
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
