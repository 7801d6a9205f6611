"""Types of the plan that `planning.plan(spec)` derives, and of the part that each process gets.

Values only: no logic, no clock, no cluster. All are frozen and encode to the same MessagePack or JSON bytes for the
same spec, so a hash over them is a revision. The plan holds no addresses of other instances: the coordinator sends
them in Welcome, so a roll of one group does not change the revision of another.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from omnipipeline_spec.types.pods import HTTP_PORT
from omnipipeline_spec.types.relays import RelayBackend

QUEUE_S = 1.0  # how long a request may wait for an instance, unless the author says
PLAN_VERSION = 1  # raised when a process of version N could misread a plan of N-1


class RelayPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one stage's outgoing tensors travel."""

    backend: RelayBackend = "auto"
    slot_bytes: int = 512 << 20  #: Largest single slot; a larger payload goes in pieces, copied together on arrival.
    credits: int = 2  #: Unreleased slots allowed per edge.
    device: str = "cpu"  #: The device where tensors arrive at this stage: ``cpu`` or ``cuda``, its own device.
    rank: int | None = None  #: The rank in an NCCL world that the author laid out; local runs.
    world_size: int | None = None


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage as its process gets it, with hooks and declared edges."""

    name: str
    group: str  #: Process group (of a TP stage: the prefix of its rank processes).
    factory: str
    factory_args: dict[str, Any] = {}  #: ``runtimeOverrides`` already merged in.
    next: tuple[str, ...] = ()
    terminal: bool = False
    route_fn: str | None = None
    wait_for: tuple[str, ...] = ()
    wait_for_fn: str | None = None
    merge_fn: str | None = None
    stream_to: tuple[str, ...] = ()
    stream_at_end: tuple[str, ...] = ()  #: Those among ``stream_to`` that stream at the end.
    stream_from: tuple[str, ...] = ()  #: Derived: the stages that name this one in ``streamTo``.
    inputs_from: tuple[str, ...] = ()  #: Derived: the stages that name this one in ``next``.
    entry: bool = False
    stream_done_to_fn: str | None = None
    project_payload: dict[str, str] = {}
    gpus: tuple[int, ...] = ()  #: Renumbered 0..n-1 inside the pod unit; one per TP rank.
    gpu_memory_fraction: float | None = None
    gpu_memory_bytes: int | None = None
    tp_size: int = 1
    relay: RelayPlan = RelayPlan()
    kv_role: Literal["", "prefill", "decode"] = ""  #: The role of a stage with disaggregation.
    kv_peer: str = ""  #: The stage of the other role.


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process group: the stages of one OS process (a TP stage: one process per rank)."""

    name: str
    unit: str
    index: int  #: Position inside its pod; the control port is 5550 + index.
    stages: tuple[str, ...]  #: Names in spec order; unique.
    processes: tuple[str, ...]  #: OS process names: ``(name,)``, or ``(name_tp0, name_tp1, ...)``.
    tp_size: int = 1


class UnitPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pod unit: the groups that must share a pod. All that, when changed, must restart it.

    ``revision`` hashes everything else in here; of ``code``, what its modules mean.
    """

    version: int = PLAN_VERSION
    pipeline: str
    name: str  #: The name of its first group.
    groups: tuple[GroupPlan, ...]
    stages: tuple[StagePlan, ...]  #: Stages of all its groups, in spec order.
    gpu_ids: tuple[int, ...] = ()  #: The author's ids, ascending; the pod's devices are their positions.
    model_path: str | None = None
    model_revision: str | None = None
    env_defaults: dict[str, str] = {}
    code: dict[str, str] = {}  #: Files of ``spec.code.inline`` that these stages use: file name -> text.
    code_config_map: str | None = None
    drain_timeout_s: float = 120.0
    startup_deadline_s: float = 1800.0
    stuck_after_s: float = 300.0
    heartbeat_s: float = 1.0
    dead_after_s: float = 3.0
    security: Literal["Curve", "None"] = "Curve"
    on_cpu: bool = False  #: The unit's GPU ids were taken away for a run on a machine without GPUs.
    allow_tcp: bool = True  #: Whether tensors may travel over plain TCP.
    gpu_memory_limit: float = 0.95  #: The share of a GPU's memory that budgets of stages in bytes may sum to there.
    mooncake_protocol: Literal["tcp", "rdma"] | None = None  #: None: what the process has a device for.
    pod: dict[str, Any] = {}  #: Values that the operator needs for the pod (image, resources, placement…), canonical.
    revision: str = ""  #: 8 hex digits, over all of the above.


class EdgePlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One edge and the class of transport that placement allows it."""

    source: str
    target: str
    kind: Literal["normal", "stream", "kv"]  #: ``kv``: KV blocks from a prefill stage; no request needs this edge.
    transport: Literal["in_process", "same_pod", "network"]
    relay: str  #: The expected one: ``in_process``, or a backend of this version. Facts decide at run time.
    medium: str  #: The medium that should carry its bytes on a cluster, as `edge_instances` shows it at run time.


class PipelineRevision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A set of unit revisions that belong together, with its whole graph: one entry of the coordinator's list."""

    revision: str  #: 8 hex digits.
    units: dict[str, str]  #: unit -> unit revision.
    groups: dict[str, str]  #: group -> unit.
    stages: dict[str, str]  #: stage -> group.
    entry: str
    terminals: tuple[str, ...]
    edges: tuple[tuple[str, str, str], ...]  #: (source, target, normal | stream | kv)
    routing: tuple[str, ...] = ()  #: Stages whose ``routeFn`` chooses among their targets.
    joining: tuple[str, ...] = ()  #: Stages that wait for all their sources: ``waitFor`` without ``waitForFn``.


class CanaryShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of requests that a pipeline revision gets while it is tried beside others."""

    revision: str
    weight: Annotated[float, msgspec.Meta(ge=0, le=1)]  #: 0: none, while another revision can serve.


class CoordinatorPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The plan that the coordinator's process gets. Not part of the revision map: it serves old and new revisions."""

    version: int = PLAN_VERSION
    pipeline: str
    model: str  #: The id that ``/v1/models`` answers: model_path, else the pipeline's name.
    serves: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    terminal_stages_fn: str | None = None
    env_defaults: dict[str, str] = {}
    code: dict[str, str] = {}
    code_config_map: str | None = None
    http_port: int = HTTP_PORT
    max_body_bytes: int = 64 << 20
    request_timeout_s: float = 600.0
    max_in_flight: int = 256
    media_hosts: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    retries: int = 1
    hold_s: float = 60.0
    hold_requests: int = 192
    hold_bytes: int = 256 << 20
    dead_after_s: float = 3.0
    security: Literal["Curve", "None"] = "Curve"
    relay_backend: str = "auto"
    drain_timeout_s: float = 120.0
    pod: dict[str, Any] = {}
    revision: str = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The author's limits of one unit's replicas (`omnipipeline_spec.scaling`)."""

    least: int
    most: int
    target_queue_s: float = QUEUE_S  #: How long a request may wait for an instance.
    target_utilization: float | None = None  #: Instead: the share of the instances' capacity that is used.
    up_delay_s: float = 0.0
    down_delay_s: float = 60.0


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything `plan(spec)` derives."""

    pipeline: str
    coordinator: CoordinatorPlan
    units: tuple[UnitPlan, ...]  #: Units in order of their first stage in the spec.
    edges: tuple[EdgePlan, ...]
    replicas: dict[str, int]  #: unit -> replicas; of one that is scaled by its load, the least. Never in a revision.
    autoscaling: dict[str, Limits] = {}  #: Units whose replicas follow their load. Never part of a revision.
    local_gpus: dict[str, tuple[tuple[int, ...], ...]]  #: group -> device ids of each local replica.
    current: PipelineRevision
