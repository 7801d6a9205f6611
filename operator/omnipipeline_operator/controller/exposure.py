"""How a pipeline is reached now: the addresses that its Service and Ingress were given.

Here: reading them from a snapshot. Not here: the two manifests (`desired.services`). Called by `reporting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnipipeline_operator import kinds
from omnipipeline_operator.changes.status_inputs import Exposure
from omnipipeline_operator.controller.snapshots import Snapshot
from omnipipeline_operator.desired import naming, services
from omnipipeline_spec.pipeline import PipelineConfig


def exposure(spec: PipelineConfig, snapshot: Snapshot) -> Exposure:
    """The URLs that the status reports, or what has no address yet."""
    url = services.url(spec, snapshot.owner)
    ingress = snapshot.child(kinds.INGRESS, snapshot.owner.name)
    if spec.expose.ingress is not None and ingress is not None:
        scheme = "https" if spec.expose.ingress.tls_secret_name else "http"
        address = _address(ingress)
        if address is None:  # no Ingress controller serves it yet
            return Exposure(url=url, pending=f"Ingress {ingress['metadata']['name']} has no address yet")
        return Exposure(url=url, external=f"{scheme}://{spec.expose.ingress.host or address}")
    service = snapshot.child(kinds.SERVICE, naming.service(snapshot.owner.name))
    if spec.expose.service.type == "LoadBalancer":
        host = _address(service or {})
        pending = None if host else "the load balancer has no address yet"
        return Exposure(
            url=url,
            external=f"{services.scheme(spec)}://{host}:{services.port_of(spec)}" if host else None,
            pending=pending,
        )
    return Exposure(url=url)


def _address(manifest: Mapping[str, Any]) -> str | None:
    """The address of an Ingress or of a Service of type LoadBalancer."""
    given = manifest.get("status", {}).get("loadBalancer", {}).get("ingress", [])
    return next((each.get("hostname") or each.get("ip") for each in given), None)
