"""One look at one pipeline: read, decide, do, report.

Here: the order of these four, and what becomes of an error. Not here: the parts themselves. Called by `lifecycle`'s
workers, one look at a time per pipeline. Nothing that was seen or done is remembered between looks.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from omnipipeline_operator import errors
from omnipipeline_operator.changes import conditions, rollout, status
from omnipipeline_operator.changes.rollout import DesiredUnit, Goal
from omnipipeline_operator.changes.status import Exposure, Facts, Refusal
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster import kinds
from omnipipeline_operator.cluster.applying import Applier, NameTaken
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.kinds import PIPELINE
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, StatusClient
from omnipipeline_operator.cluster.store import Key, Store
from omnipipeline_operator.controller import adopting, revision_history, snapshots
from omnipipeline_operator.controller.event_recorder import EventRecorder
from omnipipeline_operator.controller.missing import MissingReferences, ReferenceChecker, due_again
from omnipipeline_operator.controller.plan_cache import PlanCache
from omnipipeline_operator.controller.snapshots import Pins, Snapshot
from omnipipeline_operator.controller.writing import DesiredState, Writer
from omnipipeline_operator.desired import children, config, naming, services
from omnipipeline_operator.desired.naming import COORDINATOR, Manifest, Owner
from omnipipeline_operator.desired.pods import PodFacts
from omnipipeline_operator.settings import Settings
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.errors import SpecError
from omnipipeline_spec.types.plan import PipelinePlan

log = logging.getLogger(__name__)

SOON_S = 2.0  # a roll that waits for the coordinator, a name that garbage collection is freeing
MISSING_CHECK_S = 3.0  # between two looks for a Secret that is missing…
MISSING_CHECK_SHARE_S = 0.1  # …and for each pipeline that lacks something: at most ten such requests a second
LATER_S = 60.0  # a name that is taken: whoever holds it is not watched


class PipelineDeleted(errors.OperatorError):
    """The resource is gone or going: nothing more is made for it."""


class _Planned(msgspec.Struct, frozen=True, kw_only=True):
    spec: PipelineConfig
    plan: PipelinePlan
    goal: Goal
    pins: Pins
    desired: children.Children


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
    ) -> None:
        self._client = client
        self._store = store
        self._status_client = status_client
        self._settings = settings
        self._clock = clock
        self._plan_cache = PlanCache()
        self._event_recorder = EventRecorder(client, name=settings.lease.identity or "operator")
        #: Pipelines that wait for missing references: the more there are, the less often each is checked.
        self._with_missing_references: set[Key] = set()

    async def reconcile(self, key: Key) -> float | None:
        """Do what is to be done now; the seconds after which to look again without being told to.

        Raises: errors.ClusterError: the API server would not; later, perhaps.
        """
        resource = self._store.pipeline(key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._plan_cache.forget(key)
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
            await self._refuse(resource, snapshot, applier, Refusal(reason=reason, message=str(error)))
            return None
        try:
            return await self._act(resource, planned, snapshot, applier)
        except PipelineDeleted:
            return None

    def _snapshot(self, owner: Owner) -> Snapshot:
        return Snapshot(self._store, (owner.namespace, owner.name), owner)

    # --- deciding -----------------------------------------------------------------------------------------------

    def _plan(self, resource: Manifest, snapshot: Snapshot) -> _Planned:
        """Raises: SpecError, errors.Refused."""
        spec, plan = self._plan_cache.of(resource, snapshots.rekeyed(snapshot))
        pins = snapshots.pins(
            snapshot,
            snapshot.workloads,
            update=plan.current,
            coordinator=plan.coordinator.revision,
            image=spec.image,
            of_the_day=self._settings.stage_image,
            random_id=secrets.token_hex(5),
        )
        facts = PodFacts(
            owner=snapshot.owner,
            image=pins.image,
            control_secret=pins.control_secret,
            allow_privileged=self._settings.allow_privileged,
            default_resources=self._settings.default_resources,
        )
        desired = children.children(spec, plan, facts, scrapers=self._settings.scrapers)
        return _Planned(spec=spec, plan=plan, goal=_goal(spec, plan), pins=pins, desired=desired)

    async def _act(self, resource: Manifest, planned: _Planned, snapshot: Snapshot, applier: Applier) -> float | None:
        observed = snapshot.workloads
        writer = Writer(snapshot, applier, lambda: self._ensure_exists(snapshot.owner))
        if await self._lost_its_key(planned, snapshot, observed, applier):
            log.warning(
                "%s/%s: Secret %s is lost", snapshot.owner.namespace, snapshot.owner.name, planned.pins.control_secret
            )
            await writer.renew(snapshot.entries(), planned.pins, rekey=True)
            return SOON_S
        if planned.pins.is_mixed:
            log.info(
                "%s/%s: its units run different images: all are made anew",
                snapshot.owner.namespace,
                snapshot.owner.name,
            )
            await writer.renew(snapshot.entries(), planned.pins, rekey=False)
            return SOON_S
        coordinators = await self._coordinator_statuses(snapshot)
        known, before = snapshot.entries(), conditions.reported(resource.get("status", {}))
        serving = {each.revision: each.units for each in known}.get(before.get("revision", {}).get("current", ""), {})
        update = planned.plan.current
        may_shrink = all(update.revision in coordinator.revisions for coordinator in coordinators)
        decision, now = rollout.decide(planned.goal, observed, serving), self._clock()
        checker = ReferenceChecker(self._client, applier, snapshot.owner, now=now)
        missing = await self._missing_references(checker, planned, snapshot, observed, decision)
        state = DesiredState(
            desired=planned.desired,
            decision=decision,
            entries=rollout.entries(update, known, observed),
            pins=planned.pins,
            held=missing.held,
            prefetch_held=missing.prefetch_held,
            aside=await self._aside(snapshot, coordinators),
            retried=[each for each in observed if each.refused is not None and due_again(each, now) <= now],
            now=now,
            curve=planned.spec.control.security.mode == "Curve",
            may_shrink=may_shrink or planned.goal.suspended,
            loads={host: load for coordinator in coordinators for host, load in coordinator.loads().items()},
        )
        refusal, again, failed = None, None if may_shrink else SOON_S, None
        try:
            await writer.apply(state)
        except NameTaken as error:
            refusal = Refusal(reason="NameConflict", message=str(error))
            again = SOON_S if error.temporary else LATER_S
        except (errors.Invalid, errors.Forbidden) as error:
            refusal, failed = _refused_child(error), error
        after = self._snapshot(snapshot.owner)
        facts = self._facts(planned, after, coordinators, refusal, serving, missing)
        reported = await self._summarise(resource, facts, applier)
        if failed is not None:
            raise failed
        if conditions.is_true(reported, "Ready"):
            await revision_history.record(self._client, after, resource, planned.plan, planned.goal.history)
        now = self._clock()
        times = [due_again(each, now) for each in facts.observed if each.refused is not None]
        times += filter(None, [status.deadline(facts, now)])
        waits = [again, missing.again_s, *(max(each - now, SOON_S) for each in times)]
        return min((each for each in waits if each is not None), default=None)

    def _facts(
        self,
        planned: _Planned,
        snapshot: Snapshot,
        coordinators: Sequence[CoordinatorStatus],
        refusal: Refusal | None,
        serving: Mapping[str, str],
        missing: MissingReferences,
    ) -> Facts:
        """What the status is made of. ``snapshot``: taken after the writes."""
        observed = [
            msgspec.structs.replace(each, refused=missing.refused.get(each.name, each.refused))
            if each.refused is not None
            else each
            for each in snapshot.workloads
        ]
        registered: dict[tuple[str, str], int] | None = None
        for coordinator in coordinators:  # in a roll two answer; a stage registers with both
            counts = coordinator.registered()
            registered = {
                unit: max(counts.get(unit, 0), (registered or {}).get(unit, 0))
                for unit in {*counts, *(registered or {})}
            }
        return Facts(
            plan=planned.plan,
            goal=planned.goal,
            decision=rollout.decide(planned.goal, observed, serving),
            observed=observed,
            entries=snapshot.entries(),
            exposure=_exposure(planned.spec, snapshot),
            registered=registered,
            refusal=refusal,
            progress_deadline_s=float(planned.spec.rollout.progress_deadline_seconds),
            missing=missing.diagnostics,
            image=planned.pins.image,
            images=planned.pins.images,
            fetching=snapshots.fetching(snapshot, planned.desired.created, planned.spec.model_path or ""),
            note=snapshots.shared_claim(snapshot, planned.desired.created, sum(planned.plan.replicas.values())),
        )

    async def _lost_its_key(
        self, planned: _Planned, snapshot: Snapshot, observed: Sequence[Workload], applier: Applier
    ) -> bool:
        """Asked before pods of a new revision are made, and when pods hang: without their Secret they never start."""
        if planned.spec.control.security.mode != "Curve" or planned.pins.is_new:
            return False
        existing = {(each.unit, each.revision) for each in observed}
        makes = any((each.unit, each.revision) not in existing for each in planned.desired.workloads)
        if not makes and not snapshots.hangs(observed, self._clock()):
            return False
        manifest = config.secret(planned.pins.control_secret, snapshot.owner, bytes(config.KEY_BYTES))
        return await applier.secret_is_missing(manifest)

    async def _missing_references(
        self,
        checker: ReferenceChecker,
        planned: _Planned,
        snapshot: Snapshot,
        observed: Sequence[Workload],
        decision: rollout.Decision,
    ) -> MissingReferences:
        """What keeps pods from starting that no status of theirs says."""
        key = (snapshot.owner.namespace, snapshot.owner.name)
        every_s = max(MISSING_CHECK_S, MISSING_CHECK_SHARE_S * len(self._with_missing_references))
        found = await checker.check(planned.desired, observed, decision.replicas, every_s=every_s)
        (self._with_missing_references.add if found.held else self._with_missing_references.discard)(key)
        return found

    async def _aside(self, snapshot: Snapshot, coordinators: Sequence[CoordinatorStatus]) -> list[str]:
        """Addresses of registered pods that bear the labels of another unit now, or none of ours.

        What a coordinator knows and our watch does not may be new: the API server is asked before it is believed.
        """
        known = snapshot.addresses()
        strange = {
            each
            for coordinator in coordinators
            for each in coordinator.instances
            if (each.unit, each.revision, each.host) not in known
        }
        aside = set()
        for each in strange:
            if each.host in aside:
                continue
            desired = naming.selector(snapshot.owner.name, each.unit, each.revision).items()
            pods = [one["metadata"] for one in await self._client.pods_at(snapshot.owner.namespace, each.host)]
            if pods and not any(desired <= one.get("labels", {}).items() for one in pods):
                aside.add(each.host)
        return sorted(aside)

    async def _coordinator_statuses(self, snapshot: Snapshot) -> list[CoordinatorStatus]:
        """All coordinators that are ready."""
        coordinators = [each for each in snapshot.workloads if each.unit == COORDINATOR]
        ready = [pod.ip for each in coordinators for pod in each.pods if pod.ready and not pod.terminating and pod.ip]
        return await self._status_client.ask(ready)

    async def _ensure_exists(self, owner: Owner) -> None:
        """Raises: Vanished."""
        try:
            live = await self._client.get(PIPELINE, owner.namespace, owner.name)
        except errors.NotFound as error:
            self._store.drop({"kind": PIPELINE.name, "metadata": msgspec.to_builtins(owner)})
            raise PipelineDeleted(f"{owner.namespace}/{owner.name} is gone") from error
        self._store.put({**live, "kind": PIPELINE.name})
        if live["metadata"]["uid"] != owner.uid or "deletionTimestamp" in live["metadata"]:
            raise PipelineDeleted(f"{owner.namespace}/{owner.name} is going")

    # --- reporting ----------------------------------------------------------------------------------------------

    async def _summarise(self, resource: Manifest, facts: Facts, applier: Applier) -> Manifest:
        """The status that holds now."""
        before, generation = conditions.reported(resource.get("status", {})), resource["metadata"]["generation"]
        now, reported = status.summarise(facts, before, generation=generation, now=self._clock())
        await self._write(resource, now, reported, applier)
        return now

    async def _refuse(self, resource: Manifest, snapshot: Snapshot, applier: Applier, refusal: Refusal) -> None:
        """What runs is left alone."""
        before, generation = conditions.reported(resource.get("status", {})), resource["metadata"]["generation"]
        available = status.is_available(snapshot.entries(), snapshot.workloads)
        now, reported = status.refused(refusal, before, generation=generation, available=available, now=self._clock())
        await self._write(resource, now, reported, applier)

    async def _write(
        self, resource: Manifest, now: dict[str, Any], reported: Sequence[conditions.Condition], applier: Applier
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
            return  # deleted meanwhile, or made anew: its own event is on the way
        transitions = conditions.transitions(reported, before.get("conditions", ()))
        await self._event_recorder.report(owner, transitions)


def _refused_child(error: errors.ClusterError) -> Refusal:
    """The API server will not have an object as the spec makes it: a quota, a policy, a podTemplate that is none."""
    reason = "QuotaExceeded" if "exceeded quota" in error.message else "ChildRefused"
    return Refusal(reason=reason, message=error.message)


def _goal(spec: PipelineConfig, plan: PipelinePlan) -> Goal:
    units = {unit.name: DesiredUnit(revision=unit.revision, replicas=plan.replicas[unit.name]) for unit in plan.units}
    return Goal(
        units=units,
        coordinator=DesiredUnit(revision=plan.coordinator.revision, replicas=1),
        strategy=spec.rollout.strategy,
        max_surge=spec.rollout.max_surge,
        paused=spec.rollout.paused,
        suspended=spec.suspend,
        history=spec.rollout.revision_history_limit,
    )


def _exposure(spec: PipelineConfig, snapshot: Snapshot) -> Exposure:
    url = services.url(spec, snapshot.owner)
    ingress = snapshot.child(kinds.INGRESS, snapshot.owner.name)
    if spec.expose.ingress is not None and ingress is not None:
        scheme = "https" if spec.expose.ingress.tls_secret_name else "http"
        address = _address(ingress)
        if address is None:  # no controller has taken it: a host alone leads nowhere
            return Exposure(url=url, pending=f"Ingress {ingress['metadata']['name']} has no address yet")
        return Exposure(url=url, external=f"{scheme}://{spec.expose.ingress.host or address}")
    service = snapshot.child(kinds.SERVICE, naming.service(snapshot.owner.name))
    if spec.expose.service.type == "LoadBalancer":
        host = _address(service or {})
        pending = None if host else "the load balancer has no address yet"
        return Exposure(url=url, external=f"http://{host}:{services.port_of(spec)}" if host else None, pending=pending)
    return Exposure(url=url)


def _address(manifest: Mapping[str, Any]) -> str | None:
    """What an Ingress or a Service of type LoadBalancer was given."""
    given = manifest.get("status", {}).get("loadBalancer", {}).get("ingress", [])
    return next((each.get("hostname") or each.get("ip") for each in given), None)
