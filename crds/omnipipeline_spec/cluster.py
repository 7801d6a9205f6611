"""The fields of the spec that define where and how a pipeline runs on a cluster.

Here: value types with their descriptions, defaults and bounds, from which the CRD and the config reference are
generated. Not here: stages and the graph (`pipeline`), rules that span fields (`topology`, `celrules`). Called by
`pipeline`; the operator reads them through the plan. One room however long it grows: it is a list of fields, in the
order of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from omnipipeline_spec.types.pods import HTTP_PORT
from omnipipeline_spec.types.quantities import (
    AmountField,
    AmountName,
    AnnotationName,
    DataKey,
    DeviceResource,
    EnvName,
    EnvPrefix,
    EnvValue,
    Expression,
    GpuId,
    HostPattern,
    LabelName,
    LabelValue,
    Name,
    Namespace,
    PodField,
    Port,
    Quantity,
    ResourceName,
    Seconds,
    ShortReference,
    ShortText,
    Text,
    WholeSeconds,
)
from omnipipeline_spec.types.values import Spec, doc

Labels = Annotated[dict[LabelName, LabelValue], Meta(max_length=64)]
Annotations = Annotated[dict[AnnotationName, Text], Meta(max_length=64)]
FreeObject = dict[str, Any]
FreeObjects = Annotated[Sequence[FreeObject], Meta(max_length=64)]
Quantities = Annotated[dict[AmountName, Quantity], Meta(max_length=16)]


class LocalReference(Spec, frozen=True, kw_only=True):
    """A name in the pipeline's own namespace."""

    name: Annotated[ResourceName, doc("Name of the object, in the pipeline's namespace.")]


class KeyReference(Spec, frozen=True, kw_only=True):
    """One key of a Secret or ConfigMap in the pipeline's own namespace."""

    name: Annotated[ResourceName, doc("Name of the object, in the pipeline's namespace.")]
    key: Annotated[DataKey, doc("Key inside the object.")]
    optional: Annotated[bool | None, doc("Whether the pod starts without it.")] = None


class FieldReference(Spec, frozen=True, kw_only=True):
    """A field of the pod itself."""

    field_path: Annotated[PodField, doc("Such as `metadata.name` or `status.podIP`.")]
    api_version: Annotated[
        Annotated[str, Meta(max_length=2, pattern="^v1$")] | None,
        doc("Version of the schema the path is written in: v1."),
    ] = None


class ResourceReference(Spec, frozen=True, kw_only=True):
    """A resource of the container itself."""

    resource: Annotated[AmountField, doc("Such as `limits.memory`.")]
    container_name: Annotated[ShortText | None, doc("Container, when it is not this one.")] = None
    divisor: Annotated[Quantity | None, doc("Unit of the value.")] = None


class EnvSource(Spec, frozen=True, kw_only=True):
    """Source of an environment variable's value: exactly one field."""

    secret_key_ref: Annotated[KeyReference | None, doc("A key of a Secret.")] = None
    config_map_key_ref: Annotated[KeyReference | None, doc("A key of a ConfigMap.")] = None
    field_ref: Annotated[FieldReference | None, doc("A field of the pod.")] = None
    resource_field_ref: Annotated[ResourceReference | None, doc("A resource of the container.")] = None


class EnvVar(Spec, frozen=True, kw_only=True):
    """One environment variable of every stage process."""

    name: Annotated[EnvName, doc("Name of the variable.")]
    value: Annotated[EnvValue | None, doc("Its value.")] = None
    value_from: Annotated[EnvSource | None, doc("The source of its value, instead of `value`.")] = None


class EnvReference(Spec, frozen=True, kw_only=True):
    """A whole Secret or ConfigMap as environment variables."""

    name: Annotated[ResourceName, doc("Name of the object, in the pipeline's namespace.")]
    optional: Annotated[bool | None, doc("Whether the pod starts without it.")] = None


class EnvFrom(Spec, frozen=True, kw_only=True):
    """All keys of one Secret or ConfigMap as environment variables (a hub token, for instance)."""

    prefix: Annotated[EnvPrefix | None, doc("Put before each key.")] = None
    secret_ref: Annotated[EnvReference | None, doc("The Secret.")] = None
    config_map_ref: Annotated[EnvReference | None, doc("The ConfigMap.")] = None


