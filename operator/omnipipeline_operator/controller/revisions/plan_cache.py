"""Caches the plan of each pipeline: reading and planning a spec is most of a reconcile.

Here: the cache. A plan depends on the spec alone, so an entry with the same uid and generation is never stale. Not
here: planning (the contract's `planning`). Called by `reconciling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omnipipeline_operator.cluster.store import PipelineKey
from omnipipeline_spec import loading, planning
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.validation import topology


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
