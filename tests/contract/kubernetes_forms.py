"""Values that become a part of Kubernetes' objects: some that its API server takes there, and some that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.contract.rulecases import Document, pair

LONG = "a" * 64
NAMES = (["a", "9a", "a.b-c"], ["A b", "UP", "a_b", "a..b", "a.-b", "-a", "a.", ".", "é", "a\nb", "a/b", "a" * 254])
HOSTS = (
    ["a", "a.example.org", "*.example.org"],
    ["UP.org", "*", "*.*.a", "a:80", "http://a", "10.0.0.1", "::1", "a.b."],
)
LABELS = ["a", "A_b.c-1", "example.com/Name", "a/b"]
NO_LABELS = ["A b", "a/b/c", "a/", "/a", "a..b/c", "_a", "é", LONG, f"a/{LONG}"]
VALUES = (["", "a", "A_b.c-1", "NVIDIA-H100-80GB-HBM3"], ["A b", "_a", "-", "a/b", "é", LONG])
DEVICES = (["example.com/gpu", "foo/BAR"], ["gpu", "A b", "UP/x", "foo/", "foo/a b", "requests.foo/bar", f"a/{LONG}"])
KEYS = (["a", ".a", "A_b-c.d"], ["", "A b", "a/b", ".", "..", "..a", "é"])
FIELDS = (
    ["metadata.name", "metadata.labels['a/B']", "metadata.annotations['UP/b']", "spec.nodeName", "status.podIPs"],
    ["", "name", "metadata.nope", "metadata.labels", "metadata.labels['']", "metadata.labels['A b']", "status.phase"],
)
AMOUNTS = (["limits.cpu", "requests.ephemeral-storage", "limits.hugepages-2Mi"], ["", "cpu", "limits.x", "LIMITS.cpu"])
TOLERATIONS = (
    [{"operator": "Exists"}, {"key": "k"}, {"key": "k", "effect": "NoExecute", "tolerationSeconds": -1}],
    [{}, {"value": "v"}, {"key": "k", "operator": "Exists", "value": "v"}, {"key": "k", "tolerationSeconds": 5}],
)
RESOURCES = (
    [
        {"requests": {"cpu": "0.0001"}, "limits": {"memory": "1e3", "foo/bar": 2}},
        {"requests": {"foo/bar": "2"}, "limits": {"foo/bar": "2000m"}},
        {"requests": {"hugepages-2Mi": "4Mi"}, "limits": {"hugepages-2Mi": "4096Ki"}},
    ],
    [
        {"requests": {"gpu": 1}},
        {"limits": {"storage": 1}},
        {"limits": {"requests.foo/bar": 1}},
        {"limits": {"UP/x": 1}},
        {"limits": {"foo/bar": "1500m"}},
        {"limits": {"foo/bar": "9" * 20}},
        {"requests": {"foo/bar": 1}},
        {"requests": {"foo/bar": 1}, "limits": {"foo/bar": 2}},
        {"limits": {"hugepages-2Mi": "3Mi"}},
        {"requests": {"hugepages-2Mi": "2Mi"}},
        {"requests": {"cpu": 2}, "limits": {"cpu": 1}},
    ],
)


def _group(**fields: Any) -> Document:
    """A process group with a GPU."""
    return pair({"gpu": [0]}, processGroups=[{"name": "a", **fields}])


def _placed(**placement: Any) -> Document:
    return _group(placement=placement)


def _coordinator(**fields: Any) -> Document:
    return pair(coordinator=fields)


def _variable(**source: Any) -> Document:
    return pair(env=[{"name": "A", "valueFrom": source}])


def _unit(resource: str) -> Callable[[Any], Document]:
    return lambda value: _variable(resourceFieldRef={"resource": resource, "divisor": value})


def _cache(**fields: Any) -> Document:
    return pair(modelCache={"type": "PersistentVolumeClaim", **fields})


def _labelled(names: list[str], refused: list[str]) -> tuple[list[Any], list[Any]]:
    return [{each: "v"} for each in names], [{each: "v"} for each in refused]


Case = tuple[Callable[[Any], Document], list[Any], list[Any]]
#: Field -> (a pipeline with a value of it, values that are taken, values that are refused).
CASES: dict[str, Case] = {
    "priorityClassName": (lambda value: _placed(priorityClassName=value), *NAMES),
    "runtimeClassName": (lambda value: _coordinator(placement={"runtimeClassName": value}), *NAMES),
    "nodeSelector": (lambda value: _placed(nodeSelector=value), *_labelled(LABELS, NO_LABELS)),
    "nodeSelector's value": (lambda value: _coordinator(placement={"nodeSelector": {"k": value}}), *VALUES),
    "tolerations": (lambda value: _placed(tolerations=[value]), *TOLERATIONS),
    "coordinator's tolerations": (lambda value: _coordinator(placement={"tolerations": [value]}), *TOLERATIONS),
    "toleration's key": (lambda value: _placed(tolerations=[{"key": value}]), LABELS, NO_LABELS),
    "toleration's value": (lambda value: _placed(tolerations=[{"key": "k", "value": value}]), *VALUES),
    "nearTopologyKeys": (lambda value: _placed(near=["b"], nearTopologyKeys=[value]), LABELS, NO_LABELS),
    "gpuProducts": (lambda value: _placed(gpuProducts=[value]), *VALUES),
    "gpuResourceName": (lambda value: _group(gpuResourceName=value), *DEVICES),
    "rdma": (lambda value: pair(dataPlane={"rdma": {"resourceName": value}}), *DEVICES),
    "deviceClassName": (lambda value: _group(gpuClaim={"deviceClassName": value}), *NAMES),
    "resources": (lambda value: _group(resources=value), *RESOURCES),
    "coordinator's resources": (lambda value: _coordinator(resources=value), *RESOURCES),
    "image": (lambda value: pair(image=value), ["a", "r.example.org:5000/a/b:1"], [" a", "a ", "a b", "a\n"]),
    "imagePullSecrets": (lambda value: pair(imagePullSecrets=[{"name": value}]), *NAMES),
    "serviceAccountName": (lambda value: pair(serviceAccountName=value), *NAMES),
    "secretKeyRef": (lambda value: _variable(secretKeyRef={"name": value, "key": "k"}), *NAMES),
    "configMapKeyRef": (lambda value: _variable(configMapKeyRef={"name": "a", "key": value}), *KEYS),
    "fieldRef": (lambda value: _variable(fieldRef={"fieldPath": value}), *FIELDS),
    "resourceFieldRef": (lambda value: _variable(resourceFieldRef={"resource": value}), *AMOUNTS),
    "divisor of cpu": (_unit("limits.cpu"), [0, 1, "1m", "1000m"], [2, "10m", "1Ki", "1e0"]),
    "divisor of bytes": (_unit("limits.memory"), [1, "1Ki", "1M"], [2, "1m", "1e3"]),
    "envFrom": (lambda value: pair(envFrom=[{"secretRef": {"name": value}}]), *NAMES),
    "prefix": (
        lambda value: pair(envFrom=[{"prefix": value, "secretRef": {"name": "a"}}]),
        ["A_", "1", "a.b-"],
        ["A=", "é", "a b"],
    ),
    "apiKeySecretRef": (lambda value: _coordinator(http={"apiKeySecretRef": {"name": "a", "key": value}}), *KEYS),
    "tls": (lambda value: _coordinator(http={"tls": {"secretName": value}}), *NAMES),
    "configMapRef": (lambda value: pair(code={"configMapRef": {"name": value}}), *NAMES),
    "size of a claim": (lambda value: _cache(size=value), ["1n", "1Gi", 1], [0, "0Gi", "0.0"]),
    "storageClassName": (lambda value: _cache(size="1Gi", storageClassName=value), *NAMES),
    "Service's annotations": (
        lambda value: pair(expose={"service": {"annotations": value}}),
        *_labelled([*LABELS, "UP.org/x"], NO_LABELS),
    ),
    "Ingress' annotations": (
        lambda value: pair(expose={"ingress": {"annotations": value}}),
        *_labelled([*LABELS, "UP.org/x"], NO_LABELS),
    ),
    "className": (lambda value: pair(expose={"ingress": {"className": value}}), *NAMES),
    "host": (lambda value: pair(expose={"ingress": {"host": value}}), *HOSTS),
    "tlsSecretName": (lambda value: pair(expose={"ingress": {"tlsSecretName": value}}), *NAMES),
    "namespace": (
        lambda value: pair(expose={"route": {"parentRefs": [{"name": "a", "namespace": value}]}}),
        ["a", "9-a"],
        ["a_b", "a.b", "-a", LONG],
    ),
}
