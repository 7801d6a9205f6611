"""Writes the status of a pipeline, and an Event for each transition of a condition.

Here: what the status is made of, read from a snapshot, and writing it. Not here: the status itself
(`changes.reporting.status`), posting Events (`event_recorder`). Called by `reconciling` after the writes, or when a
spec is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator import errors
from omnipipeline_operator.changes import conditions
from omnipipeline_operator.changes.deciding import rollout
from omnipipeline_operator.changes.reporting import status
from omnipipeline_operator.changes.reporting.status_inputs import Refusal, StatusInputs, is_available
from omnipipeline_operator.cluster.applying import Applier
from omnipipeline_operator.controller.event_recorder import EventRecorder
from omnipipeline_operator.controller.findings import Findings
from omnipipeline_operator.controller.observing import coordinators, exposure, model_cache
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec import scaling


def inputs(
    found: Findings,
    after: Snapshot,
    *,
    refusal: Refusal | None,
    claim_refusal: str | None,
    kept_key: str | None = None,
    fetched: tuple[int, int] | None = None,
    remarks: Sequence[str | None] = (),
) -> StatusInputs:
    """The inputs that the status is made of.

    after:         taken after the writes.
    claim_refusal: why the model cache's claim cannot grow.
    kept_key:      why the key is not replaced though that was asked for, or though its Secret is missing.
    fetched:       (bytes of the model that the prefetch Job has fetched, all of its bytes), if known.
    remarks:       what else the message of Accepted says.
    """
    planned, missing, gpus = found.planned, found.missing, found.gpus
    observed = [
        msgspec.structs.replace(each, refused=missing.refused.get(each.name, each.refused))
        if each.refused is not None
        else each
        for each in after.workloads
    ]
    created = planned.desired.created
    pods, surge = sum(scaling.most(planned.plan, one) for one in planned.plan.replicas), planned.goal.max_surge
    notes = [
        model_cache.shared_claim(after, created, pods, surge=surge if planned.goal.strategy == "Coherent" else 0),
        model_cache.other_claim(after, created, claim_refusal),
        gpus.note,
        planned.note,
        kept_key,
        *remarks,
    ]
    return StatusInputs(
        plan=planned.plan,
        goal=planned.goal,
        decision=rollout.decide(planned.goal, observed, found.serving),
        observed=observed,
        entries=after.entries(),
        exposure=exposure.exposure(planned.spec, after, planned.lacking),
        registered=coordinators.registered(found.statuses),
        switched=coordinators.have_switched(found.statuses, planned.target),
        refusal=refusal,
        progress_deadline_s=float(planned.spec.rollout.progress_deadline_seconds),
        missing=[*missing.diagnostics, *gpus.diagnostics],
        yielded=gpus.yielded,
        image=planned.pins.image,
        images=planned.pins.images,
        fetching=model_cache.fetching(after, created, planned.spec.model_path or "", fetched),
        scaling=planned.scaling.reasons,
        canary=planned.canary,
        target=planned.target,
        note="; ".join(filter(None, notes)) or None,
    )


COUNTS_EVERY_S: Final = 1.0  # the API server evaluates all rules of the spec at each write of its status
MAX_WRITTEN: Final = 1000  # above this size, older times are pruned


class StatusReporter:
    """Writes a status that has changed, and posts its transitions as Events.

    A status in which only counts have changed is written once in `COUNTS_EVERY_S`: pods of a roll become ready one
    after the other.
    """

    def __init__(self, event_recorder: EventRecorder, *, clock: Callable[[], float]) -> None:
        self._event_recorder = event_recorder
        self._clock = clock
        self._written: dict[str, float] = {}  #: uid of a pipeline -> when its status was written.

    async def summarise(
        self, resource: Manifest, inputs: StatusInputs, applier: Applier
    ) -> tuple[Manifest, float | None]:
        """Write the status of a spec that is carried out.

        Returns: the status, and in how many seconds to come back because it was not written yet.
        """
        before, generation = conditions.reported(resource.get("status", {})), resource["metadata"]["generation"]
        now, reported = status.summarise(inputs, before, generation=generation, now=self._clock())
        if now != before and status.differs_in_counts_alone(now, before):
            since = self._clock() - self._written.get(resource["metadata"]["uid"], float("-inf"))
            if 0 <= since < COUNTS_EVERY_S:
                return now, COUNTS_EVERY_S - since
        await self._write(resource, now, reported, applier)
        return now, None

    async def refuse(self, resource: Manifest, snapshot: Snapshot, applier: Applier, refusal: Refusal) -> None:
        """Write the status of a spec that is not carried out; running pods are left alone."""
        before, generation = conditions.reported(resource.get("status", {})), resource["metadata"]["generation"]
        available = is_available(snapshot.entries(), snapshot.workloads, status.asleep(before))
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
        at = self._clock()
        if len(self._written) >= MAX_WRITTEN:
            self._written = {uid: then for uid, then in self._written.items() if 0 <= at - then < COUNTS_EVERY_S}
        self._written[owner.uid] = at
        transitions = conditions.transitions(reported, before.get("conditions", ()))
        await self._event_recorder.report(owner, transitions)
