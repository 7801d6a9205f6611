"""The CRD on a real API server: it is taken, every rule works, and every rule is needed."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from omnipipeline_spec import loading, planning
from omnipipeline_spec.generating import celrules, schema
from omnipipeline_spec.types import errors
from omnipipeline_spec.types.resource import API_VERSION, GROUP, KIND, PLURAL, VERSION
from tests import valid_specs
from tests.cluster_kit import Cluster
from tests.contract.rulecases import CASES, Document, pair, stage
from tests.patience import patience
from tests.thoroughness import examples

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

Key = tuple[str, str]


def rule_keys() -> list[Key]:
    """Every rule of the types; the root's has tests of its own."""
    return [(struct.__name__, rule.message) for struct, rules in celrules.RULES.items() for rule in rules]


@pytest.fixture(scope="module")
def api(api_server: Cluster) -> Iterator[client.ApiClient]:
    with config.new_client_from_config(str(api_server.kubeconfig)) as connected:
        yield connected


@pytest.fixture(scope="module")
def crd(api: client.ApiClient) -> None:
    """The CRD as it is shipped."""
    _install(api, [schema.crd()])


@pytest.fixture(scope="module")
def mutants(api: client.ApiClient) -> Iterator[dict[Key, str]]:
    """One CRD per rule that lacks this rule, each under a group of its own."""
    groups = {key: f"r{index}.omnipipeline.test" for index, key in enumerate(rule_keys())}
    crds = [_without(key, group) for key, group in groups.items()]
    _install(api, crds)
    yield groups
    extensions: Any = client.ApiextensionsV1Api(api)  # it takes plain dicts, too; its types do not say so
    for each in crds:
        extensions.delete_custom_resource_definition(each["metadata"]["name"])


def _without(key: Key, group: str) -> dict[str, Any]:
    """The CRD under another group, without one rule."""
    crd = copy.deepcopy(schema.crd())
    crd["metadata"]["name"] = f"omnipipelines.{group}"
    crd["spec"]["group"] = group
    crd["spec"]["names"] |= {"shortNames": [], "categories": []}
    struct, message = key
    known = {
        rule.rule
        for kind, rules in celrules.RULES.items()
        if kind.__name__ == struct
        for rule in rules
        if rule.message == message
    }
    assert len(known) == 1
    assert _drop(crd, next(iter(known))) >= 1
    return crd


def _drop(node: Any, rule: str) -> int:
    """Remove a rule wherever it stands (a type that is used twice has it twice); how often it stood."""
    if isinstance(node, list):
        return sum(_drop(item, rule) for item in node)
    if not isinstance(node, dict):
        return 0
    kept = [each for each in node.get("x-kubernetes-validations", []) if each["rule"] != rule]
    dropped = len(node.get("x-kubernetes-validations", [])) - len(kept)
    if dropped:
        node["x-kubernetes-validations"] = kept
    return dropped + sum(_drop(value, rule) for value in node.values())


def _install(api: client.ApiClient, crds: list[dict[str, Any]]) -> None:
    extensions: Any = client.ApiextensionsV1Api(api)  # it takes plain dicts, too; its types do not say so
    for each in crds:
        try:
            extensions.create_custom_resource_definition(each)
        except ApiException as error:
            if error.status != 409:
                raise
            stored = extensions.read_custom_resource_definition(each["metadata"]["name"])
            extensions.replace_custom_resource_definition(
                each["metadata"]["name"],
                {**each, "metadata": {**each["metadata"], "resourceVersion": stored.metadata.resource_version}},
            )
    for each in crds:
        _until_served(api, each)


def _until_served(api: client.ApiClient, crd: dict[str, Any], deadline_s: float = 60) -> None:
    """Wait until the API server enforces this schema: it answers with the rule for names, which all of them have."""
    group = crd["spec"]["group"]
    ends = time.monotonic() + deadline_s
    while (refusal := _refusal(api, group, pair(), name="x-peers")) is None or "end in -peers" not in refusal:
        assert time.monotonic() < ends, f"{group} is not served: {refusal}"
        time.sleep(0.1)


