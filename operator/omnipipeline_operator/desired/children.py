"""All Kubernetes objects of a plan, as plain dicts.

Here: which objects there are. Not here: the manifest of each (`pods`, `config`, `services`, `policies`, `storage`), how
many replicas a Deployment has during a roll-out (`changes.deciding.rollout`). Called by `controller`, and offline by
``kubectl omni manifests``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator.desired import config, podgroups, policies, services, storage
from omnipipeline_operator.desired.pod_templates import devices, pods
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec import scaling
from omnipipeline_spec.cluster import Profiling
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import PipelinePlan, PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR

COORDINATORS: Final = 2  # one may be killed or evicted while the other serves


class DesiredWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The manifests of one unit revision; each is written once."""

    unit: str
    revision: str
    replicas: int  #: Desired when no roll-out is in progress.
    deployment: Manifest  #: The Deployment without replicas.
    plan: Manifest  #: The ConfigMap that its pods mount.
    devices: Manifest | None = None  #: The ResourceClaimTemplate of its pods' GPUs, where they come by a claim.


class Children(msgspec.Struct, frozen=True, kw_only=True):
    """All desired children of a plan."""

    workloads: tuple[DesiredWorkload, ...]  #: Units in spec order, the coordinator last.
    applied: tuple[Manifest, ...]  #: Kept equal to these manifests; those that are no longer here are deleted.
    created: tuple[Manifest, ...]  #: Created once and never updated: a claim, a Job.


def coordinators(spec: PipelineConfig) -> int:
    """How many coordinators serve. The default is not the CRD's: that would be written into resources that exist."""
    return spec.coordinator.replicas or COORDINATORS


def children(
    spec: PipelineConfig, plan: PipelinePlan, facts: PodFacts, *, scrapers: Sequence[Mapping[str, Any]] = ()
) -> Children:
    """All children but the revisions ConfigMap and the Secret, which depend on what is observed.

    Raises: NotAllowed: a podTemplate asks for what the operator does not allow.
    """
    owner = facts.owner
    workloads = [
        DesiredWorkload(
            unit=unit.name,
            revision=unit.revision,
            replicas=plan.replicas[unit.name],
            deployment=pods.unit_deployment(unit, facts),
            plan=config.plan(unit, unit.name, owner),
            devices=devices.template(unit, owner),
        )
        for unit in plan.units
    ]
    workloads.append(
        DesiredWorkload(
            unit=COORDINATOR,
            revision=plan.coordinator.revision,
            replicas=coordinators(spec),
            deployment=pods.coordinator_deployment(plan.coordinator, facts),
            plan=config.plan(plan.coordinator, COORDINATOR, owner),
        )
    )
    doors = (services.ingress(spec, owner), services.route(spec, owner))
    return Children(
        workloads=tuple(workloads),
        applied=(
            services.http(spec, owner),
            services.peers(owner),
            *(each for each in doors if each is not None),
            *podgroups.made(plan, owner, facts.groups),
            *policies.network(spec, owner, scrapers),
            *policies.budgets(spec, plan, owner, coordinators=coordinators(spec)),
        ),
        created=tuple(
            made for made in (storage.claim(spec, plan, facts), storage.prefetch(spec, plan, facts)) if made is not None
        ),
    )


def manifests(
    spec: PipelineConfig, plan: PipelinePlan, facts: PodFacts, *, key: bytes, entries: Sequence[PipelineRevision] = ()
) -> list[Manifest]:
    """Every object of a new pipeline in the order it may be applied by hand, replicas and Secret included."""
    desired = children(spec, plan, facts)
    listed = config.revisions(
        entries or [plan.current],
        facts.owner,
        image=facts.image,
        control_secret=facts.control_secret,
        profiling=None if spec.profiling == Profiling(storage=spec.profiling.storage) else spec.profiling,
        on_demand=scaling.on_demand(plan) or None,
    )
    deployments = [
        {**one.deployment, "spec": {"replicas": one.replicas, **one.deployment["spec"]}} for one in desired.workloads
    ]
    secret = config.secret(facts.control_secret, facts.owner, key)
    plans = [one.plan for one in desired.workloads]
    claimed = [one.devices for one in desired.workloads if one.devices is not None]
    return [secret, listed, *plans, *claimed, *desired.created, *desired.applied, *deployments]
