"""NetworkPolicies (who may reach the pods) and PodDisruptionBudgets (how many pods a node drain may evict at once).

Here: these. Not here: Services (`services`). Called by `children`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.cluster import NetworkPolicy
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.types.pods import COORDINATOR, PROBE_PORT


def network(spec: PipelineConfig, owner: Owner, scrapers: Sequence[Mapping[str, Any]]) -> list[Manifest]:
    """Allow the pipeline's own pods, HTTP and metrics scrapers only. (Kubelets' probes are always allowed.)

    A spec without ``networkPolicy`` gets them, too.
    """
    settings = spec.network_policy or NetworkPolicy()
    if not settings.enabled:
        return []
    return [_pods(settings.extra_egress, owner, scrapers), _http(settings.ingress_from, owner)]


def budgets(spec: PipelineConfig, plan: PipelinePlan, owner: Owner, *, coordinators: int) -> list[Manifest]:
    """One per unit and one of the coordinators, over all revisions; a pod that is not ready does not block a drain.

    A spec that does not ask for them gets that of its coordinators, if there are several.
    """
    settings = spec.disruption.pod_disruption_budget
    if settings is None and coordinators > 1:
        return [_budget(COORDINATOR, owner, max_unavailable=1)]
    if settings is None or not settings.enabled:
        return []
    names = [*(unit.name for unit in plan.units), COORDINATOR]
    return [_budget(name, owner, settings.max_unavailable) for name in names]


def _pods(extra_egress: Sequence[Any], owner: Owner, scrapers: Sequence[Mapping[str, Any]]) -> Manifest:
    own = {"podSelector": {"matchLabels": naming.selector(owner.name)}}
    ingress: list[Manifest] = [{"from": [own]}]
    if scrapers:
        ingress.append({"from": [dict(peer) for peer in scrapers], "ports": [_port(PROBE_PORT)]})
    spec: Manifest = {"podSelector": own["podSelector"], "policyTypes": ["Ingress"], "ingress": ingress}
    if extra_egress:
        # Egress is restricted only when the author lists targets: a stage that downloads its model needs the internet.
        names = {"ports": [_port(53, "UDP"), _port(53)]}
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": [{"to": [own]}, names, *extra_egress]}
    return _policy(naming.pods_policy(owner.name), owner, spec)


def _http(sources: Sequence[Any], owner: Owner) -> Manifest:
    # The port is named: in a roll-out to another number, old and new coordinators listen on different ones.
    rule: Manifest = {"ports": [_port("http")]}
    if sources:
        rule["from"] = list(sources)
    selector = {"matchLabels": naming.selector(owner.name, COORDINATOR)}
    return _policy(
        naming.http_policy(owner.name), owner, {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [rule]}
    )


def _policy(name: str, owner: Owner, spec: Manifest) -> Manifest:
    manifest = naming.child(kinds.POLICY, name, owner, of=naming.labels(owner.name))
    return {**manifest, "spec": spec}


def _port(port: int | str, protocol: str = "TCP") -> Manifest:
    return {"port": port, "protocol": protocol}


def _budget(unit: str, owner: Owner, max_unavailable: int) -> Manifest:
    named = naming.budget(owner.name, unit)
    manifest = naming.child(kinds.BUDGET, named, owner, of=naming.labels(owner.name, unit))
    spec = {
        "selector": {"matchLabels": naming.selector(owner.name, unit)},
        "maxUnavailable": max_unavailable,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return {**manifest, "spec": spec}
