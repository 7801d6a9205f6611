"""Writes the status of a pipeline, and an Event for each transition of a condition.

Here: what the status is made of, read from a snapshot, and writing it. Not here: the status itself (`changes.status`),
posting Events (`event_recorder`). Called by `reconciling` after the writes, or when a spec is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from omnipipeline_operator import errors
from omnipipeline_operator.changes import conditions, rollout, status
from omnipipeline_operator.changes.status_inputs import Refusal, StatusInputs, is_available
from omnipipeline_operator.cluster.applying import Applier
from omnipipeline_operator.cluster.status_client import CoordinatorStatus
from omnipipeline_operator.controller import coordinators as coordinators_of
from omnipipeline_operator.controller import exposure, model_cache
from omnipipeline_operator.controller.event_recorder import EventRecorder
from omnipipeline_operator.controller.gpu_rivals import NO_VERDICT, Verdict
from omnipipeline_operator.controller.missing import MissingReferences
from omnipipeline_operator.controller.planned import Planned
from omnipipeline_operator.controller.snapshots import Snapshot
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec import scaling


def inputs(
    planned: Planned,
    snapshot: Snapshot,
    coordinators: Sequence[CoordinatorStatus],
    refusal: Refusal | None,
    serving: Mapping[str, str],
    missing: MissingReferences,
    claim_refusal: str | None,
    gpus: Verdict = NO_VERDICT,
) -> StatusInputs:
    """The inputs that the status is made of.

    snapshot:      taken after the writes.
    claim_refusal: why the model cache's claim cannot grow.
    gpus:          whether it has let go of its GPUs.
    """
    observed = [
        msgspec.structs.replace(each, refused=missing.refused.get(each.name, each.refused))
        if each.refused is not None
        else each
        for each in snapshot.workloads
    ]
    created = planned.desired.created
    pods, surge = sum(scaling.most(planned.plan, one) for one in planned.plan.replicas), planned.goal.max_surge
    notes = [
        model_cache.shared_claim(snapshot, created, pods, surge=surge if planned.goal.strategy == "Coherent" else 0),
        model_cache.other_claim(snapshot, created, claim_refusal),
    ]
    return StatusInputs(
        plan=planned.plan,
        goal=planned.goal,
        decision=rollout.decide(planned.goal, observed, serving),
        observed=observed,
        entries=snapshot.entries(),
        exposure=exposure.exposure(planned.spec, snapshot),
        registered=coordinators_of.registered(coordinators),
        switched=coordinators_of.have_switched(coordinators, planned.plan.current),
        refusal=refusal,
        progress_deadline_s=float(planned.spec.rollout.progress_deadline_seconds),
        missing=[*missing.diagnostics, *gpus.diagnostics],
        yielded=gpus.yielded,
        image=planned.pins.image,
        images=planned.pins.images,
        fetching=model_cache.fetching(snapshot, created, planned.spec.model_path or ""),
        scaling=planned.scaling.reasons,
        note="; ".join(filter(None, notes)) or None,
    )


class StatusReporter:
    """Writes a status that has changed, and posts its transitions as Events."""

    def __init__(self, event_recorder: EventRecorder, *, clock: Callable[[], float]) -> None:
        self._event_recorder = event_recorder
        self._clock = clock

    async def summarise(self, resource: Manifest, inputs: StatusInputs, applier: Applier) -> Manifest:
        """Write the status of a spec that is carried out; returns it."""
        before, generation = conditions.reported(resource.get("status", {})), resource["metadata"]["generation"]
        now, reported = status.summarise(inputs, before, generation=generation, now=self._clock())
        await self._write(resource, now, reported, applier)
        return now

    async def refuse(self, resource: Manifest, snapshot: Snapshot, applier: Applier, refusal: Refusal) -> None:
        """Write the status of a spec that is not carried out; running pods are left alone."""
        before, generation = conditions.reported(resource.get("status", {})), resource["metadata"]["generation"]
        available = is_available(snapshot.entries(), snapshot.workloads)
        now, reported = status.refused(refusal, before, generation=generation, available=available, now=self._clock())
        await self._write(resource, now, reported, applier)

    async def _write(
        self,
        resource: Manifest,
        now: dict[str, Any],
        reported: Sequence[conditions.ObservedCondition],
        applier: Applier,
    ) -> None:
        before = conditions.reported(resource.get("status", {}))
        if now == before:
            return
        owner = Owner(
            namespace=resource["metadata"]["namespace"],
            name=resource["metadata"]["name"],
            uid=resource["metadata"]["uid"],
        )
        try:
            await applier.write_status(now)
        except (errors.NotFound, errors.Conflict):
            return  # deleted or recreated meanwhile: the watch will report it
        transitions = conditions.transitions(reported, before.get("conditions", ()))
        await self._event_recorder.report(owner, transitions)
