"""Carrying out what was decided for one pipeline, in an order that is safe to break off anywhere.

Here: the order of writes. Not here: what to write (`desired`, `changes`), how a write is safe (`cluster.applying`).
Called by `reconciling`. The order: what pods need before they start (key, plans, revisions, Services, policies), then
Deployments, then what nobody needs any more. Broken off after any write and begun anew, it ends in the same state.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from omnipipeline_operator.changes import comparing
from omnipipeline_operator.changes.observed import Workload
from omnipipeline_operator.changes.rollout import Decision, Key
from omnipipeline_operator.cluster import kinds
from omnipipeline_operator.cluster.applying import Applier
from omnipipeline_operator.cluster.kinds import CONFIG_MAP, DEPLOYMENT, JOB
from omnipipeline_operator.desired import children as desired
from omnipipeline_operator.desired import config, naming
from omnipipeline_operator.desired.naming import COORDINATOR, Manifest
from omnipipeline_operator.handlers.looking import Look, Pins
from omnipipeline_spec.plan import PipelineRevision

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
MAX_COST = 2**31 - 1


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is to be so."""

    wanted: desired.Children
    decision: Decision
    entries: Sequence[PipelineRevision]
    pins: Pins
    held: frozenset[Key]  #: Unit revisions whose pods could not start: they name what is not there.
    prefetch_held: bool = False
    aside: Sequence[str] = ()  #: Addresses of pods that were taken out of their unit: nothing is bound to them.
    retried: Sequence[Workload] = ()  #: Their pods are refused, and it is time to try again.
    curve: bool
    now: float
    may_shrink: bool  #: Whether the coordinator knows the new revision, so that old pods may go.
    loads: Mapping[str, int]  #: Address of a pod -> how much it has to do.


