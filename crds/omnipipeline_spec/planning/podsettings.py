"""The settings of a unit's pod, in canonical form, for the operator.

Here: the dict ``pod`` of a plan: image, environment, summed resources, placement, volumes, devices. Its keys are those
of the resource. Not here: Kubernetes objects (the operator builds them), settings that may change without a restart:
replicas, exposure, disruption budgets, profiling except its storage. Called by `planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from omnipipeline_spec.cluster import Placement, ProcessGroup, Resources
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types import quantities
from omnipipeline_spec.types.canonical import canonical
from omnipipeline_spec.types.values import to_document
from omnipipeline_spec.validation import grouping
from omnipipeline_spec.validation.placement import DEFAULT_GPU_RESOURCE

T = TypeVar("T")


def of_unit(spec: PipelineConfig, refined: Sequence[ProcessGroup], gpus: int) -> dict[str, Any]:
    """Settings of a stage pod. ``refined``: the refinements of its groups; ``gpus``: how many devices it has."""
    claim = _the_one(refined, lambda group: to_document(group.gpu_claim) if group.gpu_claim else None)
    own = {
        "resources": _summed([group.resources for group in refined if group.resources is not None]),
        "sharedMemory": _shared_memory(refined),
        "placement": _the_one(refined, lambda group: _placed(spec, group.placement) if group.placement else None),
        "podTemplate": _the_one(refined, lambda group: group.pod_template or None),
        "gpus": gpus or None,
        "gpuResourceName": _gpu_resource(refined) if gpus and claim is None else None,
        "gpuClaim": claim,
        "rdma": to_document(spec.data_plane.rdma) if spec.data_plane.rdma else None,
        "modelCache": _cache(spec),
    }
    return _settled(_common(spec) | own)


def of_coordinator(spec: PipelineConfig) -> dict[str, Any]:
    """Settings of the coordinator's pod. It loads no model, and a ReadWriteOnce claim would tie it to their node."""
    coordinator = spec.coordinator
    placement = coordinator.placement or Placement()
    key = coordinator.http.api_key_secret_ref
    own = {
        "resources": _summed([coordinator.resources] if coordinator.resources else []),
        "placement": _placed(spec, placement),
        "podTemplate": coordinator.pod_template,
        "apiKeySecretRef": to_document(key) if key else None,
        "tlsSecretName": coordinator.http.tls.secret_name if coordinator.http.tls else None,
    }
    return _settled(_common(spec) | own)


def _common(spec: PipelineConfig) -> dict[str, Any]:
    tracing, storage = spec.observability.tracing, spec.profiling.storage
    return {
        "image": spec.image,
        "imagePullPolicy": spec.image_pull_policy,
        "imagePullSecrets": to_document(spec.image_pull_secrets),
        "serviceAccountName": spec.service_account_name,
        "env": to_document(spec.env),
        "envFrom": to_document(spec.env_from),
        "profilingStorage": to_document(storage) if storage else None,
        "tracing": to_document(tracing) if tracing else None,
        "restartedAt": spec.restarted_at,
    }


def _placed(spec: PipelineConfig, placement: Placement) -> dict[str, Any]:
    """The placement with pod units instead of the stages that it is to be near."""
    document: dict[str, Any] = to_document(placement)
    if placement.near:
        groups = grouping.group(spec)
        group_of = {stage.name: name for name, stages in groups.groups.items() for stage in stages}
        document["near"] = list(dict.fromkeys(groups.unit_of(group_of[stage]) for stage in placement.near))
        document["nearTopologyKeys"] = list(placement.near_topology_keys)
    return document


def _cache(spec: PipelineConfig) -> dict[str, Any]:
    """The model cache that a stage's pod mounts. A claim's size, its class and the prefetch Job change no pod."""
    cache = spec.model_cache
    match cache.type:
        case "None":
            return {}
        case "EmptyDir":
            return {"type": cache.type, "size": cache.size}
        case "Image":
            return {"type": cache.type, "image": cache.image, "pullPolicy": cache.pull_policy}
        case "Node":
            return {"type": cache.type, "secretName": cache.prefetch.secret_name}
        case _:
            return {"type": cache.type, "claimName": cache.claim_name}


def _summed(resources: Sequence[Resources]) -> dict[str, Any]:
    return {
        "requests": quantities.sum_quantities(each.requests for each in resources),
        "limits": quantities.sum_quantities(each.limits for each in resources),
    }


def _shared_memory(refined: Sequence[ProcessGroup]) -> str | None:
    wanted = [quantities.parse_bytes(group.shared_memory) for group in refined if group.shared_memory]
    return quantities.format_quantity(sum(wanted)) if wanted else None


def _gpu_resource(refined: Sequence[ProcessGroup]) -> str:
    return _the_one(refined, lambda group: group.gpu_resource_name) or DEFAULT_GPU_RESOURCE


def _the_one(refined: Sequence[ProcessGroup], of: Callable[[ProcessGroup], T | None]) -> T | None:
    """The value that the groups of a pod share (`placement` has refused different ones)."""
    return next((value for group in refined if (value := of(group)) is not None), None)


def _settled(settings: dict[str, Any]) -> dict[str, Any]:
    """Canonical and without unset entries, so that equal settings have equal bytes."""
    settled = {key: canonical(value) for key, value in settings.items()}
    settled["resources"] = {kind: amounts for kind, amounts in settled["resources"].items() if amounts}
    if "modelCache" in settled:
        settled["modelCache"] = {key: value for key, value in settled["modelCache"].items() if value is not None}
    return {key: settled[key] for key in sorted(settled) if settled[key] not in (None, {}, [])}
