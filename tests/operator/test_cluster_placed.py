"""Pods stand near those that they exchange much with, on nodes with the wanted GPUs, by a real scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.running import FAKE_GROUP, TOLERATED, Kube, OperatorProcess, pipeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

RACK, PRODUCT = "omni-test/rack", "nvidia.com/gpu.product"


def placed(near: list[str], *products: str) -> dict[str, Any]:
    """All four GPUs of a node for the last unit, so that the first one, which is made first, finds none there."""
    stages: list[dict[str, Any]] = [
        {"name": "first", "process": "first", "factory": "some.module:first", "next": ["last"], "gpu": [4]},
        {
            "name": "last",
            "process": "last",
            "factory": "some.module:last",
            "terminal": True,
            "gpu": [0, 1, 2, 3],
            "tpSize": 4,
        },
    ]
    keys = ["kubernetes.io/hostname", RACK]
    first = {"tolerations": TOLERATED, "near": near, "nearTopologyKeys": keys}
    last = {"tolerations": TOLERATED, "gpuProducts": list(products)}
    groups = [{"name": "first", "placement": first}, {"name": "last", "placement": last}]
    return pipeline("placed", stages=stages, processGroups=groups)


def test_a_unit_is_in_the_rack_of_the_one_that_it_is_near_on_a_gpu_type_that_will_do(
    kube: Kube, operator: OperatorProcess
) -> None:
    nodes = sorted(
        (one["metadata"]["name"] for one in kube.all("nodes", f"fake={FAKE_GROUP}")),
        key=lambda name: int(name.rpartition("-")[2]),
    )
    assert len(nodes) >= 3
    for index, node in enumerate(nodes):  # the last two share a rack, and the last one alone has the product
        rack = "far" if index >= len(nodes) - 2 else f"rack-{index}"
        product = "wanted" if node == nodes[-1] else "other"
        kube("label", "node", node, f"{RACK}={rack}", f"{PRODUCT}={product}", "--overwrite")
    operator.start()
    try:
        kube.apply(placed(["last"], "absent", "wanted"))
        kube.wait_ready("placed")
        pods = kube.all("pods", "omnipipeline.dev/pipeline=placed,omnipipeline.dev/unit!=coordinator")
        at = {pod["metadata"]["labels"]["omnipipeline.dev/unit"]: pod["spec"]["nodeName"] for pod in pods}
        assert at == {"first": nodes[-2], "last": nodes[-1]}
    finally:
        for node in nodes:
            kube("label", "node", node, f"{RACK}-", f"{PRODUCT}-")