def _refusal(
    api: client.ApiClient, group: str, spec: Document, *, name: str = "case", strict: bool = True
) -> str | None:
    """The API server's objections to a resource; None when it would take it."""
    return "; ".join(_objections(api, group, spec, name=name, strict=strict)) or None


def _objections(
    api: client.ApiClient, group: str, spec: Document, *, name: str = "case", strict: bool = True
) -> list[str]:
    body = {"apiVersion": f"{group}/{VERSION}", "kind": "OmniPipeline", "metadata": {"name": name}, "spec": spec}
    try:
        client.CustomObjectsApi(api).create_namespaced_custom_object(
            group,
            VERSION,
            "default",
            PLURAL,
            body,
            dry_run="All",
            field_validation="Strict" if strict else "Ignore",
        )
    except ApiException as error:
        if error.status == 404:
            return ["not served"]
        causes = json.loads(error.body or "{}").get("details", {}).get("causes")
        return [f"{cause['field']}: {cause['message']}" for cause in causes] if causes else [str(error.body)]
    return []


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    assert sorted(CASES) == sorted(rule_keys())


@pytest.mark.proves("wrong-spec")
@pytest.mark.parametrize("key", sorted(CASES), ids=lambda key: f"{key[0]}: {key[1]}")
def test_each_rule_takes_the_good_and_refuses_the_bad_and_offline_agrees(
    key: Key, api: client.ApiClient, crd: None
) -> None:
    good, bad = CASES[key]
    assert _refusal(api, GROUP, good) is None
    [objection] = _objections(api, GROUP, bad)  # no other: without this rule the API server would take it
    assert key[1] in objection and "Invalid value" in objection
    assert offline_faults(good) == ()
    assert offline_faults(bad) != ()


@pytest.mark.nightly  # 65 large definitions; the test above shows the same by the number of objections
@pytest.mark.parametrize("key", sorted(CASES), ids=lambda key: f"{key[0]}: {key[1]}")
def test_without_a_rule_its_bad_resource_is_taken(key: Key, api: client.ApiClient, mutants: dict[Key, str]) -> None:
    _, bad = CASES[key]
    assert _refusal(api, mutants[key], bad) is None


def offline_faults(spec: Document) -> tuple[errors.Fault, ...]:
    resource = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "case"}, "spec": spec}
    try:
        planning.plan(loading.from_resource(resource).spec)
    except errors.InvalidPipeline as error:
        return error.faults
    return ()


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("voice", True),
        ("a" * 38, True),
        ("a" * 39, False),
        ("9lives", False),
        ("dotted.name", False),
        ("voice-peers", False),
    ],
)
def test_a_pipelines_name_leaves_room_for_its_pods(name: str, taken: bool, api: client.ApiClient, crd: None) -> None:
    refusal = _refusal(api, GROUP, pair(), name=name)
    assert (refusal is None) is taken, refusal


def test_without_the_roots_rule_a_long_name_is_taken(api: client.ApiClient) -> None:
    crd = schema.crd()
    crd["metadata"]["name"] = "omnipipelines.root.omnipipeline.test"
    crd["spec"]["group"] = "root.omnipipeline.test"
    crd["spec"]["names"] |= {"shortNames": [], "categories": []}
    del crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["x-kubernetes-validations"]
    extensions: Any = client.ApiextensionsV1Api(api)  # it takes plain dicts, too; its types do not say so
    extensions.create_custom_resource_definition(crd)
    try:
        ends = time.monotonic() + 30
        while (refusal := _refusal(api, "root.omnipipeline.test", pair(), name="voice-peers")) == "not served":
            assert time.monotonic() < ends
            time.sleep(0.1)
        assert refusal is None
    finally:
        extensions.delete_custom_resource_definition(crd["metadata"]["name"])


