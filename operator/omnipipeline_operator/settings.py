"""The operator's settings, from its environment: read once, checked, frozen.

Here: every ``OMNI_OPERATOR_…`` variable there is. Not here: credentials of the cluster (`cluster.client` finds the
service account or the kubeconfig as kubectl does). Called by `cli` alone; the result is passed on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from omnipipeline_operator.errors import ConfigurationError
from omnipipeline_spec.cluster import Resources
from omnipipeline_spec.types import quantities
from omnipipeline_spec.types.pods import PROBE_PORT
from omnipipeline_spec.validation import amounts as container_amounts


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Leader election. A standby takes over after the holder's death within duration + retry < 20 s."""

    enabled: bool = True
    namespace: str = "default"
    name: str = "omnipipeline-operator"
    identity: str = ""
    duration_s: float = 12.0  # with two attempts of a standby at retry_s: 17 s from a death to the next writer
    renew_deadline_s: float = 8.0  # less than the duration: the holder ends before another may write
    retry_s: float = 2.0


class ConversionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The conversion webhook: where it listens, and where API servers find it."""

    port: int
    namespace: str = "default"
    name: str = "omnipipeline-operator-conversion"  #: The name of its Service and of its Secret.
    url: str = ""  #: Instead of the Service, of an operator outside of the cluster.

    @property
    def host(self) -> str:
        """The name or address in the certificate."""
        return urlsplit(self.url).hostname or f"{self.name}.{self.namespace}.svc"


class DefaultResources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resources of a container for which the spec gives none; without any it would be evicted first.

    A stage has no memory limit, because the size of its model is unknown.
    """

    stage: Resources = Resources(requests={"cpu": "50m", "memory": "256Mi"})  #: Resources of each process group.
    coordinator: Resources = Resources(requests={"cpu": "50m", "memory": "256Mi"}, limits={"memory": "4Gi"})


MAX_PORT: Final = 65535
_OBJECT_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
USER: Final = 65532  # "nonroot" of the images; numeric, so that the kubelet can check runAsNonRoot


