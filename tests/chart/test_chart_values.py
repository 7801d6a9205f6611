"""Hostile values of the chart: each is refused by its schema, with the place; helm tells the person who installs.

Here: tables over the schema alone, as helm reads it. Not here: what helm renders from
values that are taken (test_chart_rendering.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from omnipipeline_spec.types import quantities
from tests.chart.rendering import CHART

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
VALIDATOR = Draft7Validator(SCHEMA)

#: Values whose own content is Kubernetes' business: the API server reads them.
FOREIGN = ("affinity", "topologySpreadConstraints")
#: Places where a null means something, or the program's own default.
NULLABLE = {
    "rbac.gatewayAPI",
    "rbac.deviceClaims",
    *("podSecurityContext", "podSecurityContext.runAsUser", "podSecurityContext.runAsGroup"),
    "pipelinePodSecurityContext",
    *(f"pipelinePodSecurityContext.{each}" for each in ("runAsUser", "runAsGroup", "fsGroup")),
}


def places(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every value of values.yaml, and every map of them."""
    for key, each in value.items() if isinstance(value, dict) else ():
        yield (*at, key)
        yield from places(each, (*at, key))


def with_value(path: tuple[str, ...], value: Any) -> Any:
    """All values, with this one; helm deletes what is null."""
    values = copy.deepcopy(VALUES)
    parent = values
    for key in path[:-1]:
        parent = parent.setdefault(key, {})
    if value is None:
        parent.pop(path[-1], None)
    else:
        parent[path[-1]] = value
    return values


def refusals(values: Any) -> list[str]:
    return [".".join(map(str, each.absolute_path)) + ": " + each.message for each in VALIDATOR.iter_errors(values)]


PLACES = [*places(VALUES)]


def test_the_values_as_they_are_hold() -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert refusals(VALUES) == []


def test_quantities_are_those_that_the_operator_reads() -> None:
    patterns = [each["anyOf"][0]["pattern"] for each in [SCHEMA["definitions"]["quantity"]]]
    patterns += [each["pattern"] for each in SCHEMA["properties"]["nodeModels"]["properties"]["bound"]["anyOf"][1:]]
    assert set(patterns) == {quantities.QUANTITY_PATTERN}


@pytest.mark.parametrize("path", PLACES, ids=".".join)
def test_a_value_of_another_type_is_refused(path: tuple[str, ...]) -> None:
    """A list for a map, a map for a text, a number for a switch…"""
    own: Any = VALUES
    for key in path:
        own = own[key]
    text = ".".join(path)
    others: dict[type, Any] = {bool: True, int: 2, str: "x", list: [[1]], dict: {"k": [1]}}
    taken = {type(own)} | ({int, str} if {"requests", "limits"} & {*path[:-1]} else set())  # quantities are either
    taken |= {bool, int} if text in NULLABLE else set()
    for kind, other in others.items():
        if kind not in taken:
            assert refusals(with_value(path, other)), f"{text}: {other!r}"


@pytest.mark.parametrize("name", ["networkPolicy.enabled", "crds.install", "rbac.create", "allowPrivileged", "image"])
def test_a_null_does_not_switch_off_what_is_on(name: str) -> None:
    """helm deletes the default, and the template would read it as false, or not at all."""
    assert refusals(with_value(tuple(name.split(".")), None))


def test_every_switch_must_be_true_or_false() -> None:
    for path in PLACES:
        own: Any = VALUES
        for key in path:
            own = own[key]
        assert not isinstance(own, bool) or refusals(with_value(path, None)), path


