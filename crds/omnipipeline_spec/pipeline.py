"""The author's types: the pipeline, its stages, its relays and endpoints.

Here: `PipelineConfig` (the resource's ``spec``, and what a Python module instantiates), `StageConfig`, `RelayConfig`,
`EndpointsConfig`, and properties derived from their own fields. Not here: the cluster's value types (`cluster`), the
resource's status (`status`), validation (`topology`), the plan of a process (`planning`). Called by everything that
reads a spec. Building a value validates nothing: `topology.check` and `planning.plan` do, and report all faults at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from omnipipeline_spec.cluster import (
    Control,
    Coordinator,
    DataPlane,
    Disruption,
    EnvFrom,
    EnvVar,
    Expose,
    FreeObject,
    LocalReference,
    ModelCache,
    NetworkPolicy,
    Observability,
    ProcessGroup,
    Profiling,
    Rollout,
)
from omnipipeline_spec.types.quantities import (
    MAX_EDGES,
    MAX_GPUS_PER_STAGE,
    MAX_STAGES,
    EnvName,
    EnvValue,
    Fraction01,
    Function,
    GpuId,
    ImageReference,
    Name,
    Quantity,
    ResourceName,
    ShortText,
    Text,
)
from omnipipeline_spec.types.relays import RelayBackend
from omnipipeline_spec.types.routes import MAX_SERVED, Served
from omnipipeline_spec.types.values import OUTSIDE_RESOURCE, SCALAR_OR_LIST, Spec, doc

StageNames = Annotated[Sequence[Name], Meta(max_length=MAX_EDGES, extra=SCALAR_OR_LIST | {"unique": True})]
ChatParameter = Literal[
    "tools",
    "response_format",
    "logprobs",
    "prompt_logprobs",
    "n",
    "chat_template_kwargs",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "echo",
    "continue_final_message",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "cache_salt",
    "priority",
    "structured_outputs",
    "return_token_ids",
    "mm_processor_kwargs",
]


class RelayConfig(Spec, frozen=True, kw_only=True):
    """Transport of outgoing tensors, device of incoming ones. Unset fields follow from placement and `relayBackend`."""

    slot_size_mb: Annotated[
        Annotated[int, Meta(ge=1, le=65536)], doc("Largest slot in MiB; a larger payload is sent in pieces.")
    ] = 512
    credits: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], doc("Unreleased large payloads per edge; those up to 2 MiB share 64 MiB.")
    ] = 2
    rank: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None, doc("Rank in the author's own NCCL world; local runs only.")
    ] = None
    world_size: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None, doc("Size of that NCCL world; local runs only.")
    ] = None
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        doc("The device where tensors arrive at this stage; unset: on its gpu, or cpu without one."),
    ] = None


class GpuMemory(Spec, frozen=True, kw_only=True):
    """A stage's memory budget on each of its GPUs: exactly one of the two fields."""

    fraction: Annotated[Fraction01 | None, doc("Fraction of the memory of each of the stage's GPUs.")] = None
    bytes: Annotated[Quantity | None, doc("Amount of memory on each of the stage's GPUs.")] = None


GpuIds = Annotated[
    Annotated[Sequence[GpuId], Meta(max_length=MAX_GPUS_PER_STAGE)] | int,
    Meta(description="The same as of a stage.", extra=SCALAR_OR_LIST | {"unique": True}),
]
Ranks = Annotated[Annotated[int, Meta(ge=1, le=MAX_GPUS_PER_STAGE)], doc("The same as of a stage.")]


