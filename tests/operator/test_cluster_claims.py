"""GPUs by Dynamic Resource Allocation: claims that a real scheduler allocates on simulated nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_kit import Cluster
from tests.operator.running import ACCOUNT, FAKE_GROUP, TOLERATED, Audit, Kube, OperatorProcess, eventually, pipeline
from tests.patience import patience

OFTEN = {"OMNI_OPERATOR_RELIST_SECONDS": "1"}
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

DRIVER = "gpu.example.com"  # a driver publishes the devices of a node; the scheduler alone allocates them
PLACED = {"tolerations": TOLERATED, "nodeSelector": {"fake": FAKE_GROUP}}
LARGE = f"device.attributes['{DRIVER}'].model == 'large'"


@pytest.fixture
def devices(prepared: tuple[Cluster, Path]) -> Iterator[Any]:
    """Publishes the devices of a node, as its driver would: their models. All go with the DeviceClass at the end."""
    cluster, _ = prepared

    def publish(node: int, *models: str) -> None:
        name = f"{FAKE_GROUP}-{node}"
        listed = [
            {"name": f"gpu-{number}", "attributes": {"model": {"string": model}}} for number, model in enumerate(models)
        ]
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        body: dict[str, Any] = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}}
        body["spec"] = {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": listed}
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))

    yield publish
    cluster.kubectl("delete", "resourceslices", "--all", "--ignore-not-found")
    cluster.kubectl("delete", "deviceclass", DRIVER, "--ignore-not-found")


def device_class(kube: Kube) -> None:
    of_driver = {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]}
    kube.apply(
        {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": DRIVER}, "spec": of_driver}
    )


def claiming(name: str = "duo", *, of_last: tuple[str, ...] = ()) -> dict[str, Any]:
    """Two GPUs for the first unit, one for the last."""
    stages: list[dict[str, Any]] = [
        {"name": "first", "factory": "some.module:first", "next": ["last"], "gpu": [0, 1], "tpSize": 2},
        {"name": "last", "process": "last", "factory": "some.module:last", "terminal": True, "gpu": [2]},
    ]
    claim = {"deviceClassName": DRIVER}
    groups = [
        {"name": "first", "placement": PLACED, "gpuClaim": claim},
        {"name": "last", "placement": PLACED, "gpuClaim": {**claim, "selectors": list(of_last)}},
    ]
    return pipeline(name, stages=stages, processGroups=groups)


def nodes(kube: Kube, name: str) -> dict[str, str]:
    """Unit -> the node of its pod; only pods that have one."""
    pods = kube.all("pods", f"omnipipeline.dev/pipeline={name},omnipipeline.dev/unit!=coordinator")
    units = {each["metadata"]["labels"]["omnipipeline.dev/unit"]: each["spec"].get("nodeName", "") for each in pods}
    return {unit: node for unit, node in units.items() if node}


def allocated(kube: Kube, name: str) -> dict[str, list[tuple[str, str]]]:
    """Unit -> (pool, device) of its claims."""
    found: dict[str, list[tuple[str, str]]] = {}
    for each in kube.all("resourceclaims", f"omnipipeline.dev/pipeline={name}"):
        results = each.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
        found.setdefault(each["metadata"]["labels"]["omnipipeline.dev/unit"], []).extend(
            (one["pool"], one["device"]) for one in results
        )
    return found


def templates(kube: Kube) -> set[str]:
    return kube.names("resourceclaimtemplates")


def of_deployments(kube: Kube) -> set[str]:
    """The templates that the unit revisions of all Deployments need, of those that history keeps, too."""
    made = kube.names("deployments", "omnipipeline.dev/pipeline,omnipipeline.dev/unit!=coordinator")
    return {f"{name}-gpus" for name in made}


def test_each_unit_claims_its_gpus_and_what_lacks_is_said(
    kube: Kube, operator: OperatorProcess, devices: Any, audit: Audit
) -> None:
    operator.start()
    kube.apply(claiming())
    found = eventually(lambda: (one := kube.condition("duo", "Scheduled")).get("reason") == "Unschedulable" and one)
    assert f"device class {DRIVER} does not exist" in found["message"]
    device_class(kube)
    eventually(lambda: "cannot allocate all claims" in kube.condition("duo", "Scheduled").get("message", ""))
    devices(2, "small")  # enough for the last unit alone, which might take one of the two that the first one needs
    eventually(lambda: nodes(kube, "duo") == {"last": f"{FAKE_GROUP}-2"}, what="the last unit has its GPU")
    devices(1, "small", "large")
    ready = kube.wait_ready("duo")
    assert (ready["status"]["gpus"]["requested"], ready["status"]["gpus"]["ready"]) == (3, 3)
    pool = f"{FAKE_GROUP}-1"
    assert nodes(kube, "duo") == {"first": pool, "last": f"{FAKE_GROUP}-2"}
    assert {unit: sorted(each) for unit, each in allocated(kube, "duo").items()} == {
        "first": [(pool, "gpu-0"), (pool, "gpu-1")],
        "last": [(f"{FAKE_GROUP}-2", "gpu-0")],
    }
    [pod, *_] = kube.all("pods", "omnipipeline.dev/unit=first")
    assert "nvidia.com/gpu" not in json.dumps(pod)

    before = templates(kube)
    assert before == of_deployments(kube) and len(before) == 2
    lost = next(each for each in before if "last" in each)
    kube("delete", "resourceclaimtemplate", lost)
    eventually(lambda: templates(kube) == before, what="a deleted template is made again")
    devices(3, "large")
    kube.apply(claiming(of_last=(LARGE,)))
    kube.wait_ready("duo")
    eventually(lambda: allocated(kube, "duo").get("last") == [(f"{FAKE_GROUP}-3", "gpu-0")], what="by its selector")
    eventually(lambda: templates(kube) == of_deployments(kube), what="one template for each kept revision")
    assert len(templates(kube)) == 3

    kube.wait_recorded("duo")
    audit.mark()
    assert operator.stop() == 0
    operator.start().managing()
    kube.apply(pipeline("other"))
    kube.wait_ready("other")
    assert not [each for each in audit.writes() if each[2].startswith("duo")], "another operator writes nothing of it"
    kube("delete", "omnipipeline", "duo")
    eventually(lambda: not templates(kube), what="no templates")
    eventually(lambda: not kube.all("resourceclaims"), what="no claims")


@pytest.fixture
def claims_right(prepared: tuple[Cluster, Path]) -> Iterator[Any]:
    """Takes the operator's right to claims away when called with False, and gives it back at the end."""
    cluster, _ = prepared
    role = json.loads(cluster.kubectl("get", "clusterrole", ACCOUNT, "-o", "json").stdout)

    def give(wanted: bool) -> None:
        rules = [each for each in role["rules"] if wanted or "resource.k8s.io" not in each["apiGroups"]]
        assert wanted or len(rules) < len(role["rules"])
        cluster.kubectl("patch", "clusterrole", ACCOUNT, "--type=merge", "-p", json.dumps({"rules": rules}))

    yield give
    give(True)


