"""GPUs by claims in pods that run: a real kubelet asks a driver, whose absence and errors the status names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.claim_driver import ClaimDriver
from tests.cluster.installing import PIPELINE, Installed, ask, pipeline, url, wait_for, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

DRIVER = "gpu.example.com"
NAME = "claimed"
NODE = "node-1"  # the kit's
UNIT = "omnipipeline.dev/unit"
KUBELET = Path(os.environ.get("CLUSTER_DIR", "/run/omni-cluster")) / "state" / "kubelet"
CODE = """
import stage_runtime as omni

def first():
    return lambda payload: payload.data

def last():
    def run(payload):
        yield omni.Chunk(omni.Text("claimed"))
    return run
"""


@pytest.fixture
def devices(installed: Installed) -> Iterator[None]:
    """Two devices of the node, as the driver would publish them."""
    of_driver = {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]}
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    listed = [{"name": f"gpu-{number}"} for number in range(2)]
    spec = {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": listed}
    made: list[tuple[str, dict[str, Any]]] = [("DeviceClass", of_driver), ("ResourceSlice", spec)]
    for kind, content in made:
        body = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": DRIVER}, "spec": content}
        installed.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    yield
    installed.kubectl("delete", "omnipipeline", NAME, "--ignore-not-found", "--timeout=60s")
    for kind, _ in made:
        installed.cluster.kubectl("delete", kind.lower(), DRIVER, "--ignore-not-found")


def claimed() -> dict[str, Any]:
    """Two groups with a GPU each."""
    stages: list[dict[str, object]] = [
        {"name": "first", "process": "front", "factory": "made:first", "next": ["last"], "gpu": [0]},
        {"name": "last", "process": "back", "factory": "made:last", "terminal": True, "gpu": [1]},
    ]
    claim = {"gpuClaim": {"deviceClassName": DRIVER}}
    return pipeline(NAME, stages, code=CODE, processGroups=[{"name": name, **claim} for name in ("front", "back")])


def unit_says(installed: Installed, name: str, *words: str) -> bool:
    units = {each["name"]: each for each in installed.status(NAME).get("units", ())}
    said = f"{units.get(name, {}).get('reason')}: {units.get(name, {}).get('message')}"
    return all(word in said for word in words)


def try_again(installed: Installed) -> None:
    """A kubelet prepares a pod's claims again after 90 s, and those of a new pod at once."""
    installed.kubectl("delete", "pods", "-l", f"{PIPELINE}={NAME},{UNIT}!=coordinator", "--wait=false")


def test_pods_with_claims_start_once_the_driver_has_prepared_them_and_its_troubles_are_named(
    installed: Installed, devices: None
) -> None:
    installed.apply(claimed())
    reason = "FailedPrepareDynamicResources"
    wait_for("no driver for front", lambda: unit_says(installed, "front", reason, DRIVER), timeout_s=120)
    wait_for("no driver for back", lambda: unit_says(installed, "back", reason, DRIVER), timeout_s=120)
    shown = installed.plugin("status", NAME).stdout
    assert reason in shown and DRIVER in shown, shown

    with ClaimDriver(DRIVER, KUBELET, refusal="the GPU has fallen off the bus") as driver:
        wait_for("it is registered", driver.registered.is_set, timeout_s=60)
        try_again(installed)
        wait_for("its error is named", lambda: unit_says(installed, "front", reason, "off the bus"), timeout_s=120)
        assert driver.prepared == {}
        driver.refusal = ""
        try_again(installed)
        wait_ready(installed.cluster, installed.namespace, NAME)

        def in_use() -> bool:
            claims = {each["metadata"]["uid"]: each["metadata"]["name"] for each in installed.all("resourceclaims")}
            return driver.prepared == claims and len(claims) == 2

        wait_for("the claims of the pods that run alone are prepared", in_use, timeout_s=60)
        assert ask(url(installed.cluster, installed.namespace, NAME)) == "claimed"

        installed.kubectl("delete", "omnipipeline", NAME, "--timeout=60s")
        wait_for("all is given back", lambda: not driver.prepared, timeout_s=120)
        wait_for("no claim is left", lambda: not installed.all("resourceclaims"), timeout_s=60)