class DecodePlacement(Spec, frozen=True, kw_only=True):
    """The group where a disaggregated stage decodes. The stage's own fields of these names say the same, or are
    unset.
    """

    process: Annotated[Name | None, doc("The same as of a stage.")] = None
    gpu: GpuIds = ()
    tp_size: Ranks = 1

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPU ids as a tuple."""
        return (self.gpu,) if isinstance(self.gpu, int) else tuple(self.gpu)


class PrefillPlacement(Spec, frozen=True, kw_only=True):
    """The group where the prompts of a disaggregated stage are computed. The stage's gpuMemory applies there, too."""

    process: Annotated[Name, doc("A process of its own, so that it scales apart.")]
    gpu: GpuIds = ()
    tp_size: Ranks = 1
    factory_args: Annotated[FreeObject, doc("Override the stage's.")] = {}

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPU ids as a tuple."""
        return (self.gpu,) if isinstance(self.gpu, int) else tuple(self.gpu)


class Disaggregation(Spec, frozen=True, kw_only=True):
    """Prefill and decode of one stage in process groups of their own, which scale apart."""

    prefill: Annotated[PrefillPlacement, doc("Computes prompts, as the stage NAME-prefill, and sends KV blocks.")]
    decode: Annotated[DecodePlacement | None, doc("Unset: where the stage itself says.")] = None


class StageConfig(Spec, frozen=True, kw_only=True):
    """One logical stage: how it is made, where it runs, where its results and streams go."""

    name: Annotated[Name, doc("Unique name of the stage.")]
    factory: Annotated[Function, doc("Function that makes the stage, as pkg.mod:fn. Called once per process.")]
    process: Annotated[
        Name | None,
        doc(
            "OS process; stages with the same value share it. Required unless tpSize > 1: there it prefixes the ranks."
        ),
    ] = None
    factory_args: Annotated[FreeObject, doc("Arguments of the factory.")] = {}
    next: Annotated[StageNames, doc("Stages that get the result. Exactly one of next and terminal.")] = ()
    terminal: Annotated[bool, doc("Whether the result goes to the client.")] = False
    route_fn: Annotated[
        Function | None, doc("(request_id, output) -> stage name or names among next, per request.")
    ] = None
    gpu: Annotated[
        Annotated[Sequence[GpuId], Meta(max_length=MAX_GPUS_PER_STAGE)] | int,
        Meta(
            description="GPU ids, as on one host, one per TP rank; empty is CPU. An equal id is the same GPU and pod.",
            extra=SCALAR_OR_LIST | {"unique": True},
        ),
    ] = ()
    tp_size: Annotated[Annotated[int, Meta(ge=1, le=MAX_GPUS_PER_STAGE)], doc("Tensor-parallel ranks.")] = 1
    gpu_memory: Annotated[GpuMemory | None, doc("Budget per GPU; required once two process groups share a GPU id.")] = (
        None
    )
    wait_for: Annotated[StageNames, doc("Stages whose results are joined before this one runs; needs mergeFn.")] = ()
    wait_for_fn: Annotated[
        Function | None, doc("(request_id, from_stage, payload) -> active subset of waitFor, or None if not known yet.")
    ] = None
    merge_fn: Annotated[
        Function | None, doc("({stage: payload}) -> payload: joins the payloads of the stages in waitFor.")
    ] = None
    stream_to: Annotated[StageNames, doc("Stages that get this stage's chunks while it runs.")] = ()
    stream_at_end: Annotated[
        StageNames,
        doc("Stages in streamTo that get the chunks when this stage has ended."),
    ] = ()
    stream_done_to_fn: Annotated[
        Function | None,
        doc("(request_id, output) -> the stages in streamTo that are notified of the end of the stream."),
    ] = None
    project_payload: Annotated[
        Annotated[dict[Name, Function], Meta(max_length=2 * MAX_EDGES)],
        doc("Target stage -> function that makes the payload for this target."),
    ] = {}
    relay: Annotated[
        RelayConfig | None, doc("Transport of this stage's outgoing tensors, and where incoming ones arrive.")
    ] = None
    disaggregation: Annotated[
        Disaggregation | None,
        doc("Prefill and decode apart, for an engine that transfers KV, such as omni.Autoregressive."),
    ] = None

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPU ids as a tuple."""
        return (self.gpu,) if isinstance(self.gpu, int) else tuple(self.gpu)

    @property
    def group(self) -> str:
        """The declared process group, before fusion."""
        return self.process or self.name


class EndpointsConfig(Spec, frozen=True, kw_only=True):
    """Sockets of local runs."""

    base_path: Annotated[
        Text | None,
        doc("Folder of the Unix sockets; unset is a private folder per run. A path that is too long is refused."),
    ] = None


class Code(Spec, frozen=True, kw_only=True):
    """Small Python files on the stages' sys.path. Larger code belongs in an image built FROM ours."""

    inline: Annotated[
        Annotated[dict[ShortText, Annotated[str, Meta(max_length=262144)]], Meta(max_length=32)],
        doc("File name -> text. Part of the revision."),
    ] = {}
    config_map_ref: Annotated[
        LocalReference | None,
        doc("A ConfigMap of such files. A change of its content restarts nothing: set restartedAt."),
    ] = None


