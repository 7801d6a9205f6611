"""How the status says that a pipeline is reached: by a Gateway, an Ingress, a load balancer, or by none of them yet."""

from __future__ import annotations

from typing import Any

import pytest

from omnipipeline_operator.changes.reporting.status_inputs import Exposure
from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.controller.observing import exposure
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_spec import loading
from omnipipeline_spec.types.resource import API_VERSION, KIND

OWNER = Owner(namespace="team", name="duo", uid="u")
URL = "http://duo.team.svc:8000"
STAGE = {"name": "only", "process": "only", "factory": "work:make", "terminal": True}
ROUTE = {"parentRefs": [{"name": "shared"}], "hostnames": ["*.example.org", "voice.example.org"]}
WAITS = "HTTPRoute duo is not accepted by a Gateway yet"


def child(kind: str, **status: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "duo", "namespace": "team", "uid": f"{kind}-1", "resourceVersion": "2"}
    metadata |= {"labels": naming.labels("duo"), "ownerReferences": [OWNER.reference()]}
    return {"kind": kind, "metadata": metadata, "status": status}


def accepted(status: str = "True", reason: str = "Accepted", type: str = "Accepted") -> dict[str, Any]:
    condition = {"type": type, "status": status, "reason": reason, "message": "says the controller"}
    return child("HTTPRoute", parents=[{"parentRef": {"name": "shared"}, "conditions": [condition]}])


def shown(expose: dict[str, Any], *live: dict[str, Any], lacking: dict[str, str] | None = None) -> Exposure:
    """The exposure of a pipeline with these objects; its Service is among them, also where ``live`` has none."""
    store = Store()
    for each in [*live, *([] if any(one["kind"] == "Service" for one in live) else [child("Service")])]:
        store.put(each)
    resource = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "duo"}}
    spec = loading.from_resource({**resource, "spec": {"stages": [STAGE], "expose": expose}}).spec
    snapshot = Snapshot(store, ("team", "duo"), OWNER, now=0.0)
    return exposure.exposure(spec, snapshot, lacking or {})


@pytest.mark.parametrize(
    "live, expected",
    [
        ([], Exposure(url=URL, pending=WAITS)),
        ([child("HTTPRoute")], Exposure(url=URL, pending=WAITS)),
        ([accepted("Unknown", "Pending")], Exposure(url=URL, pending=WAITS)),
        ([accepted()], Exposure(url=URL, external="https://voice.example.org")),
        (
            [accepted("False", "NotAllowedByListeners")],
            Exposure(
                url=URL,
                pending="HTTPRoute duo: Accepted is False (NotAllowedByListeners): says the controller",
                reason="RouteRefused",
            ),
        ),
        (
            [accepted("False", "BackendNotFound", "ResolvedRefs")],
            Exposure(
                url=URL,
                pending="HTTPRoute duo: ResolvedRefs is False (BackendNotFound): says the controller",
                reason="RouteRefused",
            ),
        ),
    ],
)
def test_a_route_has_an_address_once_a_gateway_accepts_it(live: list[dict[str, Any]], expected: Exposure) -> None:
    assert shown({"route": ROUTE}, *live) == expected


def test_a_cluster_without_the_gateway_api_is_said_to_lack_it() -> None:
    found = shown({"route": ROUTE}, lacking={"HTTPRoute": "the server could not find the requested resource"})
    assert (found.reason, found.external) == ("GatewayAPIMissing", None)
    assert found.pending == (
        "expose.route needs HTTPRoute of gateway.networking.k8s.io/v1, which the operator cannot read in this cluster: "
        "the server could not find the requested resource"
    )
    assert shown({}, lacking={"HTTPRoute": "gone"}) == Exposure(url=URL), "only who asks for one"


def test_a_route_of_plain_http_or_of_patterns_alone_says_so() -> None:
    assert shown({"route": {**ROUTE, "https": False}}, accepted()).external == "http://voice.example.org"
    assert shown({"route": {**ROUTE, "hostnames": ["*.example.org"]}}, accepted()) == Exposure(url=URL)
    assert shown({"route": {"parentRefs": [{"name": "shared"}]}}, accepted()) == Exposure(url=URL)


def test_an_ingress_that_serves_and_a_route_that_waits_are_both_shown() -> None:
    served = child("Ingress", loadBalancer={"ingress": [{"ip": "192.0.2.1"}]})
    found = shown({"route": ROUTE, "ingress": {}}, served)
    assert (found.external, found.pending) == ("http://192.0.2.1", WAITS)


def test_an_ingress_of_a_pattern_has_no_url() -> None:
    served = child("Ingress", loadBalancer={"ingress": [{"ip": "192.0.2.1"}]})
    assert shown({"ingress": {"host": "*.example.org"}}, served) == Exposure(url=URL)


@pytest.mark.parametrize(
    "kind, expose, port",
    [("Ingress", {"ingress": {}}, ""), ("Service", {"service": {"type": "LoadBalancer"}}, ":8000")],
)
def test_an_ipv6_address_stands_in_brackets(kind: str, expose: dict[str, Any], port: str) -> None:
    served = child(kind, loadBalancer={"ingress": [{"ip": "2001:db8::1"}]})
    assert shown(expose, served) == Exposure(url=URL, external=f"http://[2001:db8::1]{port}")
