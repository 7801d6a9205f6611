"""The resource's ``status``, as the operator reports it.

Here: value types only; the CRD is generated from them. Not here: how the values are determined (the operator's
``changes``). Called by `schema`; the operator writes these fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, field

from omnipipeline_spec.types.quantities import MAX_STAGES, ShortText, Text
from omnipipeline_spec.types.values import Spec, doc

Count = Annotated[int, Meta(ge=0)]
MAX_UNITS = 2 * MAX_STAGES + 1  # those of a revision that was taken back, those that serve again, and the coordinators
Message = Annotated[str, Meta(max_length=32768)]


class Endpoint(Spec, frozen=True, kw_only=True):
    """URLs of the pipeline."""

    url: Annotated[Text | None, doc("URL inside the cluster.")] = None
    external: Annotated[
        Text | None, doc("URL from outside, once an Ingress, a Gateway or a load balancer serves it.")
    ] = None


class GpuCounts(Spec, frozen=True, kw_only=True):
    """GPUs of all pods."""

    requested: Annotated[Count, doc("GPUs that the spec asks for.")] = 0
    ready: Annotated[Count, doc("GPUs of ready pods.")] = 0
    terminating: Annotated[Count, doc("GPUs of terminating pods.")] = 0


class Revisions(Spec, frozen=True, kw_only=True):
    """Pipeline revisions."""

    current: Annotated[ShortText | None, doc("The revision that serves.")] = None
    current_image: Annotated[Text | None, doc("Image of its pods.")] = None
    update: Annotated[ShortText | None, doc("The revision that the spec asks for.")] = None
    update_image: Annotated[
        Text | None, doc("Image of its pods: the spec's, else the one pinned for this revision.")
    ] = None


class UnitStatus(Spec, frozen=True, kw_only=True):
    """One pod unit."""

    name: Annotated[ShortText, doc("Name of the unit: that of its first process group.")]
    workload: Annotated[ShortText | None, doc("Name of its Deployment.")] = None
    replicas: Annotated[Count, doc("Instances that the spec asks for.")] = 0
    ready: Annotated[Count, doc("Ready pods.")] = 0
    updated: Annotated[Count, doc("Pods of the revision that the spec asks for.")] = 0
    registered: Annotated[Count, doc("Instances to which the coordinator can bind requests.")] = 0
    revision: Annotated[ShortText | None, doc("Revision of the unit that the spec asks for.")] = None
    scaling: Annotated[Text | None, doc("Why its load set its replicas last; unset: the spec sets them.")] = None
    reason: Annotated[ShortText | None, doc("Why it is not ready, as one word.")] = None
    message: Annotated[Message | None, doc("Why it is not ready: the worst pod, its container and the cause.")] = None


class CanaryStatus(Spec, frozen=True, kw_only=True):
    """A revision that is tried with a share of the requests, or was, and was taken back."""

    revision: Annotated[ShortText, doc("The revision that is tried.")]
    weight: Annotated[Annotated[int, Meta(ge=0, le=100)], doc("Share of the requests that go to it, in percent.")] = 0
    since: Annotated[
        Annotated[str, Meta(max_length=64, extra={"format": "date-time"})] | None,
        doc("The time since which it gets that share; unset: its pods are not ready yet."),
    ] = None
    aborted: Annotated[bool, doc("Whether it was taken back; another edit is tried anew.")] = False
    message: Annotated[Text | None, doc("Why the last step was taken, with the numbers of both revisions.")] = None


class YieldedGpus(Spec, frozen=True, kw_only=True):
    """GPUs that the pipeline has let go of, because another one waited for them, until it serves again."""

    since: Annotated[
        Annotated[str, Meta(max_length=64, extra={"format": "date-time"})] | None,
        doc("When it let go of them last; unset once it has come back."),
    ] = None
    to: Annotated[Text | None, doc("Namespace and name of the pipeline that waited for them.")] = None
    gpus: Annotated[Count, doc("GPUs that all pipelines held then.")] = 0
    tries: Annotated[Count, doc("How often it has let go.")] = 0
    failed: Annotated[Count, doc("How often of these it was short though no other one was in its way.")] = 0
    given: Annotated[Count, doc("GPUs that it gave while it served, by priority or by turns; 0: it did not serve.")] = 0
    priority: Annotated[
        Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)], doc("The priority that its pods had then.")
    ] = 0
    turn: Annotated[bool, doc("Whether both pipelines may sleep, so that they take turns.")] = False


class Condition(Spec, frozen=True, kw_only=True):
    """One aspect of the pipeline's state."""

    type: Annotated[
        ShortText,
        doc("Ready, Available, Accepted, Scheduled, CoordinatorReady, StagesReady, Exposed, Progressing, Suspended."),
    ]
    status: Annotated[Literal["True", "False", "Unknown"], doc("Whether it holds.")]
    observed_generation: Annotated[Count | None, doc("Generation of the spec to which the condition applies.")] = None
    last_transition_time: Annotated[
        Annotated[str, Meta(max_length=64, extra={"format": "date-time"})] | None, doc("When the status changed last.")
    ] = None
    reason: Annotated[ShortText | None, doc("Cause, as one CamelCase word.")] = None
    message: Annotated[Message | None, doc("Cause, as text.")] = None


class PipelineStatus(Spec, frozen=True, kw_only=True):
    """State of the pipeline, as the operator last observed it."""

    observed_generation: Annotated[Count | None, doc("Generation of the spec to which the status applies.")] = None
    endpoint: Annotated[Endpoint, doc("URLs of the pipeline.")] = field(default_factory=Endpoint)
    stages_ready: Annotated[ShortText | None, doc("Ready stages and all stages, as 4/5.")] = None
    gpus: Annotated[GpuCounts, doc("GPUs of all pods.")] = field(default_factory=GpuCounts)
    revision: Annotated[Revisions, doc("Pipeline revisions.")] = field(default_factory=Revisions)
    canary: Annotated[CanaryStatus | None, doc("The revision that is tried with a share of the requests.")] = None
    yielded: Annotated[YieldedGpus | None, doc("Unset where it waits for no GPUs that others hold.")] = None
    units: Annotated[
        Annotated[Sequence[UnitStatus], Meta(max_length=MAX_UNITS, extra={"map_key": "name"})], doc("The pod units.")
    ] = ()
    conditions: Annotated[
        Annotated[Sequence[Condition], Meta(max_length=32, extra={"map_key": "type"})],
        doc("Conditions; Ready means that this generation serves requests."),
    ] = ()
