"""A plan is made once per spec, and again when anything that it depends on changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from omnipipeline_operator.controller.revisions.plan_cache import KEPT, ManifestCache, PlanCache
from omnipipeline_operator.desired.children import Children
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_spec import planning
from omnipipeline_spec.types.errors import SpecError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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


@pytest.mark.parametrize("file", ["hello", "chat", "disaggregated", "qwen3_omni", "voice"])
def test_a_spec_that_was_checked_once_has_the_plan_of_one_checked_twice(file: str) -> None:
    read = yaml.safe_load((EXAMPLES / file / "pipeline.yaml").read_text())
    read["metadata"] |= {"namespace": "space", "uid": "u", "generation": 1}
    spec, plan = PlanCache().of(read, None)
    assert plan == planning.plan(spec, name=read["metadata"]["name"])


def test_manifests_are_made_once_for_a_plan_and_facts_and_those_of_the_pipelines_used_last_are_kept() -> None:
    plans, manifests = PlanCache(), ManifestCache(())
    spec, plan = plans.of(resource(), None)

    def of(name: str = "demo", **more: str) -> Children:
        owner = Owner(namespace="space", name=name, uid="u")
        facts = PodFacts(owner=owner, image=more.get("image", "i"), control_secret="s", allow_privileged=False)
        return manifests.of(spec, plan, facts)

    first = of()
    assert of() is first
    other = of(image="other")
    assert other is not first and of(image="other") is other
    edited = plans.of(resource(generation=2), None)[1]
    assert edited is not plan
    kept = of()
    for number in range(KEPT - 1):
        of(f"demo-{number}")
    assert of() is kept
    for number in range(KEPT):
        of(f"demo-{number}")
    assert of() is not kept
    manifests.forget(("space", "demo"))
    assert of() == kept
