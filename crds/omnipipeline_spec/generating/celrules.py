"""Rules in CEL that the API server checks before it stores a pipeline, by type.

Here: one table. Not here: the full validation, with more precise messages (`graph`, `placement`, `deployment`). Every
spec that passes that passes these rules; a test on a real API server verifies it. Called by `schema`.

Every list that a rule iterates has a bound: without one the API server's cost estimate refuses the CRD. 64 stages with
16 edges each also stay within its cost limit at run time. ``orValue``, ``map`` and indexing of ``filter`` lose those
bounds, so names are looked up by ``exists``. A rule on a stage can name the stage in its message, a rule on the spec
cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from omnipipeline_spec import cluster
from omnipipeline_spec.pipeline import Disaggregation, GpuMemory, PipelineConfig, StageConfig
from omnipipeline_spec.types.pods import ADMIN_PORT, CONTROL_PORT, COORDINATOR, PROBE_PORT, PUBLISH_PORT
from omnipipeline_spec.types.quantities import MAX_STAGES, QUOTA_PREFIX
from omnipipeline_spec.validation import deployment, variables

_LAST_CONTROL_PORT: Final = CONTROL_PORT + MAX_STAGES - 1


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One ``x-kubernetes-validations`` entry."""

    rule: str
    message: str
    names_stage: bool = False  #: The message follows ``stage NAME``.


def _process(stage: str) -> str:
    decode = f"{stage}.disaggregation.decode"
    given = f"has({stage}.disaggregation) && has({decode}) && has({decode}.process)"
    return f"(has({stage}.process) ? {stage}.process : {given} ? {decode}.process : {stage}.name)"


def _all_are_stages(field: str) -> Rule:
    return Rule(
        rule=f"self.stages.all(s, !has(s.{field}) || s.{field}.all(n, self.stages.exists(t, t.name == n)))",
        message=f"every name in {field} must be a stage",
    )


def _not_itself(field: str) -> Rule:
    return Rule(
        rule=f"!has(self.{field}) || !(self.name in self.{field})",
        message=f"must not be in its own {field}",
        names_stage=True,
    )


def _is_positive(field: str) -> Rule:
    return Rule(
        rule=f"!has(self.{field}) || (type(self.{field}) == int ? self.{field} > 0 : isQuantity(self.{field}) && "
        f"quantity(self.{field}).isGreaterThan(quantity('0')))",
        message=f"{field} must be a quantity of more than 0",
    )


def _is_in_a_container(field: str) -> Rule:
    return Rule(
        rule=f"!has(self.{field}) || !self.{field}.startsWith('{QUOTA_PREFIX}')",
        message=f"{field} must not begin with {QUOTA_PREFIX}",
    )


def _needs(function: str, field: str) -> Rule:
    return Rule(
        rule=f"!has(self.{function}) || self.{function} == '' || (has(self.{field}) && size(self.{field}) > 0)",
        message=f"has {function}, which needs {field}",
        names_stage=True,
    )


