"""The HTTPRoute of a pipeline on a real API server, where the Gateway API is, and where it comes and goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_kit import Cluster
from tests.operator import gateway_api
from tests.operator.running import Kube, OperatorProcess, eventually, pipeline
from tests.patience import patience

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

ROUTE = {"parentRefs": [{"name": "shared", "namespace": "doors"}], "hostnames": ["voice.example.org"]}
OFTEN = {"OMNI_OPERATOR_RELIST_SECONDS": "1"}


@pytest.fixture
def gateway_crd(prepared: tuple[Cluster, Path]) -> Iterator[Any]:
    """Installs the CRD when called with True, and removes it when called with False, and at the end."""
    cluster, _ = prepared

    def install(wanted: bool) -> None:
        if not wanted:
            cluster.kubectl("delete", "crd", gateway_api.NAME, "--ignore-not-found", "--timeout=50s")
            return
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(gateway_api.CRD))
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{gateway_api.NAME}", "--timeout=50s")

    install(False)
    yield install
    install(False)


def exposed(kube: Kube) -> tuple[str, str]:
    found = kube.condition("duo", "Exposed")
    return found.get("status", ""), found.get("reason", "")


def becomes(kube: Kube, status: str, reason: str) -> None:
    eventually(lambda: exposed(kube) == (status, reason), what=f"Exposed is {status}, {reason}: {exposed(kube)}")


def test_a_route_is_made_followed_repaired_and_removed(kube: Kube, operator: OperatorProcess, gateway_crd: Any) -> None:
    gateway_crd(True)
    operator.start()
    kube.apply(pipeline(expose={"route": ROUTE}))
    ready = kube.wait_ready("duo")
    becomes(kube, "False", "AddressPending")
    made = kube.get("httproute", "duo")
    assert made["metadata"]["ownerReferences"][0]["uid"] == ready["metadata"]["uid"]
    [rule] = made["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert [(each["name"], each["port"]) for each in rule["backendRefs"]] == [("duo", 8000)]
    for status, reason, wanted in (("False", "NoMatchingParent", "RouteRefused"), ("True", "Accepted", "Exposed")):
        text = json.dumps(gateway_api.accepted(status, reason))
        kube("patch", "httproute", "duo", "--subresource=status", "--type=merge", "-p", text)
        becomes(kube, status, wanted)
    assert kube.get("omnipipeline", "duo")["status"]["endpoint"]["external"] == "https://voice.example.org"
    pods = {each["metadata"]["uid"] for each in kube.all("pods")}
    kube("delete", "httproute", "duo")
    eventually(lambda: kube.names("httproutes") == {"duo"}, what="a deleted route is made again")
    kube.apply(pipeline())
    eventually(lambda: not kube.names("httproutes"), what="no route")
    becomes(kube, "True", "Exposed")
    assert {each["metadata"]["uid"] for each in kube.all("pods")} == pods


def test_without_the_gateway_api_all_else_is_carried_out_and_the_route_is_made_when_it_comes(
    kube: Kube, operator: OperatorProcess, gateway_crd: Any
) -> None:
    operator.start(**OFTEN)
    kube.apply(pipeline(expose={"route": ROUTE}))
    kube.wait_ready("duo")
    becomes(kube, "False", "GatewayAPIMissing")
    assert kube.condition("duo", "Accepted")["status"] == "True"
    assert operator.process is not None and operator.process.poll() is None
    for comes in (True, False):
        gateway_crd(comes)
        assert operator.process.wait(patience(60)) == 1, "its watches are chosen at its start"
        operator.start(**OFTEN)
        if comes:
            assert "the kinds that can be read have changed: HTTPRoute" in operator.log.read_text()
            eventually(lambda: kube.names("httproutes") == {"duo"}, what="the route is made")
            becomes(kube, "False", "AddressPending")
        else:
            becomes(kube, "False", "GatewayAPIMissing")
    assert operator.stop() == 0