def class_name(cls: type[PipelineConfig]) -> str:
    """How ``config_cls`` names a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


class PipelineConfig(Spec, frozen=True, kw_only=True):
    """A pipeline: the spec of an OmniPipeline, and what a Python module instantiates."""

    stages: Annotated[
        Annotated[Sequence[StageConfig], Meta(min_length=1, max_length=MAX_STAGES, extra={"map_key": "name"})],
        doc("The stages; the first is the entry unless entryStage says otherwise."),
    ]
    name: Annotated[
        str | None, Meta(description="Name for reports; the resource's is metadata.name.", extra=OUTSIDE_RESOURCE)
    ] = None
    model_path: Annotated[
        Text | None, doc("Hub id, local path or s3://BUCKET/PREFIX; a pipeline of plain functions has none.")
    ] = None
    model_revision: Annotated[ShortText | None, doc("Commit or tag on the hub.")] = None
    serves: Annotated[
        Annotated[Sequence[Served], Meta(max_length=MAX_SERVED, extra={"unique": True})],
        doc("OpenAI routes to serve; /v1/pipeline is always served."),
    ] = ()
    accepts: Annotated[
        Annotated[Sequence[ChatParameter], Meta(max_length=32, extra={"unique": True})],
        doc("Parameters of a chat that the stages honour; others of this list are refused by name."),
    ] = ()
    entry_stage: Annotated[Name | None, doc("Stage that gets new requests; unset is the first.")] = None
    relay_backend: Annotated[RelayBackend, doc("Transport of tensors; auto chooses per edge.")] = "auto"
    fused_stages: Annotated[
        Annotated[
            Sequence[Annotated[Sequence[Name], Meta(min_length=2, max_length=16, extra={"unique": True})]],
            Meta(max_length=16),
        ],
        doc("Adjacent, linear stages to run in one process; without TP, on at most one GPU."),
    ] = ()
    runtime_overrides: Annotated[
        Annotated[dict[Name, FreeObject], Meta(max_length=MAX_STAGES)],
        doc("Stage -> factory arguments that override its factoryArgs."),
    ] = {}
    env_defaults: Annotated[
        Annotated[dict[EnvName, EnvValue], Meta(max_length=256)],
        doc("Environment variables set before factories are imported, unless the process has them already."),
    ] = {}
    endpoints: Annotated[EndpointsConfig, doc("Sockets of local runs.")] = field(default_factory=EndpointsConfig)
    terminal_stages_fn: Annotated[
        Function | None, doc("(request) -> terminal stages of this request, or None for all of them.")
    ] = None
    gpu_memory_limit: Annotated[
        Fraction01, doc("Maximum sum of the budgets on one GPU, as a fraction of its memory.")
    ] = 0.95
    code: Annotated[Code | None, doc("Small Python files on the stages' sys.path.")] = None
    config_cls: Annotated[
        str | None,
        Meta(
            description="Class with the defaults of a plain file, as pkg.mod:Class. A Python value has its class here.",
            extra=OUTSIDE_RESOURCE,
        ),
    ] = None

    image: Annotated[
        ImageReference | None, doc("Image of all pods; unset is the operator's default when the revision is made.")
    ] = None
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"] | None, doc("When the image is pulled.")
    ] = None
    image_pull_secrets: Annotated[
        Annotated[Sequence[LocalReference], Meta(max_length=16)], doc("Secrets for the registry.")
    ] = ()
    service_account_name: Annotated[ResourceName | None, doc("Service account of the pods.")] = None
    env: Annotated[
        Annotated[Sequence[EnvVar], Meta(max_length=256, extra={"map_key": "name"})],
        doc("Environment of every stage process."),
    ] = ()
    env_from: Annotated[
        Annotated[Sequence[EnvFrom], Meta(max_length=32)], doc("Secrets and ConfigMaps as environment.")
    ] = ()
    process_groups: Annotated[
        Annotated[Sequence[ProcessGroup], Meta(max_length=MAX_STAGES, extra={"map_key": "name"})],
        doc("Settings of process groups, by name."),
    ] = ()
    coordinator: Annotated[Coordinator, doc("The process that admits, binds and follows requests.")] = field(
        default_factory=Coordinator
    )
    control: Annotated[Control, doc("The control plane.")] = field(default_factory=Control)
    data_plane: Annotated[DataPlane, doc("Transport of tensors between pods.")] = field(default_factory=DataPlane)
    model_cache: Annotated[ModelCache, doc("The place where weights are kept between pods.")] = field(
        default_factory=ModelCache
    )
    expose: Annotated[Expose, doc("How clients reach the pipeline.")] = field(default_factory=Expose)
    rollout: Annotated[Rollout, doc("How a change reaches the pods.")] = field(default_factory=Rollout)
    disruption: Annotated[Disruption, doc("Voluntary disruptions.")] = field(default_factory=Disruption)
    network_policy: Annotated[
        NetworkPolicy | None, doc("The rules of who may reach the pods; unset is the same as {}.")
    ] = None
    observability: Annotated[Observability, doc("Telemetry.")] = field(default_factory=Observability)
    profiling: Annotated[Profiling, doc("The request-level profiler.")] = field(default_factory=Profiling)
    restarted_at: Annotated[
        ShortText | None, doc("A new value restarts all pods: it is a new revision of every unit.")
    ] = None
    suspend: Annotated[bool, doc("Scale all pods to zero and keep the resource.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is None and self.model_path is not None:
            msgspec.structs.force_setattr(self, "name", self.model_path)
        if self.config_cls is None:
            msgspec.structs.force_setattr(self, "config_cls", class_name(type(self)))

    @property
    def resolved_entry_stage(self) -> str:
        """The stage that gets new requests."""
        return self.entry_stage or self.stages[0].name

    @property
    def terminal_stages(self) -> tuple[str, ...]:
        """Names of the stages whose results go to the client, in spec order."""
        return tuple(stage.name for stage in self.stages if stage.terminal)

    @property
    def gpu_placement(self) -> dict[str, int | tuple[int, ...]]:
        """Stage -> GPU id, of a TP stage all its ranks' ids; stages on the CPU are absent."""
        return {stage.name: stage.gpus[0] if stage.tp_size == 1 else stage.gpus for stage in self.stages if stage.gpus}

    def stage(self, name: str) -> StageConfig:
        """The stage of that name. Raises: KeyError: no stage has it."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)
