"""Writes the desired state of one pipeline, in an order that can be interrupted anywhere.

Here: the order of writes. Not here: what to write (`desired`, `changes`), how a write is safe (`cluster.applying`).
Called by `reconciling`. The order: Services and policies, what else pods need before they start (key, plans,
revisions), then Deployments, then deletions. Interrupted after any write and started again, it ends in the same state.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.changes import comparing
from omnipipeline_operator.changes.deciding.rollout import Decision, UnitRevision
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster.applying import Applier, NameTaken
from omnipipeline_operator.controller.observing import model_cache
from omnipipeline_operator.controller.observing.contests import Contests
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.controller.revisions.pinning import PinnedChoices
from omnipipeline_operator.desired import children, config, naming
from omnipipeline_operator.kinds import CONFIG_MAP, DEPLOYMENT, JOB, Manifest
from omnipipeline_spec.cluster import Profiling
from omnipipeline_spec.types.plan import CanaryShare, PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
MAX_COST = 2**31 - 1

#: NotFound: the kind itself, whose CRD was removed a moment ago.
ChildError = NameTaken | errors.Invalid | errors.Forbidden | errors.NotFound
REFUSED: Final = (NameTaken, errors.Invalid, errors.Forbidden, errors.NotFound)


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the writes should lead to."""

    desired: children.Children
    decision: Decision
    entries: Sequence[PipelineRevision]
    pins: PinnedChoices
    held: frozenset[UnitRevision]  #: Unit revisions with missing references: their Deployments get no pods yet.
    waiting: frozenset[UnitRevision] = frozenset()  #: They get no more pods until others that they are near have nodes.
    prefetch_held: bool = False
    aside: Sequence[str] = ()  #: Addresses of pods that were taken out of their unit: they get no more requests.
    retried: Sequence[Workload] = ()  #: Workloads whose refused pods are due for a retry.
    profiling: Profiling = Profiling()
    canary: CanaryShare | None = None  #: The share of the requests that a revision gets.
    image: str  #: The image of the newest of ``entries``.
    on_demand: Sequence[str] = ()  #: Groups that requests wait for, however long they have had no instance.
    curve: bool
    now: float
    may_shrink: bool  #: Whether all coordinators know the new revision, so that old pods may be removed.
    lacking: Collection[str] = ()  #: Kinds that cannot be written in this cluster.
    loads: Mapping[str, int]  #: Address of a pod -> requests bound, waiting and running there.


