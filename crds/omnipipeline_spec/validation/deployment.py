"""Faults of the cluster's fields: environment, code, ports, caches.

Here: the faults of fields that only define how pods are made. Not here: the graph (`graph`), processes and GPUs
(`placement`). Called by `topology` on a spec of valid form.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Final

from omnipipeline_spec.cluster import EnvVar
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types import pods, quantities, stores
from omnipipeline_spec.types.errors import Fault
from omnipipeline_spec.types.quantities import QUOTA_PREFIX
from omnipipeline_spec.validation import podtemplates, variables

MODELS = "/models/"  # where a model cache is mounted
FILE_NAME = r"^[-._a-zA-Z0-9]+$"  # what a ConfigMap's key may be
NO_HOST = frozenset("/*@?#[]\\")  # never part of a URL's host: such an entry would never match
#: Modules that every process imports. Inline code comes before them on sys.path, also before the standard library.
TAKEN_MODULES = sys.stdlib_module_names | {
    *("stage_runtime", "stage_models", "omnipipeline_spec", "omnipipeline_operator", "sitecustomize", "usercustomize"),
    *("click", "cryptography", "fastapi", "httptools", "httpx", "msgspec", "numpy", "prometheus_client"),
    *("pydantic", "python_multipart", "rich", "soundfile", "starlette", "torch", "uvicorn", "uvloop", "yaml", "zmq"),
}
EXPONENT: Final = "[0-9][eE][-+]?[0-9]"
ADDRESS: Final = "[0-9]+([.][0-9]+){3}"
CPU_UNITS: Final = ("0", "1", "1m")  # of a variable's amount; 0 is the same as 1
BYTE_UNITS: Final = (
    "0",
    "1",
    *(f"1{unit}" for unit in ("k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")),
)
MAX_CODE_BYTES = 512 * 1024  # with the plan beside it in one ConfigMap, which holds 1 MiB


def faults(spec: PipelineConfig) -> Iterator[Fault]:
    """All faults of the cluster's fields."""
    yield from _environment(spec)
    yield from _code(spec)
    yield from _amounts(spec)
    yield from _coordinator(spec)
    yield from _rollout(spec)
    yield from _model_cache(spec)
    yield from _route(spec)
    yield from _storage(spec)


def reserved_ports() -> frozenset[int]:
    """Ports that every pod uses, so that an author cannot choose them."""
    groups = range(pods.CONTROL_PORT, pods.CONTROL_PORT + quantities.MAX_STAGES)
    return frozenset({pods.ADMIN_PORT, pods.PROBE_PORT, pods.PUBLISH_PORT, *groups})


def _environment(spec: PipelineConfig) -> Iterator[Fault]:
    for index, variable in enumerate(spec.env):
        path = f"env[{index}]"
        if variable.value is not None and variable.value_from is not None:
            message = f"{variable.name!r} has both value and valueFrom"
            yield Fault(path=path, message=message, names=(variable.name,))
        if variable.value_from is not None and _sources(variable) != 1:
            message = f"of {variable.name!r} must have exactly one source"
            yield Fault(path=f"{path}.valueFrom", message=message, names=(variable.name,))
        yield from _divisor(variable, path)
    yield from variables.faults(spec)
    yield from podtemplates.faults(spec)
    for index, source in enumerate(spec.env_from):
        if (source.secret_ref is None) == (source.config_map_ref is None):
            message = "must have exactly one of secretRef and configMapRef"
            yield Fault(path=f"envFrom[{index}]", message=message)


def _sources(variable: EnvVar) -> int:
    source = variable.value_from
    if source is None:
        return 0
    given = (source.secret_key_ref, source.config_map_key_ref, source.field_ref, source.resource_field_ref)
    return sum(one is not None for one in given)


def _code(spec: PipelineConfig) -> Iterator[Fault]:
    files = spec.code.inline if spec.code else {}
    for name in sorted(files):
        if re.fullmatch(FILE_NAME[1:-1], name) is None or name.startswith("..") or name == ".":
            message = f"{name!r} is not a file name: use letters, digits, '.', '-' and '_', without folders"
            yield Fault(path=f"code.inline[{name!r}]", message=message, names=(name,))
        module, _, ending = name.partition(".")
        if module in TAKEN_MODULES and ending.endswith(("py", "so")):
            message = f"would be imported in place of the module {module}; give it another name"
            yield Fault(path=f"code.inline[{name!r}]", message=message, names=(name,))
    total = sum(len(text.encode(errors="surrogatepass")) for text in files.values())  # `shapes` refuses halves of pairs
    if total > MAX_CODE_BYTES:
        message = f"has {total} bytes; at most {MAX_CODE_BYTES} are allowed: build an image FROM ours instead"
        yield Fault(path="code.inline", message=message)