_PIPELINE: Final = (
    _all_are_stages("next"),
    _all_are_stages("waitFor"),
    _all_are_stages("streamTo"),
    Rule(rule="self.stages.exists(s, has(s.terminal) && s.terminal)", message="at least one stage must be terminal"),
    Rule(
        rule="!has(self.entryStage) || self.stages.exists(s, s.name == self.entryStage)",
        message="entryStage must be a stage",
    ),
    Rule(
        rule=f"!has(self.processGroups) || self.processGroups.all(g, self.stages.exists(s, {_process('s')} == g.name "
        "|| (has(s.disaggregation) && s.disaggregation.prefill.process == g.name)))",
        message="every name in processGroups must be a process of a stage",
    ),
    Rule(
        rule=f"self.stages.all(s, s.tpSize == 1 || self.stages.exists_one(t, {_process('t')} == {_process('s')}))",
        message="the process of a stage with tpSize > 1 must have no other stage",
    ),
    Rule(
        rule="!has(self.fusedStages) || self.fusedStages.all(f, f.all(n, "
        "self.stages.exists(s, s.name == n && s.tpSize == 1)))",
        message="every name in fusedStages must be a stage with tpSize 1",
    ),
    Rule(
        rule="!has(self.runtimeOverrides) || self.runtimeOverrides.all(k, self.stages.exists(s, s.name == k))",
        message="every key of runtimeOverrides must be a stage",
    ),
    Rule(
        rule=f"self.stages.all(s, {_process('s')} != '{COORDINATOR}')",
        message=f"no process may be called {COORDINATOR}",
    ),
    Rule(
        rule="self.stages.all(a, !has(a.gpu) || size(a.gpu) != 1 || self.stages.all(b, "
        f"{_process('b')} != {_process('a')} || !has(b.gpu) || size(b.gpu) == 0 || b.gpu[0] == a.gpu[0]))",
        message="stages of one process must share one GPU",
    ),
    Rule(
        rule="self.stages.all(a, !has(a.gpu) || has(a.gpuMemory) || has(a.disaggregation) || !self.stages.exists(b, "
        f"{_process('b')} != {_process('a')} && has(b.gpu) && b.gpu.exists(g, g in a.gpu)))",
        message="stages whose processes share a GPU must have a gpuMemory budget",
    ),
    Rule(
        rule="self.stages.all(a, !has(a.gpu) || a.gpu.all(g, self.stages.filter(b, has(b.gpu) && g in b.gpu && "
        "has(b.gpuMemory) && has(b.gpuMemory.fraction)).map(b, b.gpuMemory.fraction).sum() "
        "<= self.gpuMemoryLimit + 0.0001))",
        message="the gpuMemory fractions on one GPU must not sum to more than gpuMemoryLimit",
    ),
    Rule(
        rule="!has(self.modelCache) || !has(self.modelCache.type) || self.modelCache.type != 'Image' || "
        "!has(self.modelPath) || self.modelPath == '' || self.modelPath.startsWith('/models/')",
        message="modelPath must begin with /models/, where the image of modelCache is mounted",
    ),
    Rule(
        rule="!has(self.modelCache) || !has(self.modelCache.prefetch) || !has(self.modelCache.prefetch.enabled) || "
        "!self.modelCache.prefetch.enabled || (has(self.modelPath) && self.modelPath != '')",
        message="modelCache.prefetch needs modelPath",
    ),
    Rule(
        rule="self.stages.all(s, !has(s.disaggregation) || !self.stages.exists(t, t.name == s.name + '-prefill'))",
        message="disaggregation adds a stage NAME-prefill: no other may have that name",
    ),
    Rule(
        rule="self.stages.all(s, !has(s.disaggregation) || "
        f"!self.stages.exists(t, {_process('t')} == s.disaggregation.prefill.process))",
        message="the process of a prefill must have no other stage",
    ),
    Rule(
        rule="!has(self.processGroups) || self.processGroups.all(g, !has(g.replicas) || g.replicas > 0 || "
        "self.stages.exists(s, has(s.disaggregation) && s.disaggregation.prefill.process == g.name))",
        message="only a process group of prefill may have 0 replicas",
    ),
    Rule(
        rule="!has(self.processGroups) || self.processGroups.all(g, !has(g.autoscaling) || "
        "g.autoscaling.minReplicas > 0 || !has(self.coordinator) || !has(self.coordinator.hold) || "
        "((!has(self.coordinator.hold.seconds) || self.coordinator.hold.seconds > 0) && "
        "(!has(self.coordinator.hold.maxRequests) || self.coordinator.hold.maxRequests > 0) && "
        "(!has(self.coordinator.hold.maxBytes) || self.coordinator.hold.maxBytes > 0)))",
        message="minReplicas: 0 needs a coordinator.hold without a 0: a request must wait for its first instance",
    ),
)

_STAGE: Final = (
    Rule(
        rule="(has(self.terminal) && self.terminal) != (has(self.next) && size(self.next) > 0)",
        message="must have exactly one of next and terminal: true",
        names_stage=True,
    ),
    _not_itself("next"),
    _not_itself("streamTo"),
    _not_itself("waitFor"),
    _needs("routeFn", "next"),
    Rule(
        rule="(has(self.waitFor) && size(self.waitFor) > 0) == (has(self.mergeFn) && self.mergeFn != '')",
        message="must have both waitFor and mergeFn, or neither",
        names_stage=True,
    ),
    _needs("waitForFn", "waitFor"),
    _needs("streamDoneToFn", "streamTo"),
    Rule(
        rule="!has(self.streamAtEnd) || self.streamAtEnd.all(k, has(self.streamTo) && k in self.streamTo)",
        message="every name in streamAtEnd must be in streamTo",
    ),
    Rule(
        rule="has(self.disaggregation) || (self.tpSize == 1 ? (!has(self.gpu) || size(self.gpu) <= 1) : "
        "(has(self.gpu) && size(self.gpu) == self.tpSize))",
        message="must list one GPU id per rank of tpSize; without ranks at most one",
        names_stage=True,
    ),
    Rule(
        rule="self.tpSize > 1 || (has(self.process) && self.process != '') || has(self.disaggregation)",
        message="must declare its process; only a stage with tpSize > 1 may leave it out",
        names_stage=True,
    ),
    Rule(
        rule="!has(self.gpuMemory) || has(self.disaggregation) || (has(self.gpu) && size(self.gpu) > 0)",
        message="has gpuMemory, but no gpu",
        names_stage=True,
    ),
    Rule(
        rule="!has(self.projectPayload) || self.projectPayload.all(k, (has(self.next) && k in self.next) || "
        "(has(self.streamTo) && k in self.streamTo))",
        message="may have only stages in next or streamTo in projectPayload",
        names_stage=True,
    ),
    Rule(rule=f"self.name != '{COORDINATOR}'", message="has a name that is reserved", names_stage=True),
)

