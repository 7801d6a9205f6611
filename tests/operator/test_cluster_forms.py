"""The API server takes every child of a pipeline that the CRD and the planner take, on a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import children
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.kinds import PIPELINE, ROUTE
from omnipipeline_spec import loading, planning
from tests.contract.kubernetes_forms import CASES
from tests.operator.running import Kube
from tests.thoroughness import rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

#: Their rules span fields of the whole spec: the operator reports them.
BY_THE_PLANNER_ALONE = ("resources", "coordinator's resources")


@pytest.fixture
def api(kube: Kube) -> Iterator[client.ApiClient]:
    with config.new_client_from_config(str(kube.cluster.kubeconfig)) as connected:
        yield connected


def resource(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": PIPELINE.api_version, "kind": PIPELINE.name, "metadata": {"name": "duo"}, "spec": spec}


def refusal(api: client.ApiClient, namespace: str, manifest: dict[str, Any]) -> str | None:
    """Why the API server would not create an object; None: it would."""
    query = [("dryRun", "All"), ("fieldValidation", "Strict")]
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    path = kinds.of(manifest).path(namespace)
    request = api.param_serialize(
        "POST", path, query_params=query, header_params=headers, body=manifest, auth_settings=["BearerToken"]
    )
    answer = api.call_api(*request)
    text = answer.read()
    return None if answer.status < 400 else f"{manifest['kind']}: {json.loads(text)['message']}"


def made(spec: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    """All children of a pipeline, but for an HTTPRoute, which the cluster lacks."""
    parsed = loading.from_resource(resource(spec)).spec
    owner = Owner(namespace=namespace, name="duo", uid="u")
    facts = PodFacts(owner=owner, image="stage:1", control_secret="duo-control-x")
    found = children.manifests(parsed, planning.plan(parsed, name="duo"), facts, key=bytes(32))
    return [each for each in found if each["kind"] != ROUTE.name]


@pytest.mark.parametrize("field", rows(tuple(CASES), each_run=8))
def test_a_value_is_refused_in_the_pipeline_or_taken_in_every_child(
    field: str, kube: Kube, api: client.ApiClient
) -> None:
    make, taken, refused = CASES[field]
    for value in taken:
        assert refusal(api, kube.namespace, resource(make(value))) is None
        assert [why for each in made(make(value), kube.namespace) if (why := refusal(api, kube.namespace, each))] == []
    if field not in BY_THE_PLANNER_ALONE:
        assert [each for each in refused if refusal(api, kube.namespace, resource(make(each))) is None] == []
