"""Fields of a spec that change nothing: those that no program of this version reads, and those that only a cluster has.

Here: every field of the spec, in one of three tables (a test compares them with the types), and the lines that name
what a spec sets in vain. Not here: references to Secrets and ConfigMaps, which a file may bring along (`references`).
Called by `cli.files.plan` and `local`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.values import to_document

#: Every value of these fields reaches the processes of `omni up`.
HONOURED: Final = frozenset(
    """
    name serves accepts modelPath modelRevision entryStage relayBackend fusedStages runtimeOverrides envDefaults
    terminalStagesFn gpuMemoryLimit configCls endpoints.basePath code.inline code.configMapRef.name
    stages[].name stages[].factory stages[].process stages[].factoryArgs stages[].next stages[].terminal
    stages[].routeFn stages[].gpu stages[].tpSize stages[].gpuMemory.fraction stages[].gpuMemory.bytes
    stages[].waitFor stages[].waitForFn stages[].mergeFn stages[].streamTo stages[].streamDoneToFn
    stages[].streamAtEnd
    stages[].projectPayload stages[].relay.credits
    stages[].disaggregation.prefill.process stages[].disaggregation.prefill.gpu
    stages[].disaggregation.prefill.tpSize stages[].disaggregation.prefill.factoryArgs
    stages[].disaggregation.decode.process stages[].disaggregation.decode.gpu stages[].disaggregation.decode.tpSize
    env[].name env[].value
    env[].valueFrom.secretKeyRef.name env[].valueFrom.secretKeyRef.key env[].valueFrom.secretKeyRef.optional
    env[].valueFrom.configMapKeyRef.name env[].valueFrom.configMapKeyRef.key env[].valueFrom.configMapKeyRef.optional
    env[].valueFrom.fieldRef.fieldPath env[].valueFrom.fieldRef.apiVersion
    env[].valueFrom.resourceFieldRef.resource env[].valueFrom.resourceFieldRef.containerName
    env[].valueFrom.resourceFieldRef.divisor
    envFrom[].prefix envFrom[].secretRef.name envFrom[].secretRef.optional
    envFrom[].configMapRef.name envFrom[].configMapRef.optional
    processGroups[].name processGroups[].replicas processGroups[].localGpus
    processGroups[].autoscaling.minReplicas processGroups[].autoscaling.maxReplicas
    processGroups[].autoscaling.targetQueueSeconds processGroups[].autoscaling.targetUtilization
    processGroups[].autoscaling.scaleUpDelaySeconds processGroups[].autoscaling.scaleDownDelaySeconds
    processGroups[].drain.timeoutSeconds processGroups[].stuckAfterSeconds
    coordinator.http.port coordinator.http.maxBodyBytes coordinator.http.requestTimeoutSeconds
    coordinator.http.maxInFlight coordinator.http.mediaHosts coordinator.http.allowedHosts
    coordinator.http.apiKeySecretRef.name coordinator.http.apiKeySecretRef.key
    coordinator.http.apiKeySecretRef.optional
    coordinator.hold.seconds coordinator.hold.maxRequests coordinator.hold.maxBytes
    coordinator.retries coordinator.drain.timeoutSeconds
    profiling.enabled profiling.maxSeconds
    observability.tracing.endpoint observability.tracing.sampleRatio
    control.heartbeatSeconds control.deadAfterSeconds dataPlane.allowTCP dataPlane.mooncakeProtocol
    stages[].relay.device stages[].relay.slotSizeMb stages[].relay.rank stages[].relay.worldSize
    """.split()
)

_NO_PODS: Final = "one machine has processes, not pods"
_NO_IMAGE: Final = "processes run in the Python environment of `omni up`, not in an image"

#: Field, with all that is in it -> what happens instead. Nowhere read, on no cluster either.
NOT_IN_THIS_VERSION: Final[Mapping[str, str]] = {}

#: Field, with all that is in it -> what one machine has instead.
CLUSTER_ONLY: Final[Mapping[str, str]] = {
    "image": _NO_IMAGE,
    "imagePullPolicy": _NO_IMAGE,
    "imagePullSecrets": _NO_IMAGE,
    "serviceAccountName": _NO_PODS,
    "processGroups[].resources": _NO_PODS,
    "processGroups[].gpuResourceName": _NO_PODS,
    "processGroups[].gpuClaim": _NO_PODS,
    "processGroups[].sharedMemory": _NO_PODS,
    "processGroups[].placement": _NO_PODS,
    "processGroups[].podTemplate": _NO_PODS,
    "processGroups[].startup": "--startup-timeout sets how long a stage may do nothing while it loads",
    "coordinator.replicas": "one coordinator serves; several need a Service in front",
    "coordinator.resources": _NO_PODS,
    "coordinator.http.tls": "--tls-cert and --tls-key set the certificate",
    "coordinator.placement": _NO_PODS,
    "coordinator.podTemplate": _NO_PODS,
    "dataPlane.rdma": "relays use the RDMA devices of this machine as they are",
    "control.security": "processes talk over Unix sockets in a private folder",
    "modelCache": "weights lie where the libraries of this machine keep them",
    "expose": "--host and --port set where HTTP is served",
    "rollout": "nothing rolls on one machine; `omni restart` replaces processes",
    "disruption": _NO_PODS,
    "networkPolicy": _NO_PODS,
    "profiling.storage": _NO_PODS,
    "restartedAt": "`omni restart` replaces processes",
    "suspend": "the pipeline runs until ^C",
}


def notices(spec: PipelineConfig, *, local: bool) -> tuple[str, ...]:
    """The fields that ``spec`` sets in vain, one line per reason with all fields it is the reason of.

    local: on one machine; otherwise only what no program of this version reads.
    """
    found: dict[str, list[str]] = {}
    for place, field in _set(to_document(spec), "", ""):
        if field in NOT_IN_THIS_VERSION:
            found.setdefault(f"not in this version: {NOT_IN_THIS_VERSION[field]}", []).append(place)
        elif field in CLUSTER_ONLY and local:
            found.setdefault(f"not used by `omni up`: {CLUSTER_ONLY[field]}", []).append(place)
    return tuple(f"{', '.join(dict.fromkeys(places))}: {reason}" for reason, places in found.items())


def _set(value: Any, place: str, field: str) -> Iterator[tuple[str, str]]:
    """The fields that are set inside ``value``: (place, with names of list entries; field of the tables). Down to the
    tables.
    """
    if field in NOT_IN_THIS_VERSION or field in CLUSTER_ONLY or field in HONOURED:
        yield place, field
    elif isinstance(value, dict):
        for key, inner in value.items():
            dot = "." if place else ""
            yield from _set(inner, f"{place}{dot}{key}", f"{field}{dot}{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            name = inner.get("name") if isinstance(inner, dict) else None
            yield from _set(inner, f"{place}.{name}" if name else f"{place}[{index}]", f"{field}[]")