def _amounts(spec: PipelineConfig) -> Iterator[Fault]:
    """Amounts that the API server refuses only when a child is created, without a path. See also `amounts`."""
    for index, group in enumerate(spec.process_groups):
        if group.shared_memory is not None and quantities.parse_quantity(group.shared_memory) <= 0:
            message = f"{group.shared_memory!r} must be more than 0 bytes"
            yield Fault(path=f"processGroups[{index}].sharedMemory", message=message, names=(group.name,))
        if (group.gpu_resource_name or "").startswith(QUOTA_PREFIX):
            message = f"{group.gpu_resource_name!r} begins with {QUOTA_PREFIX}, as in a quota: leave that out"
            yield Fault(path=f"processGroups[{index}].gpuResourceName", message=message, names=(group.name,))
    rdma = spec.data_plane.rdma
    if rdma is not None and rdma.resource_name.startswith(QUOTA_PREFIX):
        message = f"{rdma.resource_name!r} begins with {QUOTA_PREFIX}, as in a quota: leave that out"
        yield Fault(path="dataPlane.rdma.resourceName", message=message)
    size = spec.model_cache.size if spec.model_cache.type == "PersistentVolumeClaim" else None
    if size is not None and quantities.parse_quantity(size) <= 0:
        yield Fault(path="modelCache.size", message=f"{size!r} must be more than 0 bytes")


def _divisor(variable: EnvVar, path: str) -> Iterator[Fault]:
    """The unit of a variable that has an amount of its container."""
    source = variable.value_from.resource_field_ref if variable.value_from else None
    if source is None or source.divisor is None:
        return
    units = CPU_UNITS if source.resource.endswith(".cpu") else BYTE_UNITS
    known = quantities.parse_quantity(source.divisor) in map(quantities.parse_quantity, units)
    if not known or re.search(EXPONENT, source.divisor):
        message = f"{source.divisor!r} is not a unit of {source.resource}: use one of {', '.join(units[1:])}"
        yield Fault(path=f"{path}.valueFrom.resourceFieldRef.divisor", message=message, names=(variable.name,))


def _coordinator(spec: PipelineConfig) -> Iterator[Fault]:
    port = spec.coordinator.http.port
    if port in reserved_ports():
        message = f"{port} is used in every pod (admin, probes or control)"
        yield Fault(path="coordinator.http.port", message=message)
    for index, host in enumerate(spec.coordinator.http.media_hosts):
        if not host or set(host) & NO_HOST or any(letter.isspace() for letter in host):
            message = f"{host!r} is not a host: write it as host or host:port"
            yield Fault(path=f"coordinator.http.mediaHosts[{index}]", message=message, names=(host,))
    for index, host in enumerate(spec.coordinator.http.allowed_hosts):
        if not host or set(host) & (NO_HOST | {":"}) or any(letter.isspace() for letter in host):
            message = f"{host!r} is not a host name: write it without scheme and port"
            yield Fault(path=f"coordinator.http.allowedHosts[{index}]", message=message, names=(host,))
    beat, dead = spec.control.heartbeat_seconds, spec.control.dead_after_seconds
    if dead <= beat:
        message = (
            f"{dead:g} must be more than heartbeatSeconds {beat:g}, or peers are considered dead between two heartbeats"
        )
        yield Fault(path="control.deadAfterSeconds", message=message)


def _rollout(spec: PipelineConfig) -> Iterator[Fault]:
    if not spec.rollout.max_surge and not spec.rollout.max_unavailable:
        message = "is 0, as maxUnavailable is: a roll could neither start a new instance nor end an old one"
        yield Fault(path="rollout.maxSurge", message=message)
    if spec.rollout.canary is not None and spec.rollout.strategy != "Coherent":
        message = f"needs strategy Coherent; with {spec.rollout.strategy} no old instance is there beside a new one"
        yield Fault(path="rollout.canary", message=message)
    if spec.rollout.canary is not None and not spec.rollout.max_surge:
        message = "needs a maxSurge of 1 or more: a new instance is tried beside the old ones"
        yield Fault(path="rollout.canary", message=message)


