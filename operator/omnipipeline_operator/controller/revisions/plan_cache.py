"""Caches the plan of each pipeline, and the manifests of those reconciled last: making both is most of a reconcile.

Here: the caches. A plan depends on the spec alone, so an entry with the same uid and generation is never stale;
manifests depend on that plan and on facts that are compared. Not here: planning (the contract's `planning`), manifests
(`desired.children`). Called by `reconciling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator.cluster.store import PipelineKey
from omnipipeline_operator.desired import children
from omnipipeline_operator.desired.children import Children
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_spec import loading, planning
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.validation import topology

KEPT: Final = 128  # of 62 KiB for `examples/hello`


class PlanCache:
    """One plan per pipeline, with the uid, generation and forced restart that it was made for."""

    def __init__(self) -> None:
        self._made: dict[PipelineKey, tuple[tuple[Any, ...], PipelineConfig, PipelinePlan]] = {}

    def of(self, resource: Mapping[str, Any], rekeyed: str | None) -> tuple[PipelineConfig, PipelinePlan]:
        """The spec and its plan.

        rekeyed: added to every unit's revision; see `pinning.rekeyed`.
        Raises:  SpecError.
        """
        metadata = resource["metadata"]
        key, version = (metadata["namespace"], metadata["name"]), (metadata["uid"], metadata["generation"], rekeyed)
        made = self._made.get(key)
        if made is None or made[0] != version:
            spec = loading.from_resource(resource).spec
            if rekeyed is not None:
                spec = msgspec.structs.replace(spec, restarted_at=f"{spec.restarted_at or ''}+{rekeyed}")
            planned = planning.plan(spec, name=metadata["name"], checked=True)
            topology.check_on_cluster(spec)
            made = self._made[key] = (version, spec, planned)
        return made[1], made[2]

    def forget(self, key: PipelineKey) -> None:
        self._made.pop(key, None)


class ManifestCache:
    """The manifests of the `KEPT` pipelines that were reconciled last: a start reconciles each one several times."""

    def __init__(self, scrapers: Sequence[Mapping[str, Any]]) -> None:
        self._scrapers = scrapers
        self._made: dict[PipelineKey, tuple[PipelinePlan, PodFacts, Children]] = {}  #: Oldest first.

    def of(self, spec: PipelineConfig, plan: PipelinePlan, facts: PodFacts) -> Children:
        """The manifests; nobody writes into them.

        spec, plan: of `PlanCache`: the same plan is the same object.
        Raises: errors.NotAllowed.
        """
        key = (facts.owner.namespace, facts.owner.name)
        made = self._made.pop(key, None)
        if made is None or made[0] is not plan or made[1] != facts:
            made = (plan, facts, children.children(spec, plan, facts, scrapers=self._scrapers))
        self._made[key] = made
        if len(self._made) > KEPT:
            del self._made[next(iter(self._made))]
        return made[2]

    def forget(self, key: PipelineKey) -> None:
        self._made.pop(key, None)