def test_a_stage_rule_names_its_stage(api: client.ApiClient, crd: None) -> None:
    refusal = _refusal(api, GROUP, pair({"gpuMemory": {"fraction": 0.5}}))
    assert refusal is not None and "stage a has gpuMemory, but no gpu" in refusal


def test_the_largest_pipeline_is_within_the_cost_limit(api: client.ApiClient, crd: None) -> None:
    names = [f"{index:02d}".join(["s", "x" * 60]) for index in range(64)]
    assert {len(name) for name in names} == {63}
    stages = [
        stage(
            name,
            process=name,
            gpu=[index],
            gpuMemory={"fraction": 0.5},
            streamTo=names[index + 1 : index + 17],
            **({"next": names[index + 1 : index + 17]} if index < 63 else {}),
            **({"waitFor": names[max(0, index - 16) : index], "mergeFn": "work:merge"} if index else {}),
            projectPayload=dict.fromkeys(names[index + 1 : index + 17], "work:project"),
        )
        for index, name in enumerate(names)
    ]
    groups = [{"name": name, "replicas": 2} for name in names]
    overrides: dict[str, Any] = {name: {"x": 1} for name in names}
    document = {"stages": stages, "processGroups": groups, "runtimeOverrides": overrides, "entryStage": names[0]}
    ends = time.monotonic() + patience(300)
    while (refusal := _refusal(api, GROUP, document)) is not None and '"reason":"Timeout"' in refusal:
        assert time.monotonic() < ends, refusal  # it takes seconds of a processor; other programs had it
    assert refusal is None
    assert offline_faults(document) == ()


def test_an_unknown_key_is_refused_when_the_client_asks_for_strictness(api: client.ApiClient, crd: None) -> None:
    refusal = _refusal(api, GROUP, pair(modelpath="x"))
    assert refusal is not None and "modelpath" in refusal
    assert _refusal(api, GROUP, pair(modelpath="x"), strict=False) is None  # pruned in silence


def test_kubectl_takes_the_file_as_it_is_shipped(api_server: Cluster, crd: None) -> None:
    applied = api_server.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", str(schema.PATH)
    )
    assert "serverside-applied" in applied.stdout


@pytest.mark.proves("offline-and-kubectl")
def test_a_pipeline_means_the_same_through_kubectl_and_offline(api_server: Cluster, crd: None) -> None:
    text = _ODD_YAML
    api_server.kubectl("apply", "--validate=strict", "-f", "-", stdin=text)
    try:
        stored = json.loads(api_server.kubectl("get", "omni", "odd", "-o", "json").stdout)
    finally:
        api_server.kubectl("delete", "omni", "odd", "--wait=false")
    ours, theirs = loading.loads(text), loading.from_resource(stored)
    assert planning.plan(ours.spec, name="odd") == planning.plan(theirs.spec, name="odd")
    assert ours.spec == theirs.spec


_ODD_YAML = """
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {name: odd}
spec:
  gpuMemoryLimit: 1.0
  runtimeOverrides:
    first: {0o10: eight, yes: yes, 1.0: one}
  stages:
  - name: first
    process: p
    factory: "work:make"
    next: [second]
    gpu: [0x0]
    gpuMemory: {bytes: 1073741824}
    factoryArgs: {a: 1e3, b: 0o17, c: 017, d: 08, e: 1_000, f: 1.0, g: 1.5, h: on, i: "on", j: 2001-01-01, k: 12:30:45,
      l: ~, m: [], n: {}, o: 1e21, p: .5, q: -0.0, r: 0x1F, s: 1e400, t: {z: 1, a: [1.0, 2]}, u: ""}
  - {name: second, process: p, factory: "work:make", terminal: true, gpu: [0]}
"""


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(document=valid_specs.documents())
def test_what_the_planner_takes_the_api_server_takes(document: Document, api: client.ApiClient, crd: None) -> None:
    assert offline_faults(document) == ()
    assert _refusal(api, GROUP, document) is None
