"""How a pipeline is reached now: the addresses that its Service and Ingress were given, and who serves its HTTPRoute.

Here: reading them from a snapshot. Not here: the manifests (`desired.services`). Called by `reporting`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from omnipipeline_operator import kinds
from omnipipeline_operator.changes.reporting.status_inputs import Exposure
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.desired import naming, services
from omnipipeline_spec.cluster import Route
from omnipipeline_spec.pipeline import PipelineConfig


def exposure(spec: PipelineConfig, snapshot: Snapshot, lacking: Mapping[str, str]) -> Exposure:
    """The URLs that the status reports, or what has no address yet.

    lacking: kinds that the cluster lacks -> the API server's refusal.
    """
    ways = list(_ways(spec, snapshot, lacking))
    external = next((each.external for each in ways if each.external), None)
    waits = next((each for each in ways if each.pending), None)
    return msgspec.structs.replace(waits or Exposure(url=services.url(spec, snapshot.owner)), external=external)


def _ways(spec: PipelineConfig, snapshot: Snapshot, lacking: Mapping[str, str]) -> Iterator[Exposure]:
    """Each way from outside that the spec asks for."""
    url = services.url(spec, snapshot.owner)
    service = snapshot.child(kinds.SERVICE, naming.service(snapshot.owner.name))
    if service is None:  # another object has its name, or it was refused: all ways lead through it
        message = f"Service {naming.service(snapshot.owner.name)} of this pipeline does not exist"
        yield Exposure(url=url, pending=message, reason="ServiceMissing")
    ingress = snapshot.child(kinds.INGRESS, snapshot.owner.name)
    if spec.expose.ingress is not None and ingress is not None:
        scheme = "https" if spec.expose.ingress.tls_secret_name else "http"
        address = _address(ingress)
        if address is None:  # no Ingress controller serves it yet
            yield Exposure(url=url, pending=f"Ingress {ingress['metadata']['name']} has no address yet")
        else:
            named = spec.expose.ingress.host or address
            yield Exposure(url=url, external=None if named.startswith("*") else f"{scheme}://{named}")
    if spec.expose.route is not None:
        route = snapshot.child(kinds.ROUTE, snapshot.owner.name)
        yield _routed(spec.expose.route, route or {}, url, snapshot.owner.name, lacking.get(kinds.ROUTE.name))
    if spec.expose.service.type == "LoadBalancer" and spec.expose.ingress is None and spec.expose.route is None:
        host = _address(service or {})
        if host is None:
            yield Exposure(url=url, pending="the load balancer has no address yet")
        else:
            yield Exposure(url=url, external=f"{services.scheme(spec)}://{host}:{services.port_of(spec)}")


def _routed(route: Route, live: Mapping[str, Any], url: str, name: str, lacks: str | None) -> Exposure:
    """Whether a Gateway serves the HTTPRoute. Its URL has no port: that of a Gateway's listener is not known here."""
    if lacks is not None:
        kind = f"{kinds.ROUTE.name} of {kinds.ROUTE.api_version}"
        message = f"expose.route needs {kind}, which the operator cannot read in this cluster: {lacks}"
        return Exposure(url=url, pending=message, reason="GatewayAPIMissing")
    parents = [each for each in live.get("status", {}).get("parents", ()) if isinstance(each, Mapping)]
    found = [each for parent in parents for each in parent.get("conditions", ())]
    for each in found:
        if each.get("type") in ("Accepted", "ResolvedRefs") and each.get("status") == "False":
            message = f"HTTPRoute {name}: {each['type']} is False ({each.get('reason')}): {each.get('message')}"
            return Exposure(url=url, pending=message, reason="RouteRefused")
    if not any(each.get("type") == "Accepted" and each.get("status") == "True" for each in found):
        return Exposure(url=url, pending=f"HTTPRoute {name} is not accepted by a Gateway yet")
    host = next((each for each in route.hostnames if not each.startswith("*")), None)
    scheme = "https" if route.https else "http"
    return Exposure(url=url, external=f"{scheme}://{host}" if host else None)


def _address(manifest: Mapping[str, Any]) -> str | None:
    """The address of an Ingress or of a Service of type LoadBalancer, as a URL has it."""
    given = manifest.get("status", {}).get("loadBalancer", {}).get("ingress", [])
    host: str | None = next((each.get("hostname") or each.get("ip") for each in given), None)
    return f"[{host}]" if host and ":" in host else host
