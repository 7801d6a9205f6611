"""The Service of a pipeline, the headless Service of its coordinators, the Ingress.

Here: these three. Not here: who may reach them (`policies`). Called by `children`.
"""

from __future__ import annotations

from typing import Final

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.pods import CONTROL_PORT, COORDINATOR, PUBLISH_PORT

#: ingress-nginx does not read ``appProtocol``, which Traefik, GKE and the Gateway API do.
BEHIND_TLS: Final = {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"}


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
    annotations = {**(BEHIND_TLS if scheme(spec) == "https" else {}), **settings.annotations}
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


def url(spec: PipelineConfig, owner: Owner) -> str:
    """The pipeline's URL inside the cluster."""
    return f"{scheme(spec)}://{naming.service(owner.name)}.{owner.namespace}.svc:{port_of(spec)}"
