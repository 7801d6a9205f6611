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
from omnipipeline_operator.changes.observed import Workload
from omnipipeline_operator.changes.rollout import Goal, Wanted
from omnipipeline_operator.changes.status import Exposure, Facts, Refusal
from omnipipeline_operator.cluster import kinds
from omnipipeline_operator.cluster.applying import Applier, NameTaken
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.desks import Desk, Desks
from omnipipeline_operator.cluster.kinds import PIPELINE
from omnipipeline_operator.cluster.store import Key, Store
from omnipipeline_operator.desired import children, config, naming, services
from omnipipeline_operator.desired.naming import COORDINATOR, Manifest, Owner
from omnipipeline_operator.desired.pods import PodFacts
from omnipipeline_operator.handlers import adopting, looking, recording
from omnipipeline_operator.handlers.lacking import Asker, Lacking, due_again
from omnipipeline_operator.handlers.looking import Look, Pins
from omnipipeline_operator.handlers.plans import Plans
from omnipipeline_operator.handlers.reporting import Reporter
from omnipipeline_operator.handlers.writing import Order, Writer
from omnipipeline_operator.settings import Settings
from omnipipeline_spec.errors import SpecError
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.plan import PipelinePlan

log = logging.getLogger(__name__)

SOON_S = 2.0  # a roll that waits for the coordinator, a name that garbage collection is freeing
LACKING_S = 3.0  # between two looks for a Secret that is missing…
LACKING_SHARE_S = 0.1  # …and for each pipeline that lacks something: at most ten such requests a second
LATER_S = 60.0  # a name that is taken: whoever holds it is not watched


class Vanished(errors.OperatorError):
    """The resource is gone or going: nothing more is made for it."""


class _Planned(msgspec.Struct, frozen=True, kw_only=True):
    spec: PipelineConfig
    plan: PipelinePlan
    goal: Goal
    pins: Pins
    wanted: children.Children