def test_without_the_right_to_claims_no_pod_runs_without_its_gpu_and_all_start_when_it_comes(
    kube: Kube, operator: OperatorProcess, devices: Any, claims_right: Any
) -> None:
    device_class(kube)
    for number in (1, 2):  # whichever unit is placed first, there is a node for the other one
        devices(number, "small", "small")
    claims_right(False)
    operator.start(**OFTEN)
    kube.apply(claiming())
    found = eventually(lambda: (one := kube.condition("duo", "Ready")).get("reason") == "DeviceClaimsMissing" and one)
    assert "gpuClaim needs ResourceClaimTemplate of resource.k8s.io/v1" in found["message"]
    assert kube.names("deployments", "omnipipeline.dev/unit!=coordinator") == set()
    kube.apply(pipeline("other"))
    kube.wait_ready("other")
    claims_right(True)
    assert operator.process is not None and operator.process.wait(patience(60)) == 1, (
        "its watches are chosen at its start"
    )
    operator.start(**OFTEN)
    kube.wait_ready("duo")
    claims_right(False)
    assert operator.process.wait(patience(60)) == 1
    before = {each["metadata"]["uid"] for each in kube.all("pods")}
    operator.start(**OFTEN).managing()
    kube.apply(pipeline("third"))
    kube.wait_ready("third")
    assert before <= {each["metadata"]["uid"] for each in kube.all("pods")}, "what runs is left alone"
    assert kube.condition("duo", "Ready")["status"] == "True"
