"""The Service of a pipeline, the headless Service of its coordinators, the Ingress, the HTTPRoute.

Here: these four. Not here: who may reach them (`policies`). Called by `children`.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.pods import CONTROL_PORT, COORDINATOR, PUBLISH_PORT

_NGINX: Final = "nginx.ingress.kubernetes.io"
#: ingress-nginx does not read ``appProtocol``, which Traefik, GKE and the Gateway API do.
BEHIND_TLS: Final = {f"{_NGINX}/backend-protocol": "HTTPS"}
LATER_S: Final = 5  # the coordinator's own error comes first
#: No time-out, which implementations have otherwise (15 s with Envoy's): it would cut streams and long answers.
UNTIMED: Final = {"request": "0s", "backendRequest": "0s"}


def http(spec: PipelineConfig, owner: Owner) -> Manifest:
    """The Service for clients: all ready coordinators of any revision."""
    settings = spec.expose.service
    manifest = naming.child(
        kinds.SERVICE,
        naming.service(owner.name),
        owner,
        of=naming.labels(owner.name, COORDINATOR),
        annotations=settings.annotations,
    )
    port = {"name": "http", "port": port_of(spec), "targetPort": "http", "protocol": "TCP"}
    port["appProtocol"] = scheme(spec)
    selector = naming.selector(owner.name, COORDINATOR)
    policy = settings.ip_family_policy or "PreferDualStack"  # the API server makes it one family where there is one
    return {
        **manifest,
        "spec": {"type": settings.type, "ipFamilyPolicy": policy, "selector": selector, "ports": [port]},
    }


def port_of(spec: PipelineConfig) -> int:
    return spec.expose.service.port or spec.coordinator.http.port


def scheme(spec: PipelineConfig) -> str:
    """The protocol of coordinators on the Service's port."""
    return "http" if spec.coordinator.http.tls is None else "https"


def peers(owner: Owner) -> Manifest:
    """The headless Service that stages resolve to find all live coordinators, ready or not.

    It has the cluster's first family alone, which is that of the pods' own addresses: with two, each coordinator would
    be found twice.
    """
    labels = naming.labels(owner.name, COORDINATOR)
    manifest = naming.child(kinds.SERVICE, naming.peers(owner.name), owner, of=labels)
    ports = [
        {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}
        for name, number in (("control", CONTROL_PORT), ("publish", PUBLISH_PORT))
    ]
    spec = {
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": naming.selector(owner.name, COORDINATOR),
        "ports": ports,
    }
    return {**manifest, "spec": spec}


def ingress(spec: PipelineConfig, owner: Owner) -> Manifest | None:
    """The Ingress, if the spec asks for one."""
    settings = spec.expose.ingress
    if settings is None:
        return None
    labels = naming.labels(owner.name, COORDINATOR)
    annotations = {**_of_nginx(spec), **settings.annotations}
    manifest = naming.child(kinds.INGRESS, owner.name, owner, of=labels, annotations=annotations)
    backend = {"service": {"name": naming.service(owner.name), "port": {"name": "http"}}}
    rule: Manifest = {"http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
    if settings.host:
        rule["host"] = settings.host
    ingress: Manifest = {"rules": [rule]}
    if settings.class_name:
        ingress["ingressClassName"] = settings.class_name
    if settings.tls_secret_name:
        ingress["tls"] = [
            {"secretName": settings.tls_secret_name, **({"hosts": [settings.host]} if settings.host else {})}
        ]
    return {**manifest, "spec": ingress}


def route(spec: PipelineConfig, owner: Owner) -> Manifest | None:
    """The HTTPRoute, if the spec asks for one. It refers to a port by number, since the Gateway API knows no names."""
    settings = spec.expose.route
    if settings is None:
        return None
    labels = naming.labels(owner.name, COORDINATOR)
    manifest = naming.child(kinds.ROUTE, owner.name, owner, of=labels, annotations=settings.annotations)
    backend = {"name": naming.service(owner.name), "port": port_of(spec)}
    parents = [
        {"name": each.name}
        | ({"namespace": each.namespace} if each.namespace else {})
        | ({"sectionName": each.section_name} if each.section_name else {})
        | ({"port": each.port} if each.port else {})
        for each in settings.parent_refs
    ]
    rule = {"backendRefs": [backend], "timeouts": dict(UNTIMED)}
    hosts: Manifest = {"hostnames": list(settings.hostnames)} if settings.hostnames else {}
    return {**manifest, "spec": {"parentRefs": parents, **hosts, "rules": [rule]}}


def _of_nginx(spec: PipelineConfig) -> dict[str, str]:
    """The bounds of ingress-nginx, which are 60 s and 1 MiB, as the coordinator has them; it ends requests itself.

    An answer that is not streamed sends nothing until it is complete.
    """
    http = spec.coordinator.http
    seconds = str(ceil(http.request_timeout_seconds) + LATER_S)
    bounds = {
        f"{_NGINX}/proxy-read-timeout": seconds,
        f"{_NGINX}/proxy-send-timeout": seconds,
        f"{_NGINX}/proxy-body-size": str(http.max_body_bytes),
    }
    return bounds | (BEHIND_TLS if scheme(spec) == "https" else {})


def url(spec: PipelineConfig, owner: Owner) -> str:
    """The pipeline's URL inside the cluster."""
    return f"{scheme(spec)}://{naming.service(owner.name)}.{owner.namespace}.svc:{port_of(spec)}"