class Reconciler:
    """Looks at pipelines."""

    def __init__(
        self, client: Client, store: Store, desks: Desks, settings: Settings, *, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._store = store
        self._desks = desks
        self._told = settings
        self._clock = clock
        self._plans = Plans()
        self._reporter = Reporter(client, name=settings.lease.identity or "operator")
        self._lack: set[Key] = set()  #: Pipelines that wait for what they name: the more, the less often each asks.

    async def reconcile(self, key: Key) -> float | None:
        """Do what is to be done now; the seconds after which to look again without being told to.

        Raises: errors.ClusterError: the API server would not; later, perhaps.
        """
        resource = self._store.pipeline(key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._plans.forget(key)
            self._lack.discard(key)
            return None
        owner = Owner(namespace=key[0], name=key[1], uid=resource["metadata"]["uid"])
        look = Look(self._store, key, owner)
        applier = Applier(self._client, self._store, owner)
        try:
            await adopting.adopt(self._client, look, applier, lambda: self._still_there(owner))
        except Vanished:
            return None
        try:
            planned = self._plan(resource, look)
        except (SpecError, errors.Refused) as error:
            reason = "NotAllowed" if isinstance(error, errors.Refused) else "InvalidSpec"
            await self._refuse(resource, look, applier, Refusal(reason=reason, message=str(error)))
            return None
        try:
            return await self._act(resource, planned, look, applier)
        except Vanished:
            return None

    # --- deciding -----------------------------------------------------------------------------------------------

    def _plan(self, resource: Manifest, look: Look) -> _Planned:
        """Raises: SpecError, errors.Refused."""
        spec, plan = self._plans.of(resource, looking.rekeyed(look))
        pins = looking.pins(
            look,
            look.workloads(),
            update=plan.current,
            coordinator=plan.coordinator.revision,
            image=spec.image,
            of_the_day=self._told.stage_image,
            random_id=secrets.token_hex(5),
        )
        facts = PodFacts(
            owner=look.owner,
            image=pins.image,
            control_secret=pins.control_secret,
            allow_privileged=self._told.allow_privileged,
            default_resources=self._told.default_resources,
        )
        wanted = children.children(spec, plan, facts, scrapers=self._told.scrapers)
        return _Planned(spec=spec, plan=plan, goal=_goal(spec, plan), pins=pins, wanted=wanted)

    async def _act(self, resource: Manifest, planned: _Planned, look: Look, applier: Applier) -> float | None:
        seen = look.workloads()
        writer = Writer(look, applier, lambda: self._still_there(look.owner))
        if await self._lost_its_key(planned, look, seen, applier):
            log.warning("%s/%s: Secret %s is lost", look.owner.namespace, look.owner.name, planned.pins.control_secret)
            await writer.renew(look.entries(), planned.pins, rekey=True)
            return SOON_S
        if planned.pins.is_mixed:
            log.info("%s/%s: its units run different images: all are made anew", look.owner.namespace, look.owner.name)
            await writer.renew(look.entries(), planned.pins, rekey=False)
            return SOON_S
        desks = await self._ask(look)
        known, before = look.entries(), conditions.seen(resource.get("status", {}))
        serving = {each.revision: each.units for each in known}.get(before.get("revision", {}).get("current", ""), {})
        update = planned.plan.current
        may_shrink = all(update.revision in desk.revisions for desk in desks)
        decision, now = rollout.decide(planned.goal, seen, serving), self._clock()
        asker = Asker(self._client, applier, look.owner, now=now)
        lacking = await self._lacking(asker, planned, look, seen, decision)
        order = Order(
            wanted=planned.wanted,
            decision=decision,
            entries=rollout.entries(update, known, seen),
            pins=planned.pins,
            held=lacking.held,
            prefetch_held=lacking.prefetch_held,
            aside=await self._aside(look, desks),
            retried=[each for each in seen if each.refused is not None and due_again(each, now) <= now],
            now=now,
            curve=planned.spec.control.security.mode == "Curve",
            may_shrink=may_shrink or planned.goal.suspended,
            loads={host: load for desk in desks for host, load in desk.loads().items()},
        )
        refusal, again, failed = None, None if may_shrink else SOON_S, None
        try:
            await writer.carry_out(order)
        except NameTaken as error:
            refusal = Refusal(reason="NameConflict", message=str(error))
            again = SOON_S if error.passing else LATER_S
        except (errors.Invalid, errors.Forbidden) as error:
            refusal, failed = _refused_child(error), error
        facts = self._facts(planned, look, desks, refusal, serving, lacking)
        said = await self._summarise(resource, facts, applier)
        if failed is not None:
            raise failed
        if conditions.is_true(said, "Ready"):
            await recording.record(self._client, look, resource, planned.plan, planned.goal.history)
        now = self._clock()
        times = [due_again(each, now) for each in facts.seen if each.refused is not None]
        times += filter(None, [status.deadline(facts, now)])
        waits = [again, lacking.again_s, *(max(each - now, SOON_S) for each in times)]
        return min((each for each in waits if each is not None), default=None)

    def _facts(
        self,
        planned: _Planned,
        look: Look,
        desks: Sequence[Desk],
        refusal: Refusal | None,
        serving: Mapping[str, str],
        lacking: Lacking,
    ) -> Facts:
        """What is now, after the writes."""
        seen = [
            msgspec.structs.replace(each, refused=lacking.refused.get(each.name, each.refused))
            if each.refused is not None
            else each
            for each in look.workloads()
        ]
        registered: dict[tuple[str, str], int] | None = None
        for desk in desks:  # in a roll two answer; a stage registers with both
            counts = desk.registered()
            registered = {
                unit: max(counts.get(unit, 0), (registered or {}).get(unit, 0))
                for unit in {*counts, *(registered or {})}
            }
        return Facts(
            plan=planned.plan,
            goal=planned.goal,
            decision=rollout.decide(planned.goal, seen, serving),
            seen=seen,
            entries=look.entries(),
            exposure=_exposure(planned.spec, look),
            registered=registered,
            refusal=refusal,
            progress_deadline_s=float(planned.spec.rollout.progress_deadline_seconds),
            lacking=lacking.troubles,
            image=planned.pins.image,
            images=planned.pins.images,
            fetching=looking.fetching(look, planned.wanted.created, planned.spec.model_path or ""),
            note=looking.shared_claim(look, planned.wanted.created, sum(planned.plan.replicas.values())),
        )

    async def _lost_its_key(self, planned: _Planned, look: Look, seen: Sequence[Workload], applier: Applier) -> bool:
        """Asked before pods of a new revision are made, and when pods hang: without their Secret they never start."""
        if planned.spec.control.security.mode != "Curve" or planned.pins.is_new:
            return False
        there = {(each.unit, each.revision) for each in seen}
        makes = any((each.unit, each.revision) not in there for each in planned.wanted.workloads)
        if not makes and not looking.hangs(seen, self._clock()):
            return False
        manifest = config.secret(planned.pins.control_secret, look.owner, bytes(config.KEY_BYTES))
        return await applier.lacks_secret(manifest)

    async def _lacking(
        self, asker: Asker, planned: _Planned, look: Look, seen: Sequence[Workload], decision: rollout.Decision
    ) -> Lacking:
        """What keeps pods from starting that no status of theirs says."""
        key = (look.owner.namespace, look.owner.name)
        every_s = max(LACKING_S, LACKING_SHARE_S * len(self._lack))
        found = await asker.ask(planned.wanted, seen, decision.replicas, every_s=every_s)
        (self._lack.add if found.held else self._lack.discard)(key)
        return found

    async def _aside(self, look: Look, desks: Sequence[Desk]) -> list[str]:
        """Addresses of registered pods that bear the labels of another unit now, or none of ours.

        What a coordinator knows and our watch does not may be new: the API server is asked before it is believed.
        """
        known = look.addresses()
        strange = {
            each for desk in desks for each in desk.instances if (each.unit, each.revision, each.host) not in known
        }
        aside = set()
        for each in strange:
            if each.host in aside:
                continue
            wanted = naming.selector(look.owner.name, each.unit, each.revision).items()
            pods = [one["metadata"] for one in await self._client.pods_at(look.owner.namespace, each.host)]
            if pods and not any(wanted <= one.get("labels", {}).items() for one in pods):
                aside.add(each.host)
        return sorted(aside)

    async def _ask(self, look: Look) -> list[Desk]:
        """All coordinators that are ready."""
        coordinators = [each for each in look.workloads() if each.unit == COORDINATOR]
        ready = [pod.ip for each in coordinators for pod in each.pods if pod.ready and not pod.terminating and pod.ip]
        return await self._desks.ask(ready)

    async def _still_there(self, owner: Owner) -> None:
        """Raises: Vanished."""
        try:
            live = await self._client.get(PIPELINE, owner.namespace, owner.name)
        except errors.NotFound as error:
            self._store.drop({"kind": PIPELINE.name, "metadata": msgspec.to_builtins(owner)})
            raise Vanished(f"{owner.namespace}/{owner.name} is gone") from error
        self._store.put({**live, "kind": PIPELINE.name})
        if live["metadata"]["uid"] != owner.uid or "deletionTimestamp" in live["metadata"]:
            raise Vanished(f"{owner.namespace}/{owner.name} is going")

    # --- reporting ----------------------------------------------------------------------------------------------

    async def _summarise(self, resource: Manifest, facts: Facts, applier: Applier) -> Manifest:
        """The status that holds now."""
        before, generation = conditions.seen(resource.get("status", {})), resource["metadata"]["generation"]
        now, said = status.summarise(facts, before, generation=generation, now=self._clock())
        await self._write(resource, now, said, applier)
        return now

    async def _refuse(self, resource: Manifest, look: Look, applier: Applier, refusal: Refusal) -> None:
        """What runs is left alone."""
        before, generation = conditions.seen(resource.get("status", {})), resource["metadata"]["generation"]
        available = status.is_available(look.entries(), look.workloads())
        now, said = status.refused(refusal, before, generation=generation, available=available, now=self._clock())
        await self._write(resource, now, said, applier)

    async def _write(
        self, resource: Manifest, now: dict[str, Any], said: Sequence[conditions.Condition], applier: Applier
    ) -> None:
        before = conditions.seen(resource.get("status", {}))
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
        transitions = conditions.transitions(said, before.get("conditions", ()))
        await self._reporter.report(owner, transitions)


def _refused_child(error: errors.ClusterError) -> Refusal:
    """The API server will not have an object as the spec makes it: a quota, a policy, a podTemplate that is none."""
    reason = "QuotaExceeded" if "exceeded quota" in error.message else "ChildRefused"
    return Refusal(reason=reason, message=error.message)


def _goal(spec: PipelineConfig, plan: PipelinePlan) -> Goal:
    units = {unit.name: Wanted(revision=unit.revision, replicas=plan.replicas[unit.name]) for unit in plan.units}
    return Goal(
        units=units,
        coordinator=Wanted(revision=plan.coordinator.revision, replicas=1),
        strategy=spec.rollout.strategy,
        max_surge=spec.rollout.max_surge,
        paused=spec.rollout.paused,
        suspended=spec.suspend,
        history=spec.rollout.revision_history_limit,
    )


def _exposure(spec: PipelineConfig, look: Look) -> Exposure:
    url = services.url(spec, look.owner)
    ingress = look.child(kinds.INGRESS, look.owner.name)
    if spec.expose.ingress is not None and ingress is not None:
        scheme = "https" if spec.expose.ingress.tls_secret_name else "http"
        address = _address(ingress)
        if address is None:  # no controller has taken it: a host alone leads nowhere
            return Exposure(url=url, pending=f"Ingress {ingress['metadata']['name']} has no address yet")
        return Exposure(url=url, external=f"{scheme}://{spec.expose.ingress.host or address}")
    service = look.child(kinds.SERVICE, naming.service(look.owner.name))
    if spec.expose.service.type == "LoadBalancer":
        host = _address(service or {})
        pending = None if host else "the load balancer has no address yet"
        return Exposure(url=url, external=f"http://{host}:{services.port_of(spec)}" if host else None, pending=pending)
    return Exposure(url=url)


def _address(manifest: Mapping[str, Any]) -> str | None:
    """What an Ingress or a Service of type LoadBalancer was given."""
    given = manifest.get("status", {}).get("loadBalancer", {}).get("ingress", [])
    return next((each.get("hostname") or each.get("ip") for each in given), None)