class Resources(Spec, frozen=True, kw_only=True):
    """Requests and limits of a container; GPUs are added from the stages' `gpu`."""

    requests: Annotated[Quantities, doc("Requests, by resource name.")] = {}
    limits: Annotated[Quantities, doc("Limits, by resource name.")] = {}


class Toleration(Spec, frozen=True, kw_only=True):
    """A node taint that the pods tolerate."""

    key: Annotated[LabelName | None, doc("Taint key; unset matches all.")] = None
    operator: Annotated[Literal["Exists", "Equal"] | None, doc("How `value` is compared.")] = None
    value: Annotated[LabelValue | None, doc("Taint value.")] = None
    effect: Annotated[Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None, doc("Unset matches all.")] = None
    toleration_seconds: Annotated[int | None, doc("How long a NoExecute taint is tolerated.")] = None


class Placement(Spec, frozen=True, kw_only=True):
    """The nodes on which pods may run."""

    node_selector: Annotated[Labels, doc("Labels a node must have, such as a GPU type.")] = {}
    tolerations: Annotated[
        Annotated[Sequence[Toleration], Meta(max_length=32)], doc("Node taints that the pods tolerate.")
    ] = ()
    affinity: Annotated[FreeObject, doc("A pod's `affinity`, as in Kubernetes.")] = {}
    topology_spread_constraints: Annotated[FreeObjects, doc("A pod's `topologySpreadConstraints`.")] = ()
    near: Annotated[
        Annotated[Sequence[Name], Meta(max_length=64)],
        doc(
            "Stages with which these exchange much: pods prefer the domains of theirs. A preference, never a condition."
        ),
    ] = ()
    near_topology_keys: Annotated[
        Annotated[Sequence[LabelName], Meta(max_length=8)],
        doc("Labels of nodes, one for each kind of domain, the closest first: a node, an NVLink domain, a rack."),
    ] = ("kubernetes.io/hostname",)
    gpu_products: Annotated[
        Annotated[Sequence[LabelValue], Meta(max_length=32)],
        doc("GPU types that will do: values of the label nvidia.com/gpu.product, one of which a node must have."),
    ] = ()
    priority_class_name: Annotated[ResourceName | None, doc("Priority class of the pods.")] = None
    runtime_class_name: Annotated[ResourceName | None, doc("Runtime class of the pods.")] = None


class Startup(Spec, frozen=True, kw_only=True):
    """How long loading may take."""

    deadline_seconds: Annotated[
        WholeSeconds,
        doc(
            "A pod that is not ready by then is reported as StartupDeadlineExceeded. A process that makes no progress "
            "for this long while it loads is ended, and its container restarted."
        ),
    ] = 1800


class Drain(Spec, frozen=True, kw_only=True):
    """How a pod is drained."""

    timeout_seconds: Annotated[
        WholeSeconds,
        doc("Time for bound requests to finish after SIGTERM; the pod's grace period is longer than that."),
    ] = 120


class Autoscaling(Spec, frozen=True, kw_only=True):
    """Replicas that follow the load of the group. See docs/scaling.md."""

    min_replicas: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        doc("The least. 0: none while no request needs the group; the first ones wait for it (coordinator.hold)."),
    ] = 1
    max_replicas: Annotated[Annotated[int, Meta(ge=1, le=1000)], doc("The most.")]
    target_queue_seconds: Annotated[Seconds | None, doc("How long a request may wait for an instance; unset is 1.")] = (
        None
    )
    target_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=0.95)] | None,
        doc("Instead: the share of the instances' capacity that is used."),
    ] = None
    scale_up_delay_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=86_400)], doc("More are wanted for this long before they are started.")
    ] = 0
    scale_down_delay_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=86_400)],
        doc("Fewer are wanted for this long, or for two cold starts where these take longer, before some are ended."),
    ] = 60


class GpuClaim(Spec, frozen=True, kw_only=True):
    """GPUs by Dynamic Resource Allocation: each pod claims as many devices as the stages' `gpu` ask for."""

    device_class_name: Annotated[ResourceName, doc("DeviceClass of the devices, such as gpu.nvidia.com.")]
    selectors: Annotated[
        Annotated[Sequence[Expression], Meta(max_length=32)],
        doc("CEL expressions that each device must meet, such as device.driver == 'gpu.nvidia.com'."),
    ] = ()


