"""The API server's own "restricted" admission and the operator's rule agree about the same pod templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omnipipeline_operator.desired import children
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_spec import planning
from tests.operator import podsecurity_cases
from tests.operator.running import Kube
from tests.operator.test_children import OWNER, spec

pytestmark = pytest.mark.cluster
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


def pod_of(patch: Any, name: str) -> dict[str, Any]:
    """The pod that an operator would make that allows everything."""
    facts = PodFacts(owner=OWNER, image="stage:1", control_secret="s", allow_privileged=True)
    given = spec(processGroups=[{"name": "mouth", "podTemplate": patch}])
    made = children.children(given, planning.plan(given, name="demo"), facts)
    template = next(each.deployment for each in made.workloads if each.unit == "mouth")["spec"]["template"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}


def dry_run(kube: Kube, pods: list[dict[str, Any]]) -> dict[str, str]:
    """Admission's objection to each pod that it refused, by the pod's name."""
    documents = "\n---\n".join(json.dumps(pod) for pod in pods)
    done = kube.cluster.kubectl(
        *("-n", kube.namespace, "create", "--dry-run=server", "-o", "name", "-f", "-"), stdin=documents, check=False
    )
    refused = [line for line in done.stderr.splitlines() if "violates PodSecurity" in line]
    assert len(refused) + len(done.stdout.split()) == len(pods), done.stderr
    return {pod["metadata"]["name"]: line for pod in pods for line in refused if f'"{pod["metadata"]["name"]}"' in line}


def test_what_admission_refuses_is_what_the_operator_refuses(kube: Kube) -> None:
    kube.cluster.kubectl("label", "namespace", kube.namespace, RESTRICTED)
    standard = [patch for patch, place in podsecurity_cases.REFUSED if place not in podsecurity_cases.OURS_ALONE]
    bad = {f"bad-{index}": patch for index, patch in enumerate(standard) if "privileged" not in json.dumps(patch)}
    good = {f"good-{index}": patch for index, patch in enumerate(podsecurity_cases.ACCEPTED) if plain(patch)}
    refused = dry_run(kube, [pod_of(patch, name) for name, patch in {**bad, **good}.items()])
    assert set(refused) == set(bad)


def plain(patch: Any) -> bool:
    """Whether the author has no containers: the operator that allows everything completes none of them."""
    spec = patch.get("spec", {})
    return "initContainers" not in spec and all(one["name"] == "stage" for one in spec.get("containers", ()))
