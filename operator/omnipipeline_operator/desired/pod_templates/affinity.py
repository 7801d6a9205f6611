"""Affinities of a unit's pods that follow from its placement: near other units, on nodes with certain GPUs.

Here: pure functions from settings of a plan to a pod's `affinity`. Not here: the pod (`pods`). An author's own rules of
the same kind are refused beside these (`validation.nearness`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import Manifest

GPU_PRODUCT: Final = "nvidia.com/gpu.product"  # a label that NVIDIA's feature discovery gives each node with GPUs
CLOSEST: Final = 100  # Kubernetes' largest weight; each wider domain counts half as much


def of(placement: Mapping[str, Any], pipeline: str) -> Manifest:
    """Empty where the placement asks for neither."""
    affinity: Manifest = {}
    if placement.get("gpuProducts"):
        affinity["nodeAffinity"] = _products(placement["gpuProducts"])
    if placement.get("near"):
        terms = _near(placement["near"], placement["nearTopologyKeys"], pipeline)
        affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": terms}
    return affinity


def _products(products: Sequence[str]) -> Manifest:
    wanted = {"key": GPU_PRODUCT, "operator": "In", "values": list(products)}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}}


def _near(units: Sequence[str], keys: Sequence[str], pipeline: str) -> list[Manifest]:
    """Pods of any revision count: those of a roll come near old and new ones."""
    weights = {key: max(CLOSEST >> index, 1) for index, key in enumerate(keys)}
    return [
        {
            "weight": weight,
            "podAffinityTerm": {
                "labelSelector": {"matchLabels": {naming.PIPELINE_LABEL: pipeline, naming.UNIT_LABEL: unit}},
                "topologyKey": key,
            },
        }
        for unit in units
        for key, weight in weights.items()
    ]