class ProcessGroup(Spec, frozen=True, kw_only=True):
    """Settings of one process group, by its name. Every other field is optional."""

    name: Annotated[
        Name,
        doc("Process group: a stage's `process` (of a TP stage without one, its name); of fused stages, the first's."),
    ]
    replicas: Annotated[
        Annotated[int, Meta(ge=0, le=1000)] | None,
        doc("Instances of the group; unset is 1. Groups that share a pod have the same count. 0: of prefill only."),
    ] = None
    autoscaling: Annotated[
        Autoscaling | None,
        doc("Replicas that follow the load, instead of `replicas`. Groups that share a pod have the same."),
    ] = None
    resources: Annotated[Resources | None, doc("CPU, memory and others; those of the groups in one pod are added.")] = (
        None
    )
    gpu_resource_name: Annotated[DeviceResource | None, doc("Extended resource of a GPU; unset is nvidia.com/gpu.")] = (
        None
    )
    gpu_claim: Annotated[
        GpuClaim | None,
        doc("GPUs by Dynamic Resource Allocation, instead of an extended resource. See docs/gpus.md."),
    ] = None
    local_gpus: Annotated[
        Annotated[Sequence[Annotated[Sequence[GpuId], Meta(max_length=16)]], Meta(max_length=64)],
        doc("The device ids of each local replica of `omni up`, one list per replica."),
    ] = ()
    shared_memory: Annotated[Quantity | None, doc("Size of /dev/shm; those of the groups in one pod are added.")] = None
    startup: Annotated[Startup | None, doc("How long loading may take.")] = None
    drain: Annotated[Drain | None, doc("How the pods are drained; the longest of the groups in one pod applies.")] = (
        None
    )
    stuck_after_seconds: Annotated[
        WholeSeconds | None,
        doc("A process with work and no progress for this long is restarted; unset is 300. A pod's longest applies."),
    ] = None
    placement: Annotated[Placement | None, doc("The nodes on which the pods may run.")] = None
    pod_template: Annotated[
        FreeObject, doc("Merged over the generated pod template; containers, env and volumes merge by name.")
    ] = {}


class Tls(Spec, frozen=True, kw_only=True):
    """The certificate of the HTTP server."""

    secret_name: Annotated[
        ResourceName,
        doc("Secret of type kubernetes.io/tls: `tls.crt`, with its chain, and `tls.key`. Read again when it changes."),
    ]


class Http(Spec, frozen=True, kw_only=True):
    """The pipeline's HTTP server."""

    port: Annotated[Port, doc("Port of the OpenAI routes and /v1/pipeline.")] = HTTP_PORT
    max_body_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=1 << 40)], doc("Larger request bodies are refused with too_large.")
    ] = 64 << 20
    request_timeout_seconds: Annotated[Seconds, doc("Deadline of a request that sets none.")] = 600
    max_in_flight: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)],
        doc("Maximum number of requests at once; further ones are refused with rate_limited."),
    ] = 256
    api_key_secret_ref: Annotated[
        KeyReference | None,
        doc("Bearer tokens, one per line; a client must send one of them. Read again when the Secret changes."),
    ] = None
    tls: Annotated[Tls | None, doc("Serve HTTPS instead of HTTP; unset is plain HTTP inside the cluster.")] = None
    media_hosts: Annotated[
        Annotated[Sequence[ShortText], Meta(max_length=64)],
        doc("Hosts allowed in media URLs of requests, as host or host:port."),
    ] = ()
    allowed_hosts: Annotated[
        Annotated[Sequence[ShortText], Meta(max_length=64)],
        doc("Host names whose pages may call the API from browsers (CORS), and that Host may have; none by default."),
    ] = ()