#: Type -> its rules. Those of the root object, which has no type here, are `ROOT`.
RULES: Final[Mapping[type[msgspec.Struct], tuple[Rule, ...]]] = {
    PipelineConfig: _PIPELINE,
    StageConfig: _STAGE,
    Disaggregation: (
        Rule(
            rule=f"self.prefill.process != '{COORDINATOR}'",
            message=f"the process of prefill must not be called {COORDINATOR}",
        ),
        Rule(
            rule="self.prefill.tpSize == 1 ? (!has(self.prefill.gpu) || size(self.prefill.gpu) <= 1) : "
            "(has(self.prefill.gpu) && size(self.prefill.gpu) == self.prefill.tpSize)",
            message="prefill must list one GPU id per rank of its tpSize",
        ),
    ),
    GpuMemory: (
        Rule(rule="has(self.fraction) != has(self.bytes)", message="must have exactly one of fraction and bytes"),
        _is_positive("bytes"),
    ),
    cluster.ProcessGroup: (
        _is_positive("sharedMemory"),
        _is_in_a_container("gpuResourceName"),
        Rule(
            rule="!has(self.replicas) || !has(self.autoscaling)",
            message="must not have both replicas and autoscaling",
        ),
        Rule(
            rule="!has(self.gpuResourceName) || self.gpuResourceName == '' || !has(self.gpuClaim)",
            message="must not have both gpuResourceName and gpuClaim",
        ),
    ),
    cluster.Rdma: (_is_in_a_container("resourceName"),),
    cluster.Toleration: (
        Rule(
            rule="(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')",
            message="must have operator Exists where key is unset",
        ),
        Rule(
            rule="!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
            message="must not have value with operator Exists",
        ),
        Rule(
            rule="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            message="tolerationSeconds needs effect NoExecute",
        ),
    ),
    cluster.ResourceReference: (
        Rule(
            rule="!has(self.divisor) || (self.resource.endsWith('.cpu') ? "
            f"{list(deployment.CPU_UNITS)} : {list(deployment.BYTE_UNITS)}).exists(unit, type(self.divisor) == int ? "
            "unit == string(self.divisor) : isQuantity(self.divisor) && "
            f"!self.divisor.matches('{deployment.EXPONENT}') && "
            "quantity(self.divisor).compareTo(quantity(unit)) == 0)",
            message="divisor must be 1 or 1m of cpu, and 1, 1k, 1Ki … of bytes",
        ),
    ),
    cluster.Ingress: (
        Rule(
            rule=f"!has(self.host) || !self.host.matches('^{deployment.ADDRESS}$')",
            message="host must not be an address",
        ),
    ),
    cluster.Autoscaling: (
        Rule(rule="self.minReplicas <= self.maxReplicas", message="minReplicas must not be more than maxReplicas"),
        Rule(
            rule="!has(self.targetQueueSeconds) || !has(self.targetUtilization)",
            message="must not have both targetQueueSeconds and targetUtilization",
        ),
    ),
    cluster.Rollout: (
        Rule(
            rule="self.maxSurge > 0 || self.maxUnavailable > 0",
            message="must not have 0 as both maxSurge and maxUnavailable",
        ),
        Rule(
            rule="!has(self.canary) || (self.strategy == 'Coherent' && self.maxSurge > 0)",
            message="canary needs strategy Coherent and a maxSurge of 1 or more",
        ),
    ),
    cluster.EnvVar: (
        Rule(
            rule="!(has(self.value) && self.value != '' && has(self.valueFrom))",
            message="must not have both value and valueFrom",
        ),
        Rule(
            rule=f"!self.name.startsWith('{variables.PREFIX}') || self.name in {sorted(variables.TUNABLE)}",
            message=f"the operator sets the variables that begin with {variables.PREFIX}; authors may set "
            + ", ".join(sorted(variables.TUNABLE)),
        ),
        Rule(
            rule=f"!(self.name in {sorted(variables.DEVICES)})",
            message=" and ".join(sorted(variables.DEVICES)) + " are derived from the stages' gpu",
        ),
    ),
    cluster.EnvSource: (
        Rule(
            rule="[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef), "
            "has(self.resourceFieldRef)].exists_one(given, given)",
            message="must have exactly one source",
        ),
    ),
    cluster.EnvFrom: (
        Rule(
            rule="has(self.secretRef) != has(self.configMapRef)",
            message="must have exactly one of secretRef and configMapRef",
        ),
    ),
    cluster.Control: (
        Rule(
            rule="self.deadAfterSeconds > self.heartbeatSeconds",
            message="deadAfterSeconds must be more than heartbeatSeconds",
        ),
    ),
    cluster.Http: (
        Rule(
            rule=f"!(self.port in [{ADMIN_PORT}, {PROBE_PORT}]) && "
            f"(self.port < {PUBLISH_PORT} || self.port > {_LAST_CONTROL_PORT})",
            message=f"port must not be {ADMIN_PORT} (admin), {PROBE_PORT} (probes) or {PUBLISH_PORT} to "
            f"{_LAST_CONTROL_PORT} (control)",
        ),
    ),
    cluster.ModelCache: (
        Rule(
            rule="(self.type == 'Image') == (has(self.image) && self.image != '')",
            message="type Image must have image, and no other type may have it",
        ),
        Rule(
            rule="self.type == 'Image' || !has(self.pullPolicy)",
            message="pullPolicy needs type Image",
        ),
        Rule(
            rule=f"self.type != 'PersistentVolumeClaim' || ({_is_positive('size').rule})",
            message="size of a PersistentVolumeClaim must be a quantity of more than 0",
        ),
        Rule(
            rule="self.type != 'Image' || !has(self.size)",
            message="size does not apply to type Image",
        ),
        Rule(
            rule="self.type != 'PersistentVolumeClaim' || "
            "(has(self.claimName) && self.claimName != '') != has(self.size)",
            message="a PersistentVolumeClaim must have exactly one of claimName and size",
        ),
        Rule(
            rule="self.type == 'PersistentVolumeClaim' || !((has(self.claimName) && self.claimName != '') || "
            "(has(self.storageClassName) && self.storageClassName != ''))",
            message="claimName and storageClassName need type PersistentVolumeClaim",
        ),
        Rule(
            rule="self.type in ['PersistentVolumeClaim', 'Node'] || !has(self.prefetch) || "
            "!has(self.prefetch.enabled) || !self.prefetch.enabled",
            message="prefetch needs type PersistentVolumeClaim or Node",
        ),
        Rule(
            rule="self.type != 'Node' || (has(self.prefetch) && has(self.prefetch.enabled) && self.prefetch.enabled && "
            "!has(self.size))",
            message="type Node needs prefetch.enabled: true, and must not have size",
        ),
    ),
    cluster.Prefetch: (
        Rule(
            rule="!has(self.secretName) || (has(self.enabled) && self.enabled)",
            message="secretName needs enabled: true",
        ),
    ),
    cluster.Route: (
        Rule(
            rule="self.parentRefs.all(p, self.parentRefs.exists_one(q, q.name == p.name && "
            "(has(q.__namespace__) ? q.__namespace__ : '') == (has(p.__namespace__) ? p.__namespace__ : '') && "
            "(has(q.sectionName) ? q.sectionName : '') == (has(p.sectionName) ? p.sectionName : '') && "
            "(has(q.port) ? q.port : 0) == (has(p.port) ? p.port : 0)))",
            message="must not name a parent twice",
        ),
        Rule(
            rule="self.parentRefs.all(p, self.parentRefs.all(q, q.name != p.name || "
            "(has(q.__namespace__) ? q.__namespace__ : '') != (has(p.__namespace__) ? p.__namespace__ : '') || "
            "((has(q.sectionName) && q.sectionName != '') == (has(p.sectionName) && p.sectionName != '') && "
            "has(q.port) == has(p.port))))",
            message="parents of one name must all have sectionName, or none, and so with port",
        ),
    ),
    cluster.ProfilingStorage: (
        Rule(
            rule="has(self.emptyDir) != (has(self.claimName) && self.claimName != '')",
            message="must have exactly one of emptyDir and claimName",
        ),
    ),
}

ROOT: Final = (
    Rule(
        rule="self.metadata.name.size() <= 38 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && "
        "!self.metadata.name.endsWith('-peers')",
        message="metadata.name must be at most 38 lower case letters, digits and -, a letter first, no - last, and not "
        "end in -peers",
    ),
)