NOT_QUANTITIES: list[Any] = ["-1", -1, "x", "", "1 Gi", "1GiB", "1e99", True, {}]
HOSTILE: dict[str, list[Any]] = {
    "image.repository": ["", " ", "a b", "x/UPPER", "a//b", "-x", "x:y z", "http://a/b", "a" * 300, "ü", "a\nb"],
    "image.tag": ["a b", "-x", ":", "x" * 129, "a/b", "ü"],
    "image.digest": ["sha256:1", "x", "sha512:" + "0" * 64],
    "image.pullPolicy": ["", "always", "Sometimes"],
    "stageImage.repository": ["", "a b"],
    "stageImage.tag": ["a b", "x" * 129],
    "imagePullSecrets": [["name"], [{}], [{"name": ""}], [{"name": "A B"}], [{"name": 5}], {"name": "x"}],
    "nameOverride": ["A", "a_b", "-a", "a-", "x" * 54, "ü"],
    "fullnameOverride": ["A", "1a", "a.b", "a-", "x" * 54],
    "replicas": [-1, 1.5, 6, "1", 1e30],
    "watchNamespaces": ["team", ["A"], [""], ["a", "a"], ["x" * 64], [5], ["a b"], ["a,b"], {"a": "b"}],
    "serviceAccount.name": ["A", "a b", "a_b", "x" * 254],
    "serviceAccount.annotations": [{"a b": "x"}, {"a": 1}, ["a"]],
    "defaultResources.stage": [{"requests": {"cpu": each}} for each in NOT_QUANTITIES],
    "defaultResources.coordinator": [{"limits": {"memory": "4 GB"}}, {"limit": {}}, {"requests": ["cpu"]}],
    "resources": [{"limits": {"memory": "much"}}, {"requests": {"cpu": "-100m"}}, {"requests": {"a b": 1}}],
    "nodeModels.path": ["models", "/", "//", "/a//b", "/a/", "/a/../b", "/..", "/./a", "/a\nb", "/a" * 3000],
    "nodeModels.bound": ["-1Gi", "much", "200 Gi", 5],
    "nodeModels.nodeSelector": [{"a": 1}, {"a b": "c"}, {"a": "b c"}],
    "nodeModels.tolerations": ["x", ["x"], {"operator": "Exists"}],
    "podGroupScheduler": ["A", "my scheduler", "a_b", "-a", "a-", "a..b", ".a", "x" * 254, "ü", "a/b", "''"],
    "gpuPatienceSeconds": [-1, "300", 1e300, True],
    "gpuPrioritySeconds": [-1, "10", 1e300],
    "logFormat": ["", "JSON", "xml"],
    "limits.writesPerSecond": [0, -1, "400", 1e300],
    "limits.writeBurst": [0, 1.5, 1e300],
    "limits.workers": [0, 65, 1.5],
    "podAnnotations": [{"a b": "x"}, {"a": True}, {"a": 1}],
    "podLabels": [
        *({"a": 1}, {"a": "b c"}, {"a": "x" * 64}, {"/a": "b"}, {"a/b/c": "d"}),
        *({"app.kubernetes.io/name": "other"}, {"app.kubernetes.io/instance": "other"}, {"helm.sh/chart": "x"}),
    ],
    "podSecurityContext.runAsUser": [0, -1, 1.5, "1000", 2**31],
    "pipelinePodSecurityContext.fsGroup": [0, -1, 2**31],
    "nodeSelector": [{"a": True}, {"a": "b c"}, {"a b": "c"}, ["a"]],
    "tolerations": [["x"], {"operator": "Exists"}],
    "priorityClassName": ["A", "a b", "x" * 254],
    "podDisruptionBudget.maxUnavailable": [0, -1, 1.5, "50%", 1e9],
    "scrapers": [[{}], [{"namespace": "a"}], ["a"], {"podSelector": {}}],
    "monitoring.podMonitor.interval": ["", "0s", "30", "-1s", "1h", "30 s", 30],
    "monitoring.podMonitor.labels": [{"a": 1}, {"a b": "c"}, {"helm.sh/chart": "x"}],
    "monitoring.dashboard.labels": [{"grafana_dashboard": 1}],
    "tests.namespace": ["A", "a b", "x" * 64, 5],
    "tests.timeoutSeconds": [0, 29, 1.5, "240", 1e9],
}


@pytest.mark.parametrize("path", HOSTILE)
def test_a_hostile_value_is_refused_and_named(path: str) -> None:
    for value in HOSTILE[path]:
        found = refusals(with_value(tuple(path.split(".")), value))
        assert found and all(each.startswith(path) for each in found), (path, value, found)


TAKEN: dict[str, list[Any]] = {
    "image.repository": ["registry.example:5000/team/omni__x", "localhost/a.b/c-d", "omni", "REGISTRY.example/a"],
    "image.tag": ["", "v1.2.3", "_x", "1"],
    "replicas": [0, 5],
    "watchNamespaces": [[], ["123", "true", "a-b"]],
    "serviceAccount.annotations": [{"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x y"}],
    "defaultResources.stage": [{"requests": {"cpu": each}} for each in (1, 0.5, "50m", "1e3", ".5", "2Gi")],
    "nodeModels.path": ["", "/var/lib/models", "/a b/..c/.d"],
    "nodeModels.bound": ["", "200Gi", "1e12"],
    "podGroupScheduler": ["", "default-scheduler", "scheduler-plugins-scheduler", "a.b"],
    "podLabels": [{"team": "x", "example.org/Team_1": ""}],
    "podAnnotations": [{"cluster-autoscaler.kubernetes.io/safe-to-evict": "no"}],
    "priorityClassName": ["", "system-cluster-critical", "1"],
    "monitoring.podMonitor.interval": ["500ms", "30s", "1m"],
    "tests.namespace": ["", "x" * 63],
}


@pytest.mark.parametrize("path", TAKEN)
def test_a_usual_value_is_taken(path: str) -> None:
    for value in TAKEN[path]:
        assert refusals(with_value(tuple(path.split(".")), value)) == []
