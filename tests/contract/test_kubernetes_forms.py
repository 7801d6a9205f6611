"""A value that the API server would refuse in a child is refused in the pipeline, with its place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.kubernetes_forms import CASES
from tests.contract.rulecases import pair
from tests.contract.test_crd_rules import offline_faults

GPU = {"gpu": [0], "gpuMemory": {"fraction": 0.4}}


@pytest.mark.parametrize("field", CASES)
def test_a_value_that_no_child_can_have_is_refused_with_its_place(field: str) -> None:
    make, taken, refused = CASES[field]
    assert [each for each in taken if offline_faults(make(each)) != ()] == []
    assert [each for each in refused if offline_faults(make(each)) == ()] == []


@pytest.mark.parametrize(
    "first, second, fault",
    [
        (
            {"requests": {"cpu": 4}},
            {"limits": {"cpu": 2}},
            "processGroups[1].resources.limits.cpu: 2 is less than the request of 4; 'a', 'b' share a pod, and their "
            "resources are added",
        ),
        (
            {"requests": {"foo/bar": 1}, "limits": {"foo/bar": 1}},
            {"limits": {"foo/bar": 1}},
            "processGroups[1].resources.requests.foo/bar: 1 needs a limit of the same amount, not 2; 'a', 'b' share a "
            "pod, and their resources are added",
        ),
        ({"requests": {"cpu": 4}, "limits": {"cpu": 4}}, {"requests": {"cpu": 1}, "limits": {"cpu": 2}}, None),
        ({"requests": {"nvidia.com/gpu": 1}}, {"limits": {"nvidia.com/gpu": 1}}, None),
    ],
)
def test_amounts_of_groups_in_one_pod_must_fit_together(
    first: dict[str, Any], second: dict[str, Any], fault: str | None
) -> None:
    groups = [{"name": "a", "resources": first}, {"name": "b", "resources": second}]
    found = [str(each) for each in offline_faults(pair(GPU, GPU, processGroups=groups))]
    assert found == ([] if fault is None else [fault])


@pytest.mark.parametrize(
    "field, value, fault",
    [
        (
            "priorityClassName",
            "A b",
            "processGroups[0].placement.priorityClassName: 'A b' is not a name of Kubernetes: lower case letters, "
            "digits, - and ., a letter or digit beside each .",
        ),
        (
            "nodeSelector",
            {"a/b/c": "v"},
            "processGroups[0].placement.nodeSelector['a/b/c']: 'a/b/c' is not the name of a label, such as "
            "example.com/name",
        ),
        (
            "resources",
            {"requests": {"gpu": 1}},
            "processGroups[0].resources.requests.gpu: 'gpu' is not a resource of containers: cpu, memory, "
            "ephemeral-storage, hugepages-2Mi, or like nvidia.com/gpu",
        ),
        (
            "tolerations",
            {},
            "processGroups[0].placement.tolerations[0].operator: must be Exists where key is unset: all taints are "
            "tolerated",
        ),
    ],
)
def test_a_refusal_says_what_the_value_must_be(field: str, value: Any, fault: str) -> None:
    assert [str(each) for each in offline_faults(CASES[field][0](value))] == [fault]