def _model_cache(spec: PipelineConfig) -> Iterator[Fault]:
    cache = spec.model_cache
    claim = cache.type == "PersistentVolumeClaim"
    if claim and (cache.claim_name is None) == (cache.size is None):
        message = "of type PersistentVolumeClaim must have exactly one of claimName and size"
        yield Fault(path="modelCache", message=message)
    if not claim and (cache.claim_name or cache.storage_class_name):
        message = f"of type {cache.type} must not have claimName or storageClassName"
        yield Fault(path="modelCache", message=message)
    image = cache.type == "Image"
    if image != bool(cache.image):
        message = f"of type {cache.type} must {'' if image else 'not '}have image"
        yield Fault(path="modelCache", message=message)
    if not image and cache.pull_policy:
        yield Fault(path="modelCache.pullPolicy", message="needs type Image")
    if image and cache.size:
        yield Fault(path="modelCache.size", message="an image has its own size")
    node = cache.type == "Node"
    if node and cache.size:
        yield Fault(path="modelCache.size", message="the operator's chart bounds the directories of nodes")
    if node and not cache.prefetch.enabled:
        yield Fault(path="modelCache.prefetch", message="type Node needs enabled: true: stages cannot write there")
    if image and spec.model_path and not spec.model_path.startswith(MODELS):
        message = f"{spec.model_path!r} must begin with {MODELS}, where the image of modelCache is mounted"
        yield Fault(path="modelPath", message=message)
    if cache.type == "None" and cache.size:
        message = "needs type EmptyDir or PersistentVolumeClaim; the type is None, the default"
        yield Fault(path="modelCache.size", message=message)
    if claim and cache.claim_name and cache.storage_class_name:
        message = "applies to a claim made from size; claimName names an existing claim"
        yield Fault(path="modelCache.storageClassName", message=message)
    if not (claim or node) and cache.prefetch.enabled:
        message = f"needs type PersistentVolumeClaim or Node; {cache.type} keeps nothing between pods"
        yield Fault(path="modelCache.prefetch", message=message)
    if cache.prefetch.secret_name and not cache.prefetch.enabled:
        yield Fault(path="modelCache.prefetch.secretName", message="needs enabled: true")
    if stores.is_address(spec.model_path):
        yield from _stored(spec)
    if cache.prefetch.enabled and not spec.model_path:
        yield Fault(path="modelCache.prefetch", message="needs modelPath")


def _stored(spec: PipelineConfig) -> Iterator[Fault]:
    """A model in an object store."""
    if stores.split(str(spec.model_path)) is None:
        yield Fault(path="modelPath", message=f"{spec.model_path!r} is not s3://BUCKET/PREFIX")
    if spec.model_cache.type != "None" and not spec.model_cache.prefetch.enabled:
        yield Fault(path="modelPath", message=f"{spec.model_path!r} needs modelCache.prefetch.enabled: true")
    if spec.model_revision:
        message = "does not apply to an object store: name another prefix"
        yield Fault(path="modelRevision", message=message)


def _route(spec: PipelineConfig) -> Iterator[Fault]:
    host = spec.expose.ingress.host if spec.expose.ingress else None
    if host is not None and re.fullmatch(ADDRESS, host):
        yield Fault(path="expose.ingress.host", message=f"{host!r} is an address: an Ingress needs a name, or none")
    parents = spec.expose.route.parent_refs if spec.expose.route else ()
    for index, each in enumerate(parents):
        if each in parents[:index]:
            message = f"names Gateway {each.name} twice, with the same listener and port"
            yield Fault(path=f"expose.route.parentRefs[{index}]", message=message)
        first = next(one for one in parents if (one.name, one.namespace) == (each.name, each.namespace))
        for field, here, there in (
            ("sectionName", each.section_name, first.section_name),
            ("port", each.port, first.port),
        ):
            if (here is None) != (there is None):
                message = f"names Gateway {each.name} {'without' if here is None else 'with'} {field}, an earlier one "
                message += f"{'with' if here is None else 'without'} it: the Gateway API takes all with it, or none"
                yield Fault(path=f"expose.route.parentRefs[{index}].{field}", message=message)


def _storage(spec: PipelineConfig) -> Iterator[Fault]:
    storage = spec.profiling.storage
    if storage is not None and (storage.empty_dir is None) == (storage.claim_name is None):
        yield Fault(path="profiling.storage", message="must have exactly one of emptyDir and claimName")