class Hold(Spec, frozen=True, kw_only=True):
    """Requests that wait, within their deadline, for an instance that is on its way; others get unavailable."""

    seconds: Annotated[
        Annotated[float, Meta(ge=0, le=86_400)],
        doc(
            "How long an instance is expected after the last one of its group has left, longer while one loads; 0: "
            "requests never wait."
        ),
    ] = 60
    max_requests: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)] | None,
        doc("How many may wait; unset is three quarters of http.maxInFlight, so that others are still admitted."),
    ] = None
    max_bytes: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 40)],
        doc("How large the requests that wait may be together; one alone may be larger."),
    ] = 256 << 20


class Coordinator(Spec, frozen=True, kw_only=True):
    """The processes that admit, bind and follow requests."""

    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        doc("Coordinators behind the Service, which share the requests; unset is 2. See docs/scaling.md."),
    ] = None
    resources: Annotated[Resources | None, doc("CPU and memory of the coordinator.")] = None
    http: Annotated[Http, doc("The pipeline's HTTP server.")] = field(default_factory=Http)
    retries: Annotated[
        Annotated[int, Meta(ge=0, le=5)],
        doc("How often a request is retried when its instance dies before anything was streamed."),
    ] = 1
    hold: Annotated[Hold, doc("Requests that wait for an instance.")] = field(default_factory=Hold)
    drain: Annotated[
        Drain | None, doc("How the coordinator is drained in a roll: the time for open streams to finish.")
    ] = None
    placement: Annotated[Placement | None, doc("The nodes on which the coordinator may run.")] = None
    pod_template: Annotated[FreeObject, doc("Merged over the generated pod template, as in processGroups.")] = {}


class Security(Spec, frozen=True, kw_only=True):
    """The peers that may connect to the stages."""

    mode: Annotated[
        Literal["Curve", "None"],
        doc("Curve: every TCP socket requires the pipeline's key. None: for a trusted network."),
    ] = "Curve"


class Control(Spec, frozen=True, kw_only=True):
    """The control plane."""

    heartbeat_seconds: Annotated[Seconds, doc("Interval of load and progress reports.")] = 1
    dead_after_seconds: Annotated[Seconds, doc("Silence on a connection after which the peer is considered dead.")] = 3
    security: Annotated[Security, doc("The rules of who may connect to the stages.")] = field(default_factory=Security)


class Rdma(Spec, frozen=True, kw_only=True):
    """RDMA devices for the stages' pods."""

    resource_name: Annotated[DeviceResource, doc("Extended resource of the device plugin, such as rdma/hca.")]
    count: Annotated[Annotated[int, Meta(ge=1, le=64)], doc("Devices per pod.")] = 1


class DataPlane(Spec, frozen=True, kw_only=True):
    """Transport of tensors between pods."""

    rdma: Annotated[Rdma | None, doc("RDMA devices for the stages' pods.")] = None
    allow_tcp: Annotated[
        bool, doc("Whether tensors between stages may use TCP; false: refused where no faster way works.")
    ] = field(name="allowTCP", default=True)
    mooncake_protocol: Annotated[
        Literal["tcp", "rdma"] | None,
        doc("The protocol of relayBackend mooncake; unset: rdma in pods with RDMA devices, else tcp."),
    ] = None


class Prefetch(Spec, frozen=True, kw_only=True):
    """Filling the model cache before pods start."""

    enabled: Annotated[
        bool,
        doc("Run one download Job per model and revision; with type Node, pods fetch."),
    ] = False
    secret_name: Annotated[
        ResourceName | None,
        doc(
            "Secret whose keys are variables of the download alone: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
            "AWS_ENDPOINT_URL, AWS_REGION of an object store."
        ),
    ] = None


class ModelCache(Spec, frozen=True, kw_only=True):
    """The place where weights are kept between pods."""

    type: Annotated[
        Literal["None", "EmptyDir", "PersistentVolumeClaim", "Image", "Node"],
        doc(
            "None: each container downloads. EmptyDir: shared within a pod. PersistentVolumeClaim: outlives pods. "
            "Image: an OCI image or artifact, mounted read-only at /models. Node: a directory of each node, filled by "
            "its first pod."
        ),
    ] = "None"
    image: Annotated[ShortReference | None, doc("OCI reference of the weights; nodes share what they have pulled.")] = (
        None
    )
    pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"] | None,
        doc("The pull policy of that image; unset: Always for the tag latest, else IfNotPresent."),
    ] = None
    claim_name: Annotated[ResourceName | None, doc("An existing claim to use.")] = None
    size: Annotated[
        Quantity | None,
        doc("Size of the EmptyDir, or of a claim that the operator creates; the claim outlives the pipeline."),
    ] = None
    storage_class_name: Annotated[ResourceName | None, doc("Storage class of that claim.")] = None
    prefetch: Annotated[Prefetch, doc("Filling the cache before pods start.")] = field(default_factory=Prefetch)


