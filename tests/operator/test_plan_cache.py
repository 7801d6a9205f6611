"""A plan is made once per spec, and again when anything that it depends on changes."""

from __future__ import annotations

from typing import Any

import pytest

from omnipipeline_operator.controller.plan_cache import PlanCache
from omnipipeline_spec.types.errors import SpecError


def resource(*, uid: str = "u", generation: int = 1, factory: str = "m:a") -> dict[str, Any]:
    stage = {"name": "a", "process": "a", "factory": factory, "terminal": True}
    return {
        "apiVersion": "omnipipeline.dev/v1alpha1",
        "kind": "OmniPipeline",
        "metadata": {"name": "demo", "namespace": "space", "uid": uid, "generation": generation},
        "spec": {"stages": [stage]},
    }


def test_the_same_spec_has_the_same_plan_and_any_other_has_its_own() -> None:
    plans = PlanCache()
    first = plans.of(resource(), None)[1]
    assert plans.of(resource(), None)[1] is first
    edited = plans.of(resource(generation=2, factory="m:b"), None)[1]
    assert edited.current.revision != first.current.revision
    anew = plans.of(resource(uid="v", generation=2), None)[1]
    assert anew.current.revision == first.current.revision
    rekeyed = plans.of(resource(uid="v", generation=2), "occasion")[1]
    assert rekeyed.current.revision != first.current.revision


def test_a_bad_spec_leaves_no_plan_behind() -> None:
    plans = PlanCache()
    plans.of(resource(), None)
    for _ in range(2):
        with pytest.raises(SpecError):
            plans.of(resource(generation=2, factory="no factory"), None)


def test_shared_memory_between_pods_is_refused_with_the_edge() -> None:
    apart = resource()
    apart["spec"]["relayBackend"] = "shm"
    apart["spec"]["stages"] = [
        {"name": "a", "process": "a", "factory": "m:a", "next": ["b"]},
        {"name": "b", "process": "b", "factory": "m:b", "terminal": True},
    ]
    with pytest.raises(SpecError, match=r"relayBackend: is shm, .* 'a' and 'b' run in different pods"):
        PlanCache().of(apart, None)
