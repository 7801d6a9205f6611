"""The units of a pipeline revision that requests need: all but those of prefill stages alone. Pure.

Decode computes prompts itself without a pod of prefill.
"""

from __future__ import annotations

from collections.abc import Collection

from omnipipeline_spec.types.plan import PipelineRevision


def units(revision: PipelineRevision, asleep: Collection[str] = ()) -> dict[str, str]:
    """unit -> unit revision, of the units without which no request is served. asleep: those that requests start."""
    prefills = {source for source, _, kind in revision.edges if kind == "kv"}
    unit_of = {stage: revision.groups[group] for stage, group in revision.stages.items()}
    spare = {unit_of[stage] for stage in prefills} - {unit_of[stage] for stage in unit_of.keys() - prefills}
    return {unit: its for unit, its in revision.units.items() if unit not in spare and unit not in asleep}