class PodUsers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """User and groups of pipelines' pods. None: admission chooses, as OpenShift's from the namespace's range."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None


OWN_USER: Final = PodUsers(run_as_user=USER, run_as_group=USER, fs_group=USER)


class NodeModels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The directory of each node for pipelines with ``modelCache.type: Node``."""

    path: str
    bound: str = ""  #: The bound of all models of object stores there; empty: none.


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One operator process."""

    stage_image: str  #: The default image of pipelines that name none.
    namespaces: tuple[str, ...] = ()  #: Empty: all of them.
    lease: LeaseSettings = LeaseSettings()
    conversion: ConversionSettings | None = None  #: None: it is off.
    probe_port: int = PROBE_PORT
    allow_privileged: bool = False  #: Whether podTemplate may ask for hostNetwork, hostPID, hostIPC, privileged.
    default_resources: DefaultResources = DefaultResources()
    pod_users: PodUsers = OWN_USER
    node_models: NodeModels | None = None  #: None: pipelines may not keep models on nodes.
    group_scheduler: str = ""  #: The scheduler that places the pods of a PodGroup together; empty: none.
    scrapers: tuple[dict[str, Any], ...] = ()  #: NetworkPolicy peers that may reach the pods' probe and metrics port.
    log_format: Literal["text", "json"] = "json"
    workers: int = 16  # more than are likely to wait for coordinators that do not answer
    writes_per_s: float = 400.0  # 500 pipelines are 7,200 writes: at 200 a second, they took 35 s at the least
    write_burst: int = 400
    relist_s: float = 300.0
    #: Longer than a node usually takes to come: until then, a pipeline keeps GPUs that another one waits for.
    gpu_patience_s: float = 300.0
    gpu_taking_s: float = 10.0  #: How long one of a higher priority waits before lower ones let go for it.


def read(environ: Mapping[str, str], *, hostname: str) -> Settings:
    """Settings from the environment.

    Raises: ConfigurationError: names the variable.
    """
    namespace = environ.get("OMNI_OPERATOR_NAMESPACE") or "default"
    return Settings(
        stage_image=_text(environ, "OMNI_OPERATOR_STAGE_IMAGE"),
        namespaces=tuple(part.strip() for part in environ.get("OMNI_OPERATOR_WATCH", "").split(",") if part.strip()),
        lease=LeaseSettings(
            enabled=_flag(environ, "OMNI_OPERATOR_LEASE", True),
            namespace=namespace,
            name=environ.get("OMNI_OPERATOR_LEASE_NAME") or LeaseSettings().name,
            identity=environ.get("OMNI_OPERATOR_POD_NAME") or hostname,
        ),
        conversion=_conversion(environ, namespace),
        probe_port=_whole(environ, "OMNI_OPERATOR_PROBE_PORT", PROBE_PORT, most=MAX_PORT),
        allow_privileged=_flag(environ, "OMNI_OPERATOR_ALLOW_PRIVILEGED", False),
        default_resources=_resources(environ, "OMNI_OPERATOR_DEFAULT_RESOURCES"),
        pod_users=_users(environ, "OMNI_OPERATOR_POD_SECURITY_CONTEXT"),
        node_models=_node_models(environ, "OMNI_OPERATOR_NODE_MODELS"),
        group_scheduler=_object_name(environ, "OMNI_OPERATOR_POD_GROUP_SCHEDULER"),
        scrapers=_peers(environ, "OMNI_OPERATOR_SCRAPERS"),
        log_format=_choice(environ, "OMNI_OPERATOR_LOG_FORMAT"),
        workers=_whole(environ, "OMNI_OPERATOR_WORKERS", 16, least=1),
        writes_per_s=_more_than_0(environ, "OMNI_OPERATOR_WRITES_PER_SECOND", 400.0),
        write_burst=_whole(environ, "OMNI_OPERATOR_WRITE_BURST", 400, least=1),
        relist_s=_more_than_0(environ, "OMNI_OPERATOR_RELIST_SECONDS", 300.0),
        gpu_patience_s=_number(environ, "OMNI_OPERATOR_GPU_PATIENCE_SECONDS", 300.0),
        gpu_taking_s=_number(environ, "OMNI_OPERATOR_GPU_PRIORITY_SECONDS", 10.0),
    )


def _conversion(environ: Mapping[str, str], namespace: str) -> ConversionSettings | None:
    port = _whole(environ, "OMNI_OPERATOR_CONVERSION_PORT", 0, most=MAX_PORT)
    if not port:
        return None
    return ConversionSettings(
        port=port,
        namespace=namespace,
        name=_text(environ, "OMNI_OPERATOR_CONVERSION_NAME"),
        url=environ.get("OMNI_OPERATOR_CONVERSION_URL", ""),
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ConfigurationError(f"{name} is not set")
    return value


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{name}: {value!r} is neither 0 nor 1")
    return value == "1" if value else default


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    value = environ.get(name, "")
    try:
        number = float(value) if value else default
    except ValueError as error:
        raise ConfigurationError(f"{name}: {value!r} is not a number") from error
    if not 0 <= number < math.inf:
        raise ConfigurationError(f"{name}: expected a finite number of 0 or more, got {value!r}")
    return number


def _more_than_0(environ: Mapping[str, str], name: str, default: float) -> float:
    number = _number(environ, name, default)
    if number == 0:
        raise ConfigurationError(f"{name}: expected more than 0, got {environ[name]!r}")
    return number


def _whole(environ: Mapping[str, str], name: str, default: int, *, least: int = 0, most: float = math.inf) -> int:
    number = _number(environ, name, default)
    if number != int(number) or not least <= number <= most:
        expected = f"a whole number from {least}" + (f" to {most}" if most < math.inf else "")
        raise ConfigurationError(f"{name}: expected {expected}, got {environ[name]!r}")
    return int(number)


def _object_name(environ: Mapping[str, str], name: str) -> str:
    """The name of a thing of the cluster; empty: none. Nothing would ever place pods that name a scheduler wrongly."""
    value = environ.get(name, "")
    if value and (len(value) > 253 or not _OBJECT_NAME.fullmatch(value)):
        raise ConfigurationError(f"{name}: {value!r} is not a name: lower-case letters, digits, '-' and '.'")
    return value


def _choice(environ: Mapping[str, str], name: str) -> Literal["text", "json"]:
    match environ.get(name) or "json":
        case "json":
            return "json"
        case "text":
            return "text"
        case other:
            raise ConfigurationError(f"{name}: {other!r} is neither text nor json")


def _resources(environ: Mapping[str, str], name: str) -> DefaultResources:
    """A JSON map: container (``stage``, ``coordinator``) -> requests and limits."""
    text = environ.get(name) or "{}"
    try:  # values files may hold numbers where Kubernetes has quantities
        amounts = json.loads(text, parse_int=str, parse_float=str)
        made = msgspec.convert(amounts, DefaultResources)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{name}: {error}") from error
    for container, each in (("stage", made.stage), ("coordinator", made.coordinator)):
        for fault in container_amounts.of_container(each, container, container):
            raise ConfigurationError(f"{name}: {fault}")
    return made


def _users(environ: Mapping[str, str], name: str) -> PodUsers:
    """A JSON map; fields that it lacks are left to admission. The user is the images' without the variable."""
    text = environ.get(name)
    try:
        return msgspec.json.decode(text, type=PodUsers) if text else OWN_USER
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def _node_models(environ: Mapping[str, str], name: str) -> NodeModels | None:
    """A JSON map; empty without a path."""
    text = environ.get(name)
    try:
        given = msgspec.json.decode(text, type=NodeModels) if text else NodeModels(path="")
        if given.bound:
            quantities.parse_bytes(given.bound)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigurationError(f"{name}: {error}") from error
    if given.path and (not given.path.startswith("/") or given.path.strip("/") == "" or ".." in given.path.split("/")):
        raise ConfigurationError(f"{name}: {given.path!r} is not the absolute path of a directory for models alone")
    return given if given.path else None


def _peers(environ: Mapping[str, str], name: str) -> tuple[dict[str, Any], ...]:
    """A JSON list of NetworkPolicy peers."""
    try:
        given = json.loads(environ.get(name) or "[]")
    except ValueError as error:
        raise ConfigurationError(f"{name} is not JSON: {error}") from error
    if not isinstance(given, list) or not all(isinstance(peer, dict) for peer in given):
        raise ConfigurationError(f"{name} must be a JSON list of NetworkPolicy peers")
    return tuple(given)