class Service(Spec, frozen=True, kw_only=True):
    """The Service in front of the coordinator."""

    type: Annotated[Literal["ClusterIP", "NodePort", "LoadBalancer"], doc("Kind of Service.")] = "ClusterIP"
    port: Annotated[Port | None, doc("Port of the Service; unset is the coordinator's http.port.")] = None
    ip_family_policy: Annotated[
        Literal["SingleStack", "PreferDualStack", "RequireDualStack"] | None,
        doc("IP families of the Service; unset is PreferDualStack: both, where the cluster has both."),
    ] = None
    annotations: Annotated[Annotations, doc("Annotations of the Service.")] = {}


class Ingress(Spec, frozen=True, kw_only=True):
    """An Ingress in front of the Service."""

    class_name: Annotated[ResourceName | None, doc("Ingress class.")] = None
    host: Annotated[HostPattern | None, doc("Host name; unset matches all.")] = None
    tls_secret_name: Annotated[ResourceName | None, doc("Secret with the certificate; unset is plain HTTP.")] = None
    annotations: Annotated[Annotations, doc("Annotations of the Ingress: body size, time-outs, cert-manager.")] = {}


class RouteParent(Spec, frozen=True, kw_only=True):
    """A Gateway that serves a route."""

    name: Annotated[ResourceName, doc("Name of the Gateway.")]
    namespace: Annotated[Namespace | None, doc("Its namespace; unset is the pipeline's.")] = None
    section_name: Annotated[
        ResourceName | None, doc("The one listener of it that serves; unset: all that allow it.")
    ] = None
    port: Annotated[Port | None, doc("The one port of its listeners; unset: all.")] = None


class Route(Spec, frozen=True, kw_only=True):
    """An HTTPRoute of the Gateway API in front of the Service, without a time-out: the coordinator ends requests."""

    parent_refs: Annotated[
        Annotated[Sequence[RouteParent], Meta(min_length=1, max_length=8)], doc("The Gateways that serve it.")
    ]
    hostnames: Annotated[
        Annotated[Sequence[HostPattern], Meta(max_length=16, extra={"unique": True})],
        doc("Host names, also `*.` before one; empty matches those of the listeners."),
    ] = ()
    https: Annotated[bool, doc("Whether clients reach the Gateway by HTTPS: the scheme of the URL in the status.")] = (
        True
    )
    annotations: Annotated[Annotations, doc("Annotations of the HTTPRoute.")] = {}


class Expose(Spec, frozen=True, kw_only=True):
    """How clients reach the pipeline. Changes restart no pod."""

    service: Annotated[Service, doc("The Service in front of the coordinator.")] = field(default_factory=Service)
    ingress: Annotated[Ingress | None, doc("An Ingress; unset creates none.")] = None
    route: Annotated[Route | None, doc("An HTTPRoute, where the cluster has the Gateway API; unset creates none.")] = (
        None
    )


class AbortOn(Spec, frozen=True, kw_only=True):
    """When a new revision is taken back: it is worse than these bounds, and than the old one meanwhile."""

    error_rate: Annotated[
        Annotated[float, Meta(ge=0, lt=1)],
        doc("Share of its attempts that may fail by the pipeline's fault, retried ones included."),
    ] = 0.05
    p99_seconds: Annotated[
        Seconds | None, doc("How long a request may take, but for one in a hundred; unset: times decide nothing.")
    ] = None


class Canary(Spec, frozen=True, kw_only=True):
    """A new revision gets a share of the requests first, more with each step, and is taken back when it is worse."""

    weight: Annotated[
        Annotated[int, Meta(ge=1, le=99)],
        doc("Share of the requests that go to the new revision, in percent; each step adds as much."),
    ] = 10
    step_seconds: Annotated[WholeSeconds, doc("How long a step takes, from when the revision gets its share.")] = 60
    abort_on: Annotated[AbortOn, doc("When the new revision is taken back.")] = field(default_factory=AbortOn)