class ChildWriter:
    """Writes for one pipeline, decided from one snapshot."""

    def __init__(
        self,
        snapshot: Snapshot,
        applier: Applier,
        ensure_exists: Callable[[], Awaitable[None]],
        contests: Contests,
    ) -> None:
        self._snapshot = snapshot
        self._contests = contests
        self._apply = applier
        self.claim_refusal: str | None = None  #: Why the model cache's claim cannot grow.
        self.refused: list[ChildError] = []  #: Errors of children that were not written; all others were.
        self._ensure_exists = ensure_exists  #: Called before the first creation; raises when the resource is deleted.
        self._exists = False

    async def apply_independent(self, desired: children.Children) -> None:
        """Write the children that follow from the spec alone: they wait for no coordinator that does not answer.

        A child that is refused stops no other one: see `refused`. Raises: errors.ClusterError.
        """
        for manifest in desired.applied:
            await self._attempt(self._ensure(manifest))

    async def apply(self, state: DesiredState) -> None:
        """Write what else differs from the snapshot. A child that is refused stops no other one: see `refused`.

        Raises: NameTaken, errors.ClusterError: also when what all pods need is refused.
        """
        revisions = await self._write_revisions(state)
        if state.curve and state.pins.is_new and any(self._is_created(state, each) for each in state.decision.replicas):
            await self._create_key(state.pins)
        await self._create_missing(
            [each for each in state.desired.created if each["kind"] != JOB.name or not state.prefetch_held]
        )
        await self._workloads(state, config.digest(revisions))
        for each in state.retried:
            await self._attempt(self._apply.annotate_deployment(each.name, {naming.RETRIED_AT: str(int(state.now))}))
        await self._refresh_coordinators(revisions)
        await self._delete_undesired([*state.desired.applied, *state.desired.created])
        await self._delete_retired(state.decision.retired, state.desired)

    async def _attempt(self, writing: Awaitable[object]) -> None:
        """Write or delete one child; remember a refusal."""
        try:
            await writing
        except REFUSED as error:
            self.refused.append(error)

    # --- what pods need -----------------------------------------------------------------------------------------

    async def _write_revisions(self, state: DesiredState) -> Manifest:
        pins = state.pins
        manifest = config.revisions(
            state.entries,
            self._snapshot.owner,
            image=state.image,
            images=pins.images,
            control_secret=pins.control_secret,
            rekeyed=pins.rekeyed,
            rotation=pins.rotation,
            canary=state.canary,
            has_canary=state.canary is not None or config.has_canary(self._snapshot.revisions()),
            aside=state.aside if state.aside or config.has_aside(self._snapshot.revisions()) else None,
            profiling=state.profiling if self._profiling_changed(state.profiling) else None,
            on_demand=state.on_demand if state.on_demand or config.has_on_demand(self._snapshot.revisions()) else None,
        )
        return await self._ensure(manifest)

    def _profiling_changed(self, profiling: Profiling) -> bool:
        """Whether the list must hold it: it is not the default, or the list holds another one."""
        changed = profiling != Profiling(storage=profiling.storage)
        return changed or config.has_profiling(self._snapshot.revisions())

    async def restart_units(
        self, entries: Sequence[PipelineRevision], pins: PinnedChoices, *, rekey: bool, rotation: str | None = None
    ) -> None:
        """Pin a new id, so that the next reconcile plans new revisions of all units.

        rekey: with a new Secret. rotation: what it was asked for by; None: as before.
        """
        occasion = secrets.token_hex(5)
        named = naming.control_secret(self._snapshot.owner.name, occasion) if rekey else pins.control_secret
        await self._ensure(
            config.revisions(
                entries,
                self._snapshot.owner,
                image=pins.image,
                images=pins.images,
                control_secret=named,
                rekeyed=occasion,
                rotation=rotation or pins.rotation,
            )
        )

    async def _create_key(self, pins: PinnedChoices) -> None:
        """Create the key's Secret, whose name the revisions ConfigMap has already: a restart creates no second one."""
        await self._before_creating()
        key = secrets.token_bytes(config.KEY_BYTES)
        await self._apply.create_secret(config.secret(pins.control_secret, self._snapshot.owner, key))

    async def _create_missing(self, manifests: Sequence[Manifest]) -> None:
        for manifest in manifests:
            kind, name = kinds.of(manifest), manifest["metadata"]["name"]
            live = self._snapshot.claim(name) if kind is kinds.CLAIM else self._snapshot.child(kind, name)
            if live is not None and kind is JOB and model_cache.is_outdated(manifest, live):
                await self._apply.delete(live)  # its pods go with it; a download goes on where it was
                live = None
            if live is None:
                await self._attempt(self._create(manifest))
            elif kind is kinds.CLAIM and model_cache.must_grow(manifest, live):
                self.claim_refusal = await self._apply.grow_claim(live, model_cache.requested(manifest))

    async def _ensure(self, manifest: Manifest) -> Manifest:
        """Create or update a child; fields that others added stay. Returns the live child."""
        manifest = comparing.stamped(manifest)
        live = self._snapshot.child(kinds.of(manifest), manifest["metadata"]["name"])
        if live is None:
            return await self._create(manifest)
        owner = self._snapshot.owner
        pipeline = (owner.namespace, owner.name)
        if comparing.matches(manifest, live) or not self._contests.may_correct(pipeline, manifest):
            return live
        updated = await self._apply.update(manifest, live)
        self._contests.corrected(pipeline, manifest)
        return updated

    # --- Deployments --------------------------------------------------------------------------------------------

    async def _workloads(self, state: DesiredState, digest: str) -> None:
        by_key = {(each.unit, each.revision): each for each in state.desired.workloads}
        for (unit, revision), decided in state.decision.replicas.items():
            desired, live = by_key.get((unit, revision)), self._deployment((unit, revision))
            replicas = 0 if (unit, revision) in state.held else decided
            if live is None and not self._is_created(state, (unit, revision)):
                continue
            if live is not None and (unit, revision) in state.waiting:
                replicas = min(replicas, live["spec"].get("replicas", 1))
            if desired is not None and desired.devices is not None and desired.devices["kind"] not in state.lacking:
                await self._attempt(self._devices(desired.devices))
            if desired is not None and live is not None and replicas and await self._is_outdated(desired, live):
                await self._apply.delete(live)
                await self._attempt(self._create_workload(desired, replicas, digest))
            elif desired is not None and live is None:
                await self._attempt(self._create_workload(desired, replicas, digest))
            elif desired is not None and live is not None:
                await self._attempt(self._workload(desired, live, replicas, state.loads))
            elif live is not None:
                await self._attempt(self._scale(live, replicas, state))

    def _deployment(self, key: UnitRevision) -> Manifest | None:
        return self._snapshot.child(DEPLOYMENT, naming.unit(self._snapshot.owner.name, *key))

    def _is_created(self, state: DesiredState, key: UnitRevision) -> bool:
        """Whether the Deployment of this unit revision is missing and waits for nothing."""
        if key in state.held or key in state.waiting or self._deployment(key) is not None:
            return False
        return key[0] == COORDINATOR or not self._prefetching(state.desired.created)

    async def _is_outdated(self, desired: children.DesiredWorkload, live: Manifest) -> bool:
        """Whether a Deployment that has no running pods, or only ones that end, would be created otherwise now.

        It may have been edited by hand, or created with another image. Pods that end are not waited for: scaled up
        meanwhile, the Deployment would run what was edited.
        """
        observed = next((each for each in self._snapshot.workloads if each.name == live["metadata"]["name"]), None)
        if observed is None:
            return True  # somebody made it anew with another selector, which cannot be edited
        if observed.serves:
            return False
        if observed.image != desired.deployment["metadata"]["annotations"][naming.IMAGE_PIN]:
            return True
        if observed.replicas:
            return False
        return observed.drifted or not await self._apply.has_template(desired.deployment, live)

    async def _create_workload(self, desired: children.DesiredWorkload, replicas: int, digest: str) -> None:
        """Create a Deployment of the plan; one that existed after all keeps its replicas for the next reconcile.

        digest: of the list that its pods mount when they start. The coordinator's template has it, so that no pod is
        annotated before the list changes: two writes fewer for each pipeline.
        """
        await self._plan(desired.plan)
        spec = {"replicas": replicas, **desired.deployment["spec"]}
        if desired.unit == COORDINATOR:
            metadata = spec["template"]["metadata"]
            annotations = {**metadata.get("annotations", {}), naming.REVISIONS_DIGEST: digest}
            spec["template"] = {**spec["template"], "metadata": {**metadata, "annotations": annotations}}
        await self._create_once({**desired.deployment, "spec": spec})

    async def _workload(
        self, desired: children.DesiredWorkload, live: Manifest, replicas: int, loads: Mapping[str, int]
    ) -> None:
        """Write the replicas and labels of a live Deployment; its template was written when it was created."""
        await self._plan(desired.plan)
        head = desired.deployment["metadata"]
        same_head = comparing.matches({"labels": head["labels"]}, live["metadata"])
        if live["spec"].get("replicas") != replicas or not same_head:
            await self._set_deletion_costs(live, replicas, loads)
            await self._apply.scale(desired.deployment, live, replicas)

    async def _plan(self, manifest: Manifest) -> None:
        """Write a plan; the text of inline code may change while its revision stays."""
        live = self._snapshot.child(CONFIG_MAP, manifest["metadata"]["name"])
        if manifest.get("immutable"):
            if live is None:
                await self._create_once(manifest)
        elif live is None:
            await self._create_once(comparing.stamped(manifest))
        elif live.get("data") != config.digests(manifest["data"]):
            await self._apply.update(comparing.stamped(manifest), live)

    async def _devices(self, manifest: Manifest) -> None:
        """Write the template of a unit's claims; it cannot be edited."""
        if self._snapshot.child(kinds.DEVICES, manifest["metadata"]["name"]) is None:
            await self._create_once(comparing.stamped(manifest))

    async def _scale(self, live: Manifest, replicas: int, state: DesiredState) -> None:
        """Write the replicas of an old Deployment."""
        has = live["spec"].get("replicas", 1)
        if replicas == has or (replicas < has and not state.may_shrink):
            return
        await self._set_deletion_costs(live, replicas, state.loads)
        labels = live["spec"]["selector"]["matchLabels"]
        head = naming.child(
            kinds.DEPLOYMENT,
            live["metadata"]["name"],
            self._snapshot.owner,
            of=naming.labels(labels[naming.PIPELINE_LABEL], labels[naming.UNIT_LABEL], labels[naming.REVISION_LABEL]),
        )
        await self._apply.scale(head, live, replicas)

    async def _set_deletion_costs(self, deployment: Manifest, replicas: int, loads: Mapping[str, int]) -> None:
        """Has the least loaded pods removed first. Called before a Deployment is scaled down."""
        if not loads or not 0 < replicas < deployment["spec"].get("replicas", 1):
            return
        revision = deployment["spec"]["selector"]["matchLabels"][naming.REVISION_LABEL]
        for pod in self._snapshot.pods(deployment["spec"]["selector"]["matchLabels"][naming.UNIT_LABEL]):
            metadata, address = pod["metadata"], pod.get("status", {}).get("podIP")
            if metadata["labels"].get(naming.REVISION_LABEL) != revision or "deletionTimestamp" in metadata:
                continue
            cost = str(min(loads.get(address or "", 0), MAX_COST))
            if metadata.get("annotations", {}).get(DELETION_COST, "0") != cost:
                await self._apply.annotate_pod(metadata["name"], {DELETION_COST: cost})

    async def _refresh_coordinators(self, revisions: Manifest) -> None:
        """Annotate the coordinators' pods: the kubelet then updates the mounted list at once, not within a minute."""
        digest = config.digest(revisions)
        for pod in self._snapshot.pods(COORDINATOR):
            metadata = pod["metadata"]
            running = pod.get("status", {}).get("podIP") and "deletionTimestamp" not in metadata
            if running and metadata.get("annotations", {}).get(naming.REVISIONS_DIGEST) != digest:
                await self._attempt(self._apply.annotate_pod(metadata["name"], {naming.REVISIONS_DIGEST: digest}))

    def _prefetching(self, created: Sequence[Manifest]) -> bool:
        """Whether units must wait for the Job that fetches the model."""
        for manifest in created:
            if manifest["kind"] == JOB.name:
                live = self._snapshot.child(JOB, manifest["metadata"]["name"])
                return live is None or not live.get("status", {}).get("succeeded")
        return False

    # --- deletions ----------------------------------------------------------------------------------------------

    async def _delete_undesired(self, desired: Sequence[Manifest]) -> None:
        names = {(kinds.key_of(each), each["metadata"]["name"]) for each in desired}
        for kind in (*kinds.APPLIED, JOB):  # a claim stays: the next pipeline can use the fetched model
            for live in self._snapshot.children(kind):
                if (kind.key, live["metadata"]["name"]) not in names:
                    await self._attempt(self._apply.delete(live))

    async def _delete_retired(self, retired: Sequence[Workload], desired: children.Children) -> None:
        for each in retired:
            live = self._snapshot.child(DEPLOYMENT, each.name)
            if live is not None:
                await self._attempt(self._apply.delete(live))
        kept = {each["metadata"]["name"] for each in self._snapshot.children(DEPLOYMENT)}
        kept -= {each.name for each in retired}
        kept |= {each.deployment["metadata"]["name"] for each in desired.workloads}
        for kind, suffix in ((CONFIG_MAP, "-plan"), (kinds.DEVICES, "-gpus")):
            for live in self._snapshot.children(kind):
                metadata = live["metadata"]
                if naming.REVISION_LABEL in metadata["labels"] and metadata["name"].removesuffix(suffix) not in kept:
                    await self._attempt(self._apply.delete(live))

    # --- creating -----------------------------------------------------------------------------------------------

    async def _create(self, manifest: Manifest) -> Manifest:
        await self._before_creating()
        return await self._apply.create(manifest)

    async def _create_once(self, manifest: Manifest) -> Manifest:
        await self._before_creating()
        return await self._apply.create_once(manifest)

    async def _before_creating(self) -> None:
        """Check once that the resource exists: the watch may not have reported its deletion yet."""
        if not self._exists:
            await self._ensure_exists()
            self._exists = True