class Writer:
    """Writes for one pipeline, during one look at it."""

    def __init__(self, look: Look, applier: Applier, still_there: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._apply = applier
        self._still_there = still_there  #: Asked before anything is made; raises when the resource is gone.
        self._asked = False

    async def carry_out(self, order: Order) -> None:
        """Make it so. Raises: NameTaken, errors.ClusterError."""
        await self._revisions(order)
        if order.curve and order.pins.is_new:
            await self._key(order.pins)
        await self._created(
            [each for each in order.wanted.created if each["kind"] != JOB.name or not order.prefetch_held]
        )
        for manifest in order.wanted.applied:
            await self._keep(manifest)
        await self._workloads(order)
        for each in order.retried:
            await self._apply.annotate_deployment(each.name, {naming.TRIED: str(int(order.now))})
        await self._tell_coordinators(order)
        await self._remove_unwanted([*order.wanted.applied, *order.wanted.created])
        await self._retire(order.decision.retired)

    # --- what pods need -----------------------------------------------------------------------------------------

    async def _revisions(self, order: Order) -> None:
        pins = order.pins
        manifest = config.revisions(
            order.entries,
            self._look.owner,
            image=pins.image,
            images=pins.images,
            control_secret=pins.control_secret,
            rekeyed=pins.rekeyed,
            aside=order.aside if order.aside or config.has_aside(self._look.revisions()) else None,
        )
        await self._keep(manifest)

    async def renew(self, entries: Sequence[PipelineRevision], pins: Pins, *, rekey: bool) -> None:
        """Have the next look plan every unit anew. ``rekey``: the Secret is lost, and gets a successor."""
        occasion = secrets.token_hex(5)
        named = naming.control_secret(self._look.owner.name, occasion) if rekey else pins.control_secret
        await self._keep(
            config.revisions(
                entries,
                self._look.owner,
                image=pins.image,
                images=pins.images,
                control_secret=named,
                rekeyed=occasion,
            )
        )

    async def _key(self, pins: Pins) -> None:
        """Its name stands in the revisions ConfigMap already, so a restart here makes no second one."""
        await self._before_making()
        key = secrets.token_bytes(config.KEY_BYTES)
        await self._apply.create_secret(config.secret(pins.control_secret, self._look.owner, key))

    async def _created(self, manifests: Sequence[Manifest]) -> None:
        for manifest in manifests:
            kind, name = kinds.of(manifest), manifest["metadata"]["name"]
            there = self._look.claim(name) if kind is kinds.CLAIM else self._look.child(kind, name)
            if there is None:
                await self._make(manifest)

    async def _keep(self, manifest: Manifest) -> None:
        """As it should be, whoever has changed it; what others added to it stays."""
        manifest = comparing.stamped(manifest)
        there = self._look.child(kinds.of(manifest), manifest["metadata"]["name"])
        if there is None:
            await self._make(manifest)
        elif not comparing.is_as_wanted(manifest, there):
            await self._apply.keep(manifest, there)

    # --- Deployments --------------------------------------------------------------------------------------------

    async def _workloads(self, order: Order) -> None:
        by_key = {(each.unit, each.revision): each for each in order.wanted.workloads}
        waits = self._prefetching(order.wanted.created)
        for (unit, revision), decided in order.decision.replicas.items():
            name = naming.unit(self._look.owner.name, unit, revision)
            wanted = by_key.get((unit, revision))
            there = self._look.child(DEPLOYMENT, name)
            is_held = (unit, revision) in order.held
            replicas = 0 if is_held else decided
            if there is None and (is_held or (waits and unit != COORDINATOR)):
                continue
            if wanted is not None and there is not None and replicas and await self._is_outdated(wanted, there):
                await self._apply.delete(there)
                await self._workload(wanted, None, replicas, order.loads)
            elif wanted is not None:
                await self._workload(wanted, there, replicas, order.loads)
            elif there is not None:
                await self._scale(there, replicas, order)

    async def _is_outdated(self, wanted: desired.Workload, there: Manifest) -> bool:
        """Of a Deployment that nothing runs of: whether its template is not what would be made now.

        It may have been edited by hand while it was idle, or made with another image than its revision has now.
        """
        seen = next(each for each in self._look.workloads() if each.name == there["metadata"]["name"])
        if seen.started:
            return False
        if seen.image != wanted.deployment["metadata"]["annotations"][naming.IMAGE_PIN]:
            return True
        if not seen.idle:
            return False
        return seen.drifted or not await self._apply.has_template(wanted.deployment, there)

    async def _workload(
        self, wanted: desired.Workload, there: Manifest | None, replicas: int, loads: Mapping[str, int]
    ) -> None:
        """One of the plan's own; its template is written when it is made and never again."""
        if self._look.child(CONFIG_MAP, wanted.plan["metadata"]["name"]) is None:
            await self._make_once(wanted.plan)
        if there is None:
            spec = {"replicas": replicas, **wanted.deployment["spec"]}
            await self._make_once({**wanted.deployment, "spec": spec})
            return  # one that was there after all keeps its replicas: the next look decides, knowing them
        head = wanted.deployment["metadata"]
        same_head = comparing.is_as_wanted({"labels": head["labels"]}, there["metadata"])
        if there["spec"].get("replicas") != replicas or not same_head:
            await self._price(there, replicas, loads)
            await self._apply.scale(wanted.deployment, there, replicas)

    async def _scale(self, there: Manifest, replicas: int, order: Order) -> None:
        """An old one: only its replicas are of interest."""
        has = there["spec"].get("replicas", 1)
        if replicas == has or (replicas < has and not order.may_shrink):
            return
        await self._price(there, replicas, order.loads)
        labels = there["spec"]["selector"]["matchLabels"]
        head = naming.child(
            "apps/v1",
            "Deployment",
            there["metadata"]["name"],
            self._look.owner,
            of=naming.labels(labels[naming.PIPELINE_LABEL], labels[naming.UNIT_LABEL], labels[naming.REVISION_LABEL]),
        )
        await self._apply.scale(head, there, replicas)

    async def _price(self, deployment: Manifest, replicas: int, loads: Mapping[str, int]) -> None:
        """Before some of its pods go: the least loaded is to go first."""
        if not loads or not 0 < replicas < deployment["spec"].get("replicas", 1):
            return
        revision = deployment["spec"]["selector"]["matchLabels"][naming.REVISION_LABEL]
        for pod in self._look.pods(deployment["spec"]["selector"]["matchLabels"][naming.UNIT_LABEL]):
            metadata, address = pod["metadata"], pod.get("status", {}).get("podIP")
            if metadata["labels"].get(naming.REVISION_LABEL) != revision or "deletionTimestamp" in metadata:
                continue
            cost = str(min(loads.get(address or "", 0), MAX_COST))
            if metadata.get("annotations", {}).get(DELETION_COST, "0") != cost:
                await self._apply.annotate_pod(metadata["name"], {DELETION_COST: cost})

    async def _tell_coordinators(self, order: Order) -> None:
        """A changed annotation makes the kubelet write the mounted list at once, not within a minute."""
        there = self._look.revisions()
        if there is None:
            return
        digest = config.digest(there)
        for pod in self._look.pods(COORDINATOR):
            metadata = pod["metadata"]
            running = pod.get("status", {}).get("podIP") and "deletionTimestamp" not in metadata
            if running and metadata.get("annotations", {}).get(naming.SEEN_REVISIONS) != digest:
                await self._apply.annotate_pod(metadata["name"], {naming.SEEN_REVISIONS: digest})

    def _prefetching(self, created: Sequence[Manifest]) -> bool:
        """Whether units still wait for the model to be fetched."""
        for manifest in created:
            if manifest["kind"] == JOB.name:
                there = self._look.child(JOB, manifest["metadata"]["name"])
                return there is None or not there.get("status", {}).get("succeeded")
        return False

    # --- what nobody needs --------------------------------------------------------------------------------------

    async def _remove_unwanted(self, wanted: Sequence[Manifest]) -> None:
        names = {(each["kind"], each["metadata"]["name"]) for each in wanted}
        for kind in (*kinds.APPLIED, JOB):  # a claim stays: what was fetched is of use to the next pipeline
            for there in self._look.children(kind):
                if (kind.name, there["metadata"]["name"]) not in names:
                    await self._apply.delete(there)

    async def _retire(self, retired: Sequence[Workload]) -> None:
        for each in retired:
            there = self._look.child(DEPLOYMENT, each.name)
            if there is not None:
                await self._apply.delete(there)
        gone = {each.name for each in retired}
        kept = {f"{each['metadata']['name']}-plan" for each in self._look.children(DEPLOYMENT)} - {
            f"{name}-plan" for name in gone
        }
        for plan in self._look.children(CONFIG_MAP):
            labels = plan["metadata"]["labels"]
            if naming.REVISION_LABEL in labels and plan["metadata"]["name"] not in kept:
                await self._apply.delete(plan)

    # --- making -------------------------------------------------------------------------------------------------

    async def _make(self, manifest: Manifest) -> Manifest:
        await self._before_making()
        return await self._apply.make(manifest)

    async def _make_once(self, manifest: Manifest) -> Manifest:
        await self._before_making()
        return await self._apply.make_once(manifest)

    async def _before_making(self) -> None:
        """A resource that is gone, and whose deletion no watch has told us, must not fight garbage collection."""
        if not self._asked:
            await self._still_there()
            self._asked = True
