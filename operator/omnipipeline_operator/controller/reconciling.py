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

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.changes import conditions, workloads
from omnipipeline_operator.changes.deciding import rollout
from omnipipeline_operator.changes.deciding import scaling as changes_scaling
from omnipipeline_operator.changes.reporting import assessment
from omnipipeline_operator.changes.reporting.status_inputs import Refusal
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster.applying import Applier, NameTaken
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, StatusClient
from omnipipeline_operator.cluster.store import PipelineKey, Store
from omnipipeline_operator.controller import adopting, findings, reporting
from omnipipeline_operator.controller.event_recorder import EventRecorder
from omnipipeline_operator.controller.findings import Findings
from omnipipeline_operator.controller.observing import coordinators, model_cache
from omnipipeline_operator.controller.observing.contests import Contests
from omnipipeline_operator.controller.observing.gpu_rivals import GpuRivals
from omnipipeline_operator.controller.observing.missing import MissingReferences, ReferenceChecker, retry_at
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.controller.reporting import StatusReporter
from omnipipeline_operator.controller.revisions import canaries, pinning, restarts, revision_history
from omnipipeline_operator.controller.revisions.plan_cache import ManifestCache, PlanCache
from omnipipeline_operator.controller.revisions.planned import Planned, rollout_goal
from omnipipeline_operator.controller.revisions.restarts import KeyChange
from omnipipeline_operator.controller.writing import REFUSED, ChildError, ChildWriter, DesiredState
from omnipipeline_operator.desired import naming, podgroups
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.kinds import PIPELINE, Manifest
from omnipipeline_operator.settings import Settings
from omnipipeline_spec.scaling import Seen
from omnipipeline_spec.types.errors import InvalidPipeline, SpecError

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
        self._contests = Contests(clock)
        self._silence = coordinators.Silence()
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
            self._contests.forget(key)
            self._silence.forget(key)
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
            await self._reporter.refuse(resource, snapshot, applier, Refusal(reason=reason, message=_faults(error)))
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
            asked_rotation=restarts.asked_rotation(resource),
        )
        lacking = {kind: error.message for kind, error in self._lacking().items()}
        queue = resource["metadata"].get("labels", {}).get(naming.QUEUE_LABEL, "")
        scheduler = self._settings.group_scheduler
        kind = podgroups.chosen(scheduler, lacking, queue)
        members = podgroups.members(plan)
        grouped = workloads.grouped(snapshot.workloads, plan.current.units, members, wanted=kind)
        inputs = PodFacts(
            owner=snapshot.owner,
            image=pins.image,
            control_secret=pins.control_secret,
            allow_privileged=self._settings.allow_privileged,
            default_resources=self._settings.default_resources,
            users=self._settings.pod_users,
            node_models=self._settings.node_models,
            groups=podgroups.Groups(kind=kind, scheduler=scheduler, grouped=grouped),
            queue=queue,
        )
        desired = self._manifests.of(spec, plan, inputs)
        applied = tuple(each for each in desired.applied if kinds.key_of(each) not in lacking)
        desired = msgspec.structs.replace(desired, applied=applied)
        goal = rollout_goal(spec, plan)
        note = podgroups.remark(plan, scheduler, lacking)
        return Planned(spec=spec, plan=plan, goal=goal, pins=pins, desired=desired, lacking=lacking, note=note)

    # --- writing and reporting ----------------------------------------------------------------------------------

    async def _apply(self, resource: Manifest, planned: Planned, snapshot: Snapshot, applier: Applier) -> float | None:
        """Restart all units, if that is due; else write what differs, and report."""
        writer = ChildWriter(snapshot, applier, lambda: self._ensure_exists(snapshot.owner), self._contests)
        before = conditions.reported(resource.get("status", {}))
        key = await restarts.key_change(resource, planned, snapshot, before, applier, now=self._clock())
        restart = restarts.due(planned, snapshot, key)
        if restart is not None:
            log.log(restart.level, "%s/%s: %s", snapshot.owner.namespace, snapshot.owner.name, restart.message)
            rekey, rotation = restart.rekey, restart.rotation
            await writer.restart_units(snapshot.entries(), planned.pins, rekey=rekey, rotation=rotation)
            return SOON_S
        await writer.apply_independent(planned.desired)
        found = await self._findings(resource, planned, snapshot, before, applier)
        state = findings.desired_state(found, await coordinators.aside(self._client, snapshot, found.statuses))
        try:
            await writer.apply(state)
        except REFUSED as error:
            writer.refused.append(error)
        return _soonest(
            _again_s(found, state, writer.refused), await self._report(resource, found, writer, key, applier)
        )

    async def _findings(
        self, resource: Manifest, planned: Planned, snapshot: Snapshot, before: Mapping[str, Any], applier: Applier
    ) -> Findings:
        """Ask the coordinators, and decide what to write. before: the status, as it was reported last."""
        statuses = await coordinators.ask(self._status_client, snapshot)
        known, observed = snapshot.entries(), snapshot.workloads
        planned = self._scaled(planned, snapshot, before, statuses)
        planned = canaries.decide(planned, known, before, observed, statuses, now=self._clock())
        serving = {each.revision: each.units for each in known}.get(before.get("revision", {}).get("current", ""), {})
        decision, now = rollout.decide(planned.goal, observed, serving), self._clock()
        checker = ReferenceChecker(self._client, applier, snapshot.owner, now=now)
        return Findings(
            planned=planned,
            snapshot=snapshot,
            statuses=statuses,
            serving=serving,
            decision=decision,
            missing=await self._missing_references(checker, planned, snapshot, observed, decision),
            gpus=self._gpu_rivals.decide(resource, planned, snapshot),
            now=now,
        )

    async def _report(
        self, resource: Manifest, found: Findings, writer: ChildWriter, key: KeyChange, applier: Applier
    ) -> float | None:
        """Write the status of what is there after the writes.

        Returns: seconds until something in it changes without a watch that reports it.
        Raises:  errors.ClusterError: a child was refused; its status is written.
        """
        planned, after = found.planned, self._snapshot(found.snapshot.owner)
        pipeline = (after.owner.namespace, after.owner.name)
        fetches, fetched = await model_cache.progress(self._status_client, after, planned.desired.created)
        silent = self._silence.remark(found.snapshot, planned, found.statuses, now=found.now)
        inputs = reporting.inputs(
            found,
            after,
            refusal=_refusal(writer.refused),
            claim_refusal=writer.claim_refusal,
            kept_key=key.kept,
            remarks=(self._contests.remark(pipeline), silent),
            fetched=fetched,
        )
        reported, counts_again_s = await self._reporter.summarise(resource, inputs, applier)
        failed = next((each for each in writer.refused if isinstance(each, errors.ClusterError)), None)
        if failed is not None:
            raise failed
        if conditions.is_true(reported, "Ready"):
            limit = planned.goal.history
            await revision_history.record(self._client, applier, after, resource, planned.plan, limit)
        now = self._clock()
        times = [retry_at(each, now) for each in inputs.observed if each.refused is not None]
        times += filter(None, [assessment.deadline(inputs, now)])
        return _soonest(
            counts_again_s,
            FETCHING_S if fetches else None,
            found.missing.again_s,
            found.gpus.again_s,
            self._contests.again_s(pipeline),
            *(max(each - now, SOON_S) for each in times),
        )

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