class Rollout(Spec, frozen=True, kw_only=True):
    """How a change of a unit reaches its pods."""

    strategy: Annotated[
        Literal["Coherent", "Recreate"],
        doc(
            "Coherent: new pods beside old ones, each request on one revision. Recreate: old pods end first, and "
            "requests wait for the new ones."
        ),
    ] = "Coherent"
    max_surge: Annotated[
        Annotated[int, Meta(ge=0, le=100)],
        doc("New instances of a unit at a time, beside its replicas. 0: old ones end first, see maxUnavailable."),
    ] = 1
    max_unavailable: Annotated[
        Annotated[int, Meta(ge=0, le=100)],
        doc(
            "Instances of a unit that may be missing during a roll; one of several always stays. Rolls without "
            "spare GPUs need maxSurge: 0, maxUnavailable: 1."
        ),
    ] = 0
    canary: Annotated[
        Canary | None,
        doc("Try the new revision with a share of the requests; unset: its share follows its ready instances."),
    ] = None
    progress_deadline_seconds: Annotated[
        WholeSeconds, doc("A roll without progress for this long sets Progressing=False.")
    ] = 3600
    paused: Annotated[bool, doc("Pause the roll.")] = False
    revision_history_limit: Annotated[
        Annotated[int, Meta(ge=0, le=50)], doc("Old Deployments kept at 0 replicas for rolling back.")
    ] = 5


class PodDisruptionBudget(Spec, frozen=True, kw_only=True):
    """A limit for node drains."""

    enabled: Annotated[bool, doc("Create a budget per unit, and one for the coordinators.")] = True
    max_unavailable: Annotated[Annotated[int, Meta(ge=1, le=1000)], doc("Pods of a unit that may be unavailable.")] = 1


class Disruption(Spec, frozen=True, kw_only=True):
    """Voluntary disruptions."""

    pod_disruption_budget: Annotated[
        PodDisruptionBudget | None,
        doc("A limit for node drains; unset creates a budget for the coordinators alone, where there are several."),
    ] = None


class NetworkPolicy(Spec, frozen=True, kw_only=True):
    """The clients that may reach the pods."""

    enabled: Annotated[bool, doc("Allow others HTTP only; false creates no policy.")] = True
    ingress_from: Annotated[FreeObjects, doc("NetworkPolicy peers that may reach HTTP; empty allows all.")] = ()
    extra_egress: Annotated[
        FreeObjects, doc("NetworkPolicy egress rules in addition to the pipeline's own; empty allows all egress.")
    ] = ()


class Tracing(Spec, frozen=True, kw_only=True):
    """OpenTelemetry traces."""

    endpoint: Annotated[Text | None, doc("OTLP over HTTP, such as http://collector:4318; unset sends none.")] = None
    sample_ratio: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        doc("Share of requests that are traced, of those whose client has not decided (traceparent)."),
    ] = 1


class Observability(Spec, frozen=True, kw_only=True):
    """Telemetry."""

    tracing: Annotated[Tracing | None, doc("OpenTelemetry traces.")] = None


class EmptyDir(Spec, frozen=True, kw_only=True):
    """A volume that lives as long as its pod."""

    size_limit: Annotated[Quantity | None, doc("Maximum size.")] = None


class ProfilingStorage(Spec, frozen=True, kw_only=True):
    """The place where event files are written: exactly one field. Part of the revision of every unit."""

    empty_dir: Annotated[EmptyDir | None, doc("A volume of the pod.")] = None
    claim_name: Annotated[ResourceName | None, doc("A claim that all pods can write.")] = None


class Profiling(Spec, frozen=True, kw_only=True):
    """The request-level profiler."""

    enabled: Annotated[bool, doc("Whether profiles may be started.")] = True
    storage: Annotated[
        ProfilingStorage | None, doc("The place where event files are written; unset is an emptyDir.")
    ] = None
    max_seconds: Annotated[
        WholeSeconds, doc("A profile with a torch trace that is not stopped ends after this time.")
    ] = 600
