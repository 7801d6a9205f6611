"""Affinities of pods that follow from `placement.near` and `placement.gpuProducts`, and where a scheduler puts them."""

from __future__ import annotations

from typing import Any

from omnipipeline_operator.desired.pod_templates import affinity

KEYS = ["kubernetes.io/hostname", "nvidia.com/gpu.clique", "rack"]


def term(weight: int, unit: str, key: str) -> dict[str, Any]:
    labels = {"omnipipeline.dev/pipeline": "duo", "omnipipeline.dev/unit": unit}
    return {"weight": weight, "podAffinityTerm": {"labelSelector": {"matchLabels": labels}, "topologyKey": key}}


def test_pods_prefer_the_closest_domain_of_each_unit_most() -> None:
    assert affinity.of({"near": ["ear", "mouth"], "nearTopologyKeys": KEYS}, "duo") == {
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                term(100, "ear", KEYS[0]),
                term(50, "ear", KEYS[1]),
                term(25, "ear", KEYS[2]),
                term(100, "mouth", KEYS[0]),
                term(50, "mouth", KEYS[1]),
                term(25, "mouth", KEYS[2]),
            ]
        }
    }


def test_any_of_the_gpu_types_will_do_and_one_must_be_there() -> None:
    wanted = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["L4", "A10G"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
    assert affinity.of({"gpuProducts": ["L4", "A10G"]}, "duo") == {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    }


def test_a_placement_that_asks_for_neither_has_no_affinity_of_ours() -> None:
    assert affinity.of({"nodeSelector": {"a": "b"}, "near": [], "gpuProducts": []}, "duo") == {}
