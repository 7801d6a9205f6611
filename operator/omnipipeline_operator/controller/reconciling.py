"""One reconcile of one pipeline: take a snapshot, decide, write, take another snapshot, report.

Here: the order of these steps, and how errors of a write are reported. Not here: the steps themselves. Called by the
workers of `handlers.lifecycle`, one reconcile at a time per pipeline. Decisions use no state of earlier reconciles.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from omnipipeline_operator import errors
from omnipipeline_operator.changes import conditions, workloads
from omnipipeline_operator.changes.deciding import nearness, rollout
from omnipipeline_operator.changes.deciding import scaling as changes_scaling
from omnipipeline_operator.changes.reporting import assessment
from omnipipeline_operator.changes.reporting.status_inputs import Refusal, is_available
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster.applying import Applier, NameTaken
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, StatusClient
from omnipipeline_operator.cluster.store import PipelineKey, Store
from omnipipeline_operator.controller import adopting, reporting
from omnipipeline_operator.controller.event_recorder import EventRecorder
from omnipipeline_operator.controller.observing import coordinators, missing, model_cache
from omnipipeline_operator.controller.observing.gpu_rivals import GpuRivals
from omnipipeline_operator.controller.observing.missing import MissingReferences, ReferenceChecker, retry_at
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.controller.reporting import StatusReporter
from omnipipeline_operator.controller.revisions import canaries, pinning, revision_history
from omnipipeline_operator.controller.revisions.plan_cache import ManifestCache, PlanCache
from omnipipeline_operator.controller.revisions.planned import Planned, rollout_goal
from omnipipeline_operator.controller.writing import ChildError, ChildWriter, DesiredState
from omnipipeline_operator.desired import config, naming, podgroups
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.kinds import PIPELINE, POD_GROUP, Manifest
from omnipipeline_operator.settings import Settings
from omnipipeline_spec import scaling
from omnipipeline_spec.scaling import Seen
from omnipipeline_spec.types.errors import SpecError

log = logging.getLogger(__name__)

SOON_S = 2.0  # until a coordinator knows the new revision, or garbage collection has deleted a predecessor's child
MISSING_CHECK_S = 3.0  # least time between two checks of a missing Secret…
MISSING_CHECK_SHARE_S = 0.1  # …times the pipelines with missing references: at most ten such requests a second
FETCHING_S = 10.0  # no watch reports how far a prefetch Job is
SCALED_EVERY_S = 2.0  # no watch reports a load
LATER_S = 60.0  # a name taken by an object that is not watched; an exception in planning


class PipelineDeleted(errors.OperatorError):
    """The resource has been deleted or is being deleted: nothing more is created for it."""


class Reconciler:
    """Reconciles pipelines, each from one snapshot before its writes and one after them."""

    def __init__(
        self,
        client: Client,
        store: Store,
        status_client: StatusClient,
        settings: Settings,
        *,
        clock: Callable[[], float],
        wake: Callable[[PipelineKey], None],
        lacking: Callable[[], Mapping[str, errors.ClusterError]] = dict,
    ) -> None:
        """lacking: optional kinds that cannot be read now, with the API server's refusal."""
        self._client = client
        self._store = store
        self._status_client = status_client
        self._settings = settings
        self._clock = clock
        self._lacking = lacking
        self._plan_cache = PlanCache()
        self._manifests = ManifestCache(settings.scrapers)
        recorder = EventRecorder(client, name=settings.lease.identity or "operator")
        self._reporter = StatusReporter(recorder, clock=clock)
        patience_s, taking_s = settings.gpu_patience_s, settings.gpu_taking_s
        self._gpu_rivals = GpuRivals(store, patience_s=patience_s, taking_s=taking_s, clock=clock, wake=wake)
        #: Replicas lately wanted of each unit, for delays, which begin anew after a restart of the operator.
        self._seen: dict[PipelineKey, Mapping[str, Seen]] = {}
        #: Pipelines that wait for missing references: the more there are, the less often each is checked.
        self._with_missing_references: set[PipelineKey] = set()

    async def reconcile(self, key: PipelineKey) -> float | None:
        """Bring the pipeline one step closer to its spec.

        Returns: seconds after which to reconcile again if nothing changes; None: not needed.
        Raises:  errors.ClusterError: a request to the API server failed; retry.
        """
        resource = self._store.pipeline(key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._plan_cache.forget(key)
            self._manifests.forget(key)
            self._seen.pop(key, None)
            self._with_missing_references.discard(key)
            return None
        owner = Owner(namespace=key[0], name=key[1], uid=resource["metadata"]["uid"])
        snapshot, applier = self._snapshot(owner), Applier(self._client, self._store, owner)
        try:
            if await adopting.adopt(self._client, snapshot, applier, lambda: self._ensure_exists(owner)):
                snapshot = self._snapshot(owner)
        except PipelineDeleted:
            return None
        try:
            planned = self._plan(resource, snapshot)
        except (SpecError, errors.NotAllowed) as error:
            reason = "NotAllowed" if isinstance(error, errors.NotAllowed) else "InvalidSpec"
            await self._reporter.refuse(resource, snapshot, applier, Refusal(reason=reason, message=str(error)))
            return None
        except Exception as error:  # a fault that no rule of the contract names: without a report nobody would see it
            log.exception("%s/%s: cannot be planned", *key)
            message = f"the operator cannot plan this spec, which is a defect of it: {type(error).__name__}: {error}"
            await self._reporter.refuse(resource, snapshot, applier, Refusal(reason="PlanningFailed", message=message))
            return LATER_S
        try:
            return await self._apply(resource, planned, snapshot, applier)
        except PipelineDeleted:
            return None

    def _snapshot(self, owner: Owner) -> Snapshot:
        return Snapshot(self._store, (owner.namespace, owner.name), owner, now=self._clock())

    # --- deciding -----------------------------------------------------------------------------------------------

    def _plan(self, resource: Manifest, snapshot: Snapshot) -> Planned:
        """Plan the spec. Raises: SpecError, errors.NotAllowed."""
        spec, plan = self._plan_cache.of(resource, pinning.rekeyed(snapshot))
        pins = pinning.pins(
            snapshot,
            snapshot.workloads,
            update=plan.current,
            coordinator=plan.coordinator.revision,
            image=spec.image,
            default_image=self._settings.stage_image,
            random_id=secrets.token_hex(5),
            asked_rotation=_asked_rotation(resource),
        )
        lacking = {kind: error.message for kind, error in self._lacking().items()}
        scheduler = "" if POD_GROUP.name in lacking else self._settings.group_scheduler
        inputs = PodFacts(
            owner=snapshot.owner,
            image=pins.image,
            control_secret=pins.control_secret,
            allow_privileged=self._settings.allow_privileged,
            default_resources=self._settings.default_resources,
            users=self._settings.pod_users,
            node_models=self._settings.node_models,
            group_scheduler=scheduler,
            grouped=workloads.grouped(snapshot.workloads, plan.current.units, wanted=bool(scheduler)),
            queue=resource["metadata"].get("labels", {}).get(naming.QUEUE_LABEL, ""),
        )
        desired = self._manifests.of(spec, plan, inputs)
        applied = tuple(each for each in desired.applied if each["kind"] not in lacking)
        desired = msgspec.structs.replace(desired, applied=applied)
        goal = rollout_goal(spec, plan)
        note = podgroups.remark(plan, self._settings.group_scheduler, lacking.get(POD_GROUP.name))
        return Planned(spec=spec, plan=plan, goal=goal, pins=pins, desired=desired, lacking=lacking, note=note)

    async def _apply(self, resource: Manifest, planned: Planned, snapshot: Snapshot, applier: Applier) -> float | None:
        observed = snapshot.workloads
        writer = ChildWriter(snapshot, applier, lambda: self._ensure_exists(snapshot.owner))
        known, before = snapshot.entries(), conditions.reported(resource.get("status", {}))
        keeps_key = canaries.holds_key(planned, before)
        is_lost = await self._secret_is_lost(planned, snapshot, observed, applier)
        if is_lost and not (keeps_key and is_available(known, observed)):
            log.warning(
                "%s/%s: Secret %s is missing: a new one is created, and all units restart",
                snapshot.owner.namespace,
                snapshot.owner.name,
                planned.pins.control_secret,
            )
            await writer.restart_units(snapshot.entries(), planned.pins, rekey=True)
            return SOON_S
        asked = _asked_rotation(resource)
        rotates = planned.spec.control.security.mode == "Curve" and asked not in (None, "", planned.pins.rotation)
        if rotates and keeps_key is None:
            log.info(
                "%s/%s: the key is rotated (%s): all units restart",
                snapshot.owner.namespace,
                snapshot.owner.name,
                asked,
            )
            await writer.restart_units(snapshot.entries(), planned.pins, rekey=True, rotation=asked)
            return SOON_S
        if planned.pins.has_mixed_images:
            log.info(
                "%s/%s: the units run different images: all units restart",
                snapshot.owner.namespace,
                snapshot.owner.name,
            )
            await writer.restart_units(snapshot.entries(), planned.pins, rekey=False)
            return SOON_S
        await writer.apply_independent(planned.desired)
        statuses = await coordinators.ask(self._status_client, snapshot)
        planned = self._scaled(planned, snapshot, before, statuses)
        asleep = planned.goal.asleep
        serving = {each.revision: each.units for each in known}.get(before.get("revision", {}).get("current", ""), {})
        planned = canaries.decide(planned, known, before, observed, statuses, now=self._clock())
        update, tried = planned.target, planned.canary
        taken_back = tried.revision if tried is not None and tried.is_away else None
        may_shrink = all(update.revision in each.revisions for each in statuses)
        decision, now = rollout.decide(planned.goal, observed, serving), self._clock()
        checker = ReferenceChecker(self._client, applier, snapshot.owner, now=now)
        missing_references = await self._missing_references(checker, planned, snapshot, observed, decision)
        gpus = self._gpu_rivals.decide(resource, planned, snapshot)
        held = missing_references.held | gpus.held
        expected = coordinators.expected_groups(planned, observed, statuses, held)
        state = DesiredState(
            desired=planned.desired,
            decision=decision,
            entries=rollout.entries(
                update,
                [each for each in known if each.revision != taken_back],
                observed,
                kept=decision.replicas if coordinators.have_complete(statuses, update, asleep) else None,
                asleep=asleep,
            ),
            pins=planned.pins,
            image=planned.pins.images.get(update.revision, planned.pins.image) if taken_back else planned.pins.image,
            canary=canaries.share(tried),
            held=held,
            waiting=nearness.waiting(planned.near, decision.replicas, observed, held),
            prefetch_held=missing_references.prefetch_held,
            aside=await coordinators.aside(self._client, snapshot, statuses),
            retried=[each for each in observed if each.refused is not None and retry_at(each, now) <= now],
            now=now,
            profiling=planned.spec.profiling,
            on_demand=expected,
            curve=planned.spec.control.security.mode == "Curve",
            may_shrink=may_shrink or planned.goal.suspended,
            lacking=planned.lacking.keys(),
            loads=coordinators.loads(statuses),
        )
        # No watch reports when coordinators have read the list.
        switches = len(state.entries) == 1 and coordinators.have_switched(statuses, update) is False
        awaits = bool(statuses) and set(expected) > set(scaling.on_demand(planned.plan))
        again = SOON_S if switches or awaits or not may_shrink else None
        runs = tried is not None and tried.runs
        if (runs or planned.plan.autoscaling) and not planned.goal.suspended:
            again = SCALED_EVERY_S
        try:
            await writer.apply(state)
        except (NameTaken, errors.Invalid, errors.Forbidden) as error:
            writer.refused.append(error)
        refusal = _refusal(writer.refused)
        taken = [each for each in writer.refused if isinstance(each, NameTaken)]
        failed = next((each for each in writer.refused if isinstance(each, errors.ClusterError)), None)
        if taken:
            again = SOON_S if any(each.temporary for each in taken) else LATER_S
        after = self._snapshot(snapshot.owner)
        claim_refusal, kept_key = writer.claim_refusal, keeps_key if is_lost or rotates else None
        fetches, fetched = await model_cache.progress(self._status_client, after, planned.desired.created)
        inputs = reporting.inputs(
            planned,
            after,
            statuses,
            refusal,
            serving,
            missing_references,
            claim_refusal,
            gpus,
            kept_key=kept_key,
            fetched=fetched,
        )
        reported, counts_again_s = await self._reporter.summarise(resource, inputs, applier)
        if failed is not None:
            raise failed
        if conditions.is_true(reported, "Ready"):
            limit = planned.goal.history
            await revision_history.record(self._client, applier, after, resource, planned.plan, limit)
        now = self._clock()
        times = [retry_at(each, now) for each in inputs.observed if each.refused is not None]
        times += filter(None, [assessment.deadline(inputs, now)])
        waits = [
            again,
            counts_again_s,
            FETCHING_S if fetches else None,
            missing_references.again_s,
            gpus.again_s,
            *(max(each - now, SOON_S) for each in times),
        ]
        return min((each for each in waits if each is not None), default=None)

    def _scaled(
        self,
        planned: Planned,
        snapshot: Snapshot,
        before: Mapping[str, Any],
        statuses: Sequence[CoordinatorStatus],
    ) -> Planned:
        """The plan with the replicas that the load asks for, where it is in charge."""
        if not planned.plan.autoscaling or planned.goal.suspended:
            return planned
        key = (snapshot.owner.namespace, snapshot.owner.name)
        reports = [{group: one.load for group, one in each.groups.items()} for each in statuses]
        seen = self._seen.get(key, {})
        decided = changes_scaling.decide(planned.plan, snapshot.workloads, before, reports, seen, now=self._clock())
        self._seen[key] = decided.seen
        return msgspec.structs.replace(planned, goal=changes_scaling.scaled(planned.goal, decided), scaling=decided)

    async def _secret_is_lost(
        self, planned: Planned, snapshot: Snapshot, observed: Sequence[Workload], applier: Applier
    ) -> bool:
        """Whether the key's Secret is missing; asked before new workloads are made, and when pods do not start."""
        if planned.spec.control.security.mode != "Curve" or planned.pins.is_new:
            return False
        existing = {(each.unit, each.revision) for each in observed}
        creates = any((each.unit, each.revision) not in existing for each in planned.desired.workloads)
        if not creates and not missing.pods_are_stuck(observed, self._clock()):
            return False
        manifest = config.secret(planned.pins.control_secret, snapshot.owner, bytes(config.KEY_BYTES))
        return await applier.secret_is_missing(manifest)

    async def _missing_references(
        self,
        checker: ReferenceChecker,
        planned: Planned,
        snapshot: Snapshot,
        observed: Sequence[Workload],
        decision: rollout.Decision,
    ) -> MissingReferences:
        """The references that keep pods from starting and are not in their status."""
        key = (snapshot.owner.namespace, snapshot.owner.name)
        every_s = max(MISSING_CHECK_S, MISSING_CHECK_SHARE_S * len(self._with_missing_references))
        job = model_cache.podless_job(snapshot, planned.desired.created)
        found = await checker.check(
            planned.desired, observed, decision.replicas, every_s=every_s, podless_job=job, lacking=planned.lacking
        )
        (self._with_missing_references.add if found.held else self._with_missing_references.discard)(key)
        return found

    async def _ensure_exists(self, owner: Owner) -> None:
        """Ask the API server whether the resource still exists. Raises: PipelineDeleted."""
        try:
            live = await self._client.get(PIPELINE, owner.namespace, owner.name)
        except errors.NotFound as error:
            self._store.drop({"kind": PIPELINE.name, "metadata": msgspec.to_builtins(owner)})
            raise PipelineDeleted(f"{owner.namespace}/{owner.name} does not exist") from error
        self._store.put({**live, "kind": PIPELINE.name})
        if live["metadata"]["uid"] != owner.uid or "deletionTimestamp" in live["metadata"]:
            raise PipelineDeleted(f"{owner.namespace}/{owner.name} is being deleted")


def _asked_rotation(resource: Manifest) -> str | None:
    """The value for which `kubectl omni rotate-key` has asked for a new key."""
    asked = resource["metadata"].get("annotations", {}).get(naming.KEY_ROTATION)
    return None if asked is None else str(asked)


def _refusal(refused: Sequence[ChildError]) -> Refusal | None:
    """The children that are not as the spec asks for: each one's error, and the reason of the first."""
    if not refused:
        return None
    messages = dict.fromkeys(str(each) if isinstance(each, NameTaken) else each.message for each in refused)
    return Refusal(reason=_reason(refused[0]), message="; ".join(messages))


def _reason(error: ChildError) -> str:
    """A quota, a policy and an invalid podTemplate make the API server refuse a child."""
    if isinstance(error, NameTaken):
        return "NameConflict"
    return "QuotaExceeded" if "exceeded quota" in error.message else "ChildRefused"
