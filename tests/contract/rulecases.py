"""Pairs of resources for every CEL rule: one keeps it, and one breaks it alone.

Written as edits of one small sound spec; keyed by the type that has the rule and by the rule's message, so a rule
without a case, or a case without a rule, is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]


def stage(name: str, **fields: Any) -> Document:
    """A stage; terminal unless it has next, in a process of its own name unless it says otherwise."""
    base: Document = {"name": name, "process": name, "factory": "work:make"}
    if "next" not in fields:
        base["terminal"] = True
    return {key: value for key, value in {**base, **fields}.items() if value is not None}


def spec(*stages: Document, **fields: Any) -> Document:
    return {"stages": list(stages), **fields}


def pair(first: Mapping[str, Any] = {}, second: Mapping[str, Any] = {}, **fields: Any) -> Document:
    """a → b, with further fields."""
    return spec(stage("a", **{"next": ["b"], **first}), stage("b", **second), **fields)


def _join(**fields: Any) -> Document:
    return spec(stage("a", next=["b", "c"]), stage("b", next=["c"]), stage("c", **fields))


_HALF = {"fraction": 0.5}
_APART = {"disaggregation": {"prefill": {"process": "p"}}}


def _prefill(**placement: Any) -> Document:
    """A stage whose prefill runs in the process p."""
    return {"disaggregation": {"prefill": {"process": "p", **placement}}}


def _scaled(**limits: Any) -> Document:
    """The process b with replicas by its load."""
    return {"name": "b", "autoscaling": {"maxReplicas": 4, **limits}}


def _tolerant(toleration: Document) -> Document:
    """Coordinators with a toleration."""
    return pair(coordinator={"placement": {"tolerations": [toleration]}})


_TP = {"tpSize": 2, "gpu": [0, 1], "process": None}
_DEVICES = {"deviceClassName": "gpu.example.com"}
_IMAGE = {"type": "Image", "image": "localhost/weights:1"}
_CLAIM = {"type": "PersistentVolumeClaim", "size": "10Gi"}
_GATEWAY = {"name": "shared", "namespace": "doors"}

#: (type, message) -> (good, bad)
CASES: dict[tuple[str, str], tuple[Document, Document]] = {
    ("PipelineConfig", "every name in next must be a stage"): (pair(), pair({"next": ["b", "ghost"]})),
    ("PipelineConfig", "every name in waitFor must be a stage"): (
        _join(waitFor=["a", "b"], mergeFn="work:merge"),
        _join(waitFor=["a", "ghost"], mergeFn="work:merge"),
    ),
    ("PipelineConfig", "every name in streamTo must be a stage"): (
        pair({"streamTo": ["b"]}),
        pair({"streamTo": ["b", "ghost"]}),
    ),
    ("PipelineConfig", "at least one stage must be terminal"): (
        pair(),
        spec(stage("a", next=["b"]), stage("b", next=["a"])),
    ),
    ("PipelineConfig", "entryStage must be a stage"): (pair(entryStage="a"), pair(entryStage="ghost")),
    ("PipelineConfig", "every name in processGroups must be a process of a stage"): (
        pair({"process": "front"}, processGroups=[{"name": "front"}]),
        pair({"process": "front"}, processGroups=[{"name": "a"}]),
    ),
    ("PipelineConfig", "the process of a stage with tpSize > 1 must have no other stage"): (
        pair(_TP),
        pair({**_TP, "process": "b"}),
    ),
    ("PipelineConfig", "every name in fusedStages must be a stage with tpSize 1"): (
        pair(fusedStages=[["a", "b"]]),
        pair(_TP, fusedStages=[["a", "b"]]),
    ),
    ("PipelineConfig", "every key of runtimeOverrides must be a stage"): (
        pair(runtimeOverrides={"a": {"x": 1}}),
        pair(runtimeOverrides={"ghost": {"x": 1}}),
    ),
    ("PipelineConfig", "no process may be called coordinator"): (
        pair({"process": "coordinator-2"}),
        pair({"process": "coordinator"}),
    ),
    ("PipelineConfig", "stages of one process must share one GPU"): (
        pair({"process": "p", "gpu": [0]}, {"process": "p", "gpu": [0]}),
        pair({"process": "p", "gpu": [0]}, {"process": "p", "gpu": [1]}),
    ),
    ("PipelineConfig", "stages whose processes share a GPU must have a gpuMemory budget"): (
        pair({"gpu": [0], "gpuMemory": {"fraction": 0.4}}, {"gpu": [0], "gpuMemory": {"fraction": 0.4}}),
        pair({"gpu": [0], "gpuMemory": {"fraction": 0.4}}, {"gpu": [0]}),
    ),
    ("PipelineConfig", "the gpuMemory fractions on one GPU must not sum to more than gpuMemoryLimit"): (
        pair({"gpu": [0], "gpuMemory": _HALF}, {"gpu": [0], "gpuMemory": _HALF}, gpuMemoryLimit=1),
        pair({"gpu": [0], "gpuMemory": _HALF}, {"gpu": [0], "gpuMemory": _HALF}),
    ),
    ("PipelineConfig", "modelPath must begin with /models/, where the image of modelCache is mounted"): (
        pair(modelPath="/models/mine", modelCache=_IMAGE),
        pair(modelPath="some/model", modelCache=_IMAGE),
    ),
    ("PipelineConfig", "modelCache.prefetch needs modelPath"): (
        pair(modelPath="some/model", modelCache={**_CLAIM, "prefetch": {"enabled": True}}),
        pair(modelCache={**_CLAIM, "prefetch": {"enabled": True}}),
    ),
    ("PipelineConfig", "disaggregation adds a stage NAME-prefill: no other may have that name"): (
        pair(second=_APART),
        spec(stage("a", next=["b-prefill"]), stage("b-prefill", next=["b"]), stage("b", **_APART)),
    ),
    ("PipelineConfig", "the process of a prefill must have no other stage"): (
        pair(second=_APART),
        pair({"process": "p"}, _APART),
    ),
    ("PipelineConfig", "only a process group of prefill may have 0 replicas"): (
        pair(second=_APART, processGroups=[{"name": "p", "replicas": 0}]),
        pair(second=_APART, processGroups=[{"name": "b", "replicas": 0}]),
    ),
    (
        "PipelineConfig",
        "minReplicas: 0 needs a coordinator.hold without a 0: a request must wait for its first instance",
    ): (
        pair(processGroups=[_scaled(minReplicas=0)], coordinator={"hold": {"maxRequests": 1, "maxBytes": 1}}),
        pair(processGroups=[_scaled(minReplicas=0)], coordinator={"hold": {"maxBytes": 0}}),
    ),
    ("ProcessGroup", "must not have both gpuResourceName and gpuClaim"): (
        pair(second={"gpu": [0]}, processGroups=[{"name": "b", "gpuResourceName": "", "gpuClaim": _DEVICES}]),
        pair(second={"gpu": [0]}, processGroups=[{"name": "b", "gpuResourceName": "a.b/gpu", "gpuClaim": _DEVICES}]),
    ),
    ("ProcessGroup", "must not have both replicas and autoscaling"): (
        pair(processGroups=[_scaled()]),
        pair(processGroups=[{**_scaled(), "replicas": 2}]),
    ),
    ("Autoscaling", "minReplicas must not be more than maxReplicas"): (
        pair(processGroups=[_scaled(minReplicas=4)]),
        pair(processGroups=[_scaled(minReplicas=5)]),
    ),
    ("Autoscaling", "must not have both targetQueueSeconds and targetUtilization"): (
        pair(processGroups=[_scaled(targetQueueSeconds=2.0)]),
        pair(processGroups=[_scaled(targetQueueSeconds=2.0, targetUtilization=0.5)]),
    ),
    ("Rollout", "must not have 0 as both maxSurge and maxUnavailable"): (
        pair(rollout={"maxSurge": 0, "maxUnavailable": 1}),
        pair(rollout={"maxSurge": 0}),
    ),
    ("Rollout", "canary needs strategy Coherent and a maxSurge of 1 or more"): (
        pair(rollout={"canary": {"weight": 5, "abortOn": {"p99Seconds": 2.0}}}),
        pair(rollout={"canary": {}, "strategy": "Recreate"}),
    ),
    ("Disaggregation", "the process of prefill must not be called coordinator"): (
        pair(second={"process": None, "disaggregation": {"prefill": {"process": "p"}, "decode": {"process": "d"}}}),
        pair(second=_prefill(process="coordinator")),
    ),
    ("Disaggregation", "prefill must list one GPU id per rank of its tpSize"): (
        pair(second=_prefill(tpSize=2, gpu=[0, 1])),
        pair(second=_prefill(tpSize=2, gpu=[0])),
    ),
    ("StageConfig", "must have exactly one of next and terminal: true"): (
        pair(),
        pair({"terminal": True}),
    ),
    ("StageConfig", "must not be in its own next"): (pair(), pair({"next": ["a", "b"]})),
    ("StageConfig", "must not be in its own streamTo"): (
        pair({"streamTo": ["b"]}),
        pair({"streamTo": ["a"]}),
    ),
    ("StageConfig", "must not be in its own waitFor"): (
        _join(waitFor=["a", "b"], mergeFn="work:merge"),
        _join(waitFor=["a", "b", "c"], mergeFn="work:merge"),
    ),
    ("StageConfig", "has routeFn, which needs next"): (
        pair({"routeFn": "work:route"}, {"routeFn": ""}),
        pair({}, {"routeFn": "work:route"}),
    ),
    ("StageConfig", "must have both waitFor and mergeFn, or neither"): (
        _join(waitFor=["a", "b"], mergeFn="work:merge"),
        _join(waitFor=["a", "b"]),
    ),
    ("StageConfig", "has waitForFn, which needs waitFor"): (
        _join(waitFor=["a", "b"], mergeFn="work:merge", waitForFn="work:choose"),
        _join(waitForFn="work:choose"),
    ),
    ("StageConfig", "has streamDoneToFn, which needs streamTo"): (
        pair({"streamTo": ["b"], "streamDoneToFn": "work:done"}),
        pair({"streamDoneToFn": "work:done"}),
    ),
    ("StageConfig", "must list one GPU id per rank of tpSize; without ranks at most one"): (
        pair(_TP),
        pair({**_TP, "gpu": [0]}),
    ),
    ("StageConfig", "must declare its process; only a stage with tpSize > 1 may leave it out"): (
        pair(_TP),
        pair({"process": None}),
    ),
    ("StageConfig", "has gpuMemory, but no gpu"): (
        pair({"gpu": [0], "gpuMemory": _HALF}),
        pair({"gpuMemory": _HALF}),
    ),
    ("StageConfig", "may have only stages in next or streamTo in projectPayload"): (
        pair({"projectPayload": {"b": "work:project"}}),
        pair({"projectPayload": {"ghost": "work:project"}}),
    ),
    ("StageConfig", "every name in streamAtEnd must be in streamTo"): (
        pair({"streamTo": ["b"], "streamAtEnd": ["b"]}),
        pair({"streamAtEnd": ["b"]}),
    ),
    ("StageConfig", "has a name that is reserved"): (
        pair(),
        spec(stage("coordinator", process="p")),
    ),
    ("GpuMemory", "must have exactly one of fraction and bytes"): (
        pair({"gpu": [0], "gpuMemory": {"bytes": "12Gi"}}),
        pair({"gpu": [0], "gpuMemory": {"bytes": "12Gi", "fraction": 0.5}}),
    ),
    ("GpuMemory", "bytes must be a quantity of more than 0"): (
        pair({"gpu": [0], "gpuMemory": {"bytes": 1 << 30}}),
        pair({"gpu": [0], "gpuMemory": {"bytes": 0}}),
    ),
    ("EnvVar", "must not have both value and valueFrom"): (
        pair(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
        pair(env=[{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
    ),
    (
        "EnvVar",
        "the operator sets the variables that begin with OMNI_; authors may set OMNI_ARENA_MB, OMNI_DEBUG_VALUES, "
        "OMNI_HTTP_ANSWERS_MB, OMNI_HTTP_BODIES_MB, OMNI_HTTP_HOSTS, OMNI_HTTP_QUIET_S, OMNI_LOG_FORMAT, "
        "OMNI_LOG_LEVEL",
    ): (
        pair(env=[{"name": "OMNI_LOG_FORMAT", "value": "text"}]),
        pair(env=[{"name": "OMNI_HTTP_PORT", "value": "9000"}]),
    ),
    ("EnvVar", "CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES are derived from the stages' gpu"): (
        pair(env=[{"name": "CUDA_DEVICE_ORDER", "value": "PCI_BUS_ID"}]),
        pair(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
    ),
    ("EnvSource", "must have exactly one source"): (
        pair(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
        pair(env=[{"name": "A", "valueFrom": {}}]),
    ),
    ("EnvFrom", "must have exactly one of secretRef and configMapRef"): (
        pair(envFrom=[{"secretRef": {"name": "hub"}}]),
        pair(envFrom=[{"prefix": "HUB_"}]),
    ),
    ("ProcessGroup", "sharedMemory must be a quantity of more than 0"): (
        pair(processGroups=[{"name": "a", "sharedMemory": "64Mi"}]),
        pair(processGroups=[{"name": "a", "sharedMemory": "0Mi"}]),
    ),
    ("Control", "deadAfterSeconds must be more than heartbeatSeconds"): (
        pair(control={"heartbeatSeconds": 2}),
        pair(control={"heartbeatSeconds": 3}),
    ),
    ("Http", "port must not be 8001 (admin), 8081 (probes) or 5549 to 5613 (control)"): (
        pair(coordinator={"http": {"port": 80}}),
        pair(coordinator={"http": {"port": 5613}}),
    ),
    ("ModelCache", "type Image must have image, and no other type may have it"): (
        pair(modelCache=_IMAGE),
        pair(modelCache={"type": "EmptyDir", "image": "weights:1"}),
    ),
    ("ModelCache", "pullPolicy needs type Image"): (
        pair(modelCache={**_IMAGE, "pullPolicy": "Never"}),
        pair(modelCache={"type": "EmptyDir", "pullPolicy": "Never"}),
    ),
    ("ProcessGroup", "gpuResourceName must not begin with requests."): (
        pair({"gpu": [0]}, processGroups=[{"name": "a", "gpuResourceName": "a.b/gpu"}]),
        pair({"gpu": [0]}, processGroups=[{"name": "a", "gpuResourceName": "requests.a.b/gpu"}]),
    ),
    ("Rdma", "resourceName must not begin with requests."): (
        pair(dataPlane={"rdma": {"resourceName": "rdma/hca"}}),
        pair(dataPlane={"rdma": {"resourceName": "requests.rdma/hca"}}),
    ),
    ("Toleration", "must have operator Exists where key is unset"): (
        _tolerant({"operator": "Exists"}),
        _tolerant({"effect": "NoSchedule"}),
    ),
    ("Toleration", "must not have value with operator Exists"): (
        _tolerant({"key": "k", "operator": "Exists", "value": ""}),
        _tolerant({"key": "k", "operator": "Exists", "value": "v"}),
    ),
    ("Toleration", "tolerationSeconds needs effect NoExecute"): (
        _tolerant({"key": "k", "effect": "NoExecute", "tolerationSeconds": 5}),
        _tolerant({"key": "k", "tolerationSeconds": 5}),
    ),
    ("ResourceReference", "divisor must be 1 or 1m of cpu, and 1, 1k, 1Ki … of bytes"): (
        pair(env=[{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}}]),
        pair(env=[{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1Ki"}}}]),
    ),
    ("Ingress", "host must not be an address"): (
        pair(expose={"ingress": {"host": "a.example.org"}}),
        pair(expose={"ingress": {"host": "10.0.0.1"}}),
    ),
    ("ModelCache", "size of a PersistentVolumeClaim must be a quantity of more than 0"): (
        pair(modelCache={"type": "EmptyDir", "size": 0}),
        pair(modelCache={**_CLAIM, "size": 0}),
    ),
    ("ModelCache", "size does not apply to type Image"): (
        pair(modelCache={"type": "EmptyDir", "size": "1Gi"}),
        pair(modelCache={**_IMAGE, "size": "1Gi"}),
    ),
    ("ModelCache", "a PersistentVolumeClaim must have exactly one of claimName and size"): (
        pair(modelCache=_CLAIM),
        pair(modelCache={**_CLAIM, "claimName": "mine"}),
    ),
    ("ModelCache", "claimName and storageClassName need type PersistentVolumeClaim"): (
        pair(modelCache={"type": "EmptyDir", "size": "1Gi"}),
        pair(modelCache={"type": "EmptyDir", "claimName": "mine"}),
    ),
    ("ModelCache", "prefetch needs type PersistentVolumeClaim or Node"): (
        pair(modelPath="some/model", modelCache={"type": "EmptyDir", "prefetch": {"enabled": False}}),
        pair(modelPath="some/model", modelCache={"type": "EmptyDir", "prefetch": {"enabled": True}}),
    ),
    ("ModelCache", "type Node needs prefetch.enabled: true, and must not have size"): (
        pair(modelPath="some/model", modelCache={"type": "Node", "prefetch": {"enabled": True}}),
        pair(modelPath="some/model", modelCache={"type": "Node", "prefetch": {"enabled": False}}),
    ),
    ("Prefetch", "secretName needs enabled: true"): (
        pair(modelPath="s3://b/m", modelCache={**_CLAIM, "prefetch": {"enabled": True, "secretName": "keys"}}),
        pair(modelPath="some/model", modelCache={**_CLAIM, "prefetch": {"enabled": False, "secretName": "keys"}}),
    ),
    ("Route", "must not name a parent twice"): (
        pair(
            expose={"route": {"parentRefs": [{**_GATEWAY, "port": 80}, {**_GATEWAY, "port": 443}, {"name": "shared"}]}}
        ),
        pair(expose={"route": {"parentRefs": [{**_GATEWAY, "port": 80}, {"name": "other"}, {**_GATEWAY, "port": 80}]}}),
    ),
    ("Route", "parents of one name must all have sectionName, or none, and so with port"): (
        pair(expose={"route": {"parentRefs": [{**_GATEWAY, "sectionName": each} for each in ("web", "tls")]}}),
        pair(expose={"route": {"parentRefs": [{**_GATEWAY, "sectionName": "web"}, _GATEWAY]}}),
    ),
    ("ProfilingStorage", "must have exactly one of emptyDir and claimName"): (
        pair(profiling={"storage": {"emptyDir": {}}}),
        pair(profiling={"storage": {}}),
    ),
}