def _again_s(found: Findings, state: DesiredState, refused: Sequence[ChildError]) -> float | None:
    """Seconds until the writes may lead further without a watch that reports it."""
    planned, tried = found.planned, found.planned.canary
    taken = [each for each in refused if isinstance(each, NameTaken)]
    if taken:
        return SOON_S if any(each.temporary for each in taken) else LATER_S
    runs = tried is not None and tried.runs
    if (runs or planned.plan.autoscaling) and not planned.goal.suspended:
        return SCALED_EVERY_S
    return SOON_S if findings.awaits_coordinators(found, state) else None


def _faults(error: SpecError | errors.NotAllowed) -> str:
    """All faults in one line: `kubectl get -o wide` and lists of Events show the first one alone."""
    return "; ".join(map(str, error.faults)) if isinstance(error, InvalidPipeline) else str(error)


def _soonest(*waits_s: float | None) -> float | None:
    return min((each for each in waits_s if each is not None), default=None)


def _refusal(refused: Sequence[ChildError]) -> Refusal | None:
    """The children that are not as the spec asks for: each one's error, and the reason of the first."""
    if not refused:
        return None
    messages = dict.fromkeys(_told(each) for each in refused)
    return Refusal(reason=_reason(refused[0]), message="; ".join(messages))


def _told(error: ChildError) -> str:
    """The message names the child; that of a kind which is gone does not."""
    return str(error) if isinstance(error, NameTaken | errors.NotFound) else error.message


def _reason(error: ChildError) -> str:
    """A quota, a policy and an invalid podTemplate make the API server refuse a child."""
    if isinstance(error, NameTaken):
        return "NameConflict"
    return "QuotaExceeded" if "exceeded quota" in error.message else "ChildRefused"
