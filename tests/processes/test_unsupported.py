"""Every field of the spec reaches the processes of `omni up`, or is named as one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from omnipipeline_spec import loading, planning
from omnipipeline_spec.cluster import (
    Control,
    Coordinator,
    DataPlane,
    ModelCache,
    Placement,
    ProcessGroup,
    Rdma,
    Security,
)
from omnipipeline_spec.pipeline import PipelineConfig, RelayConfig, StageConfig
from omnipipeline_spec.types.values import fields_of, is_list, without_none
from stage_runtime.processes.one_machine.preparing import references, unsupported
from stage_runtime.processes.one_machine.preparing.prepared import Prepared
from stage_runtime.processes.one_machine.preparing.unsupported import CLUSTER_ONLY, HONOURED, NOT_IN_THIS_VERSION


def leaves(kind: inspect.Type, path: str) -> Iterator[str]:
    """Paths of all values that a spec can hold, list entries as ``[]``; a free map is one value."""
    kind = without_none(kind)
    if is_list(kind) and isinstance(inner := without_none(kind.item_type), inspect.StructType):  # type: ignore[attr-defined]
        kind, path = inner, f"{path}[]"
    if not isinstance(kind, inspect.StructType):
        yield path
        return
    for field in fields_of(kind.cls):
        yield from leaves(field.type, f"{path}.{field.encode_name}" if path else field.encode_name)


FIELDS = tuple(leaves(inspect.type_info(PipelineConfig), ""))


def inside(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith((f"{prefix}.", f"{prefix}["))


@pytest.mark.proves("ignored-field")
@pytest.mark.parametrize("path", FIELDS)
def test_every_field_is_honoured_or_named_and_not_both(path: str) -> None:
    """A new field fails here until somebody says in `unsupported` what becomes of it."""
    named = [prefix for table in (NOT_IN_THIS_VERSION, CLUSTER_ONLY) for prefix in table if inside(path, prefix)]
    assert len(named) + (path in HONOURED) == 1


def test_no_table_names_a_field_that_is_gone() -> None:
    assert set(FIELDS) >= HONOURED
    for prefix in (*NOT_IN_THIS_VERSION, *CLUSTER_ONLY):
        assert any(inside(path, prefix) for path in FIELDS), prefix


#: A sound spec, and for each honoured field a change of it: path of `--set` and value.
BASE = """\
name: base
stages:
- {name: a, process: front, factory: "m:f", next: [b, c], streamTo: [c]}
- {name: b, process: front, factory: "m:f", next: [d]}
- {name: c, process: back, factory: "m:f", next: [d, e]}
- {name: d, process: end, factory: "m:f", next: [g], waitFor: [b, c], mergeFn: "m:f"}
- {name: e, tpSize: 2, gpu: [2, 3], factory: "m:f", terminal: true}
- {name: g, process: last, factory: "m:f", terminal: true}
env: [{name: A, value: "1"}, {name: B, valueFrom: {secretKeyRef: {name: s, key: k}}}]
envFrom: [{secretRef: {name: s}}]
processGroups: [{name: end, replicas: 2}]
coordinator: {http: {apiKeySecretRef: {name: s, key: k}}}
code: {configMapRef: {name: c}, inline: {m.py: "x"}}
"""
CHANGES: Mapping[str, tuple[str, ...]] = {
    "name": ("name=other",),
    "serves": ("serves=[chat]",),
    "accepts": ("accepts=[tools]",),
    "modelPath": ("modelPath=org/model",),
    "modelRevision": ("modelRevision=main",),
    "relayBackend": ("relayBackend=tcp",),
    "fusedStages": ("fusedStages=[[d, g]]",),
    "runtimeOverrides": ("runtimeOverrides={a: {x: 1}}",),
    "envDefaults": ("envDefaults={X: x}",),
    "terminalStagesFn": ("terminalStagesFn=m:g",),
    "endpoints.basePath": ("endpoints.basePath=/tmp/x",),
    "code.inline": ("code.inline={m.py: z}",),
    "code.configMapRef.name": ("code.configMapRef.name=c2",),
    "stages[].name": ("stages.c.next=[d, f]", "stages.e.name=f"),
    "stages[].factory": ("stages.a.factory=m:g",),
    "stages[].process": ("stages.a.process=own",),
    "stages[].factoryArgs": ("stages.a.factoryArgs={x: 1}",),
    "stages[].next": ("stages.a.next=[b]",),
    "stages[].terminal": (
        "stages.c={name: c, process: back, factory: 'm:f', terminal: true}",
        "stages.b.next=[d, e]",
        "stages.d.waitFor=[b]",
    ),
    "stages[].routeFn": ("stages.a.routeFn=m:g",),
    "stages[].gpu": ("stages.e.gpu=[4, 5]",),
    "stages[].tpSize": ("stages.e.tpSize=3", "stages.e.gpu=[2, 3, 4]"),
    "stages[].gpuMemory.fraction": ("stages.e.gpuMemory.fraction=0.5",),
    "stages[].gpuMemory.bytes": ("stages.e.gpuMemory.bytes=1Gi",),
    "stages[].waitFor": ("stages.d.waitFor=[c, b]",),
    "stages[].waitForFn": ("stages.d.waitForFn=m:g",),
    "stages[].mergeFn": ("stages.d.mergeFn=m:g",),
    "stages[].streamTo": ("stages.a.streamTo=[b]",),
    "stages[].streamAtEnd": ("stages.a.streamAtEnd=[c]",),
    "stages[].streamDoneToFn": ("stages.a.streamDoneToFn=m:g",),
    "stages[].projectPayload": ("stages.a.projectPayload={b: 'm:g'}",),
    "stages[].relay.credits": ("stages.a.relay.credits=5",),
    "stages[].disaggregation.prefill.process": ("stages.g.disaggregation.prefill.process=apart",),
    "stages[].disaggregation.prefill.gpu": ("stages.g.disaggregation.prefill={process: apart, gpu: [7]}",),
    "stages[].disaggregation.prefill.tpSize": (
        "stages.g.disaggregation.prefill={process: apart, gpu: [6, 7], tpSize: 2}",
    ),
    "stages[].disaggregation.prefill.factoryArgs": (
        "stages.g.disaggregation.prefill={process: apart, factoryArgs: {x: 1}}",
    ),
    "stages[].disaggregation.decode.process": (
        "stages.g={name: g, factory: 'm:f', terminal: true, "
        "disaggregation: {prefill: {process: apart}, decode: {process: other}}}",
    ),
    "stages[].disaggregation.decode.gpu": ("stages.g.disaggregation={prefill: {process: apart}, decode: {gpu: [7]}}",),
    "stages[].disaggregation.decode.tpSize": (
        "stages.g.disaggregation={prefill: {process: apart}, decode: {gpu: [6, 7], tpSize: 2}}",
    ),
    "dataPlane.allowTCP": ("dataPlane={allowTCP: false, rdma: {resourceName: rdma/hca}}",),
    "dataPlane.mooncakeProtocol": ("dataPlane.mooncakeProtocol=tcp",),
    "stages[].relay.device": ("stages.e.relay.device=cpu",),
    "stages[].relay.slotSizeMb": ("stages.a.relay.slotSizeMb=5",),
    "stages[].relay.rank": ("relayBackend=nccl", "stages.a.relay={rank: 1, worldSize: 2}"),
    "stages[].relay.worldSize": ("relayBackend=nccl", "stages.a.relay={rank: 1, worldSize: 3}"),
    "env[].name": ("env[0].name=C",),
    "env[].value": ("env[0].value=x",),
    "env[].valueFrom.secretKeyRef.name": ("env[1].valueFrom.secretKeyRef.name=s2",),
    "env[].valueFrom.secretKeyRef.key": ("env[1].valueFrom.secretKeyRef.key=k2",),
    "env[].valueFrom.secretKeyRef.optional": ("env[1].valueFrom.secretKeyRef={name: s, key: none, optional: true}",),
    "env[].valueFrom.configMapKeyRef.name": ("env[1].valueFrom={configMapKeyRef: {name: c, key: k}}",),
    "env[].valueFrom.configMapKeyRef.key": ("env[1].valueFrom={configMapKeyRef: {name: c, key: k}}",),
    "env[].valueFrom.configMapKeyRef.optional": (
        "env[1].valueFrom={configMapKeyRef: {name: c, key: none, optional: true}}",
    ),
    "env[].valueFrom.fieldRef.fieldPath": ("env[1].valueFrom={fieldRef: {fieldPath: status.podIP}}",),
    "env[].valueFrom.fieldRef.apiVersion": ("env[1].valueFrom={fieldRef: {fieldPath: status.podIP, apiVersion: v1}}",),
    "env[].valueFrom.resourceFieldRef.resource": ("env[1].valueFrom={resourceFieldRef: {resource: limits.cpu}}",),
    "env[].valueFrom.resourceFieldRef.containerName": (
        "env[1].valueFrom={resourceFieldRef: {resource: limits.cpu, containerName: c}}",
    ),
    "env[].valueFrom.resourceFieldRef.divisor": (
        "env[1].valueFrom={resourceFieldRef: {resource: limits.cpu, divisor: 1m}}",
    ),
    "envFrom[].prefix": ("envFrom[0].prefix=X_",),
    "envFrom[].secretRef.name": ("envFrom[0].secretRef.name=s2",),
    "envFrom[].secretRef.optional": ("envFrom[0].secretRef={name: none, optional: true}",),
    "envFrom[].configMapRef.name": ("envFrom=[{configMapRef: {name: c}}]",),
    "envFrom[].configMapRef.optional": ("envFrom=[{configMapRef: {name: none, optional: true}}]",),
    "processGroups[].name": ("processGroups[0].name=back",),
    "processGroups[].replicas": ("processGroups[0].replicas=3",),
    **{
        f"processGroups[].autoscaling.{field}": (
            f"processGroups=[{{name: end, autoscaling: {{maxReplicas: 2, {field}: {value}}}}}]",
        )
        for field, value in {
            "minReplicas": 2,
            "targetQueueSeconds": 7,
            "targetUtilization": 0.5,
            "scaleUpDelaySeconds": 7,
            "scaleDownDelaySeconds": 7,
        }.items()
    },
    "processGroups[].autoscaling.maxReplicas": ("processGroups=[{name: end, autoscaling: {maxReplicas: 2}}]",),
    "processGroups[].localGpus": ("processGroups=[{name: e, replicas: 2, localGpus: [[2, 3], [4, 5]]}]",),
    "processGroups[].drain.timeoutSeconds": ("processGroups[0].drain.timeoutSeconds=7",),
    "processGroups[].stuckAfterSeconds": ("processGroups[0].stuckAfterSeconds=7",),
    "coordinator.http.port": ("coordinator.http.port=9000",),
    "coordinator.http.maxBodyBytes": ("coordinator.http.maxBodyBytes=9000",),
    "coordinator.http.requestTimeoutSeconds": ("coordinator.http.requestTimeoutSeconds=7",),
    "coordinator.http.maxInFlight": ("coordinator.http.maxInFlight=7",),
    "coordinator.http.mediaHosts": ("coordinator.http.mediaHosts=[example.org]",),
    "coordinator.http.allowedHosts": ("coordinator.http.allowedHosts=[ui.example.org]",),
    "coordinator.http.apiKeySecretRef.name": ("coordinator.http.apiKeySecretRef.name=s2",),
    "coordinator.http.apiKeySecretRef.key": ("coordinator.http.apiKeySecretRef.key=k2",),
    "coordinator.http.apiKeySecretRef.optional": (
        "coordinator.http.apiKeySecretRef={name: s, key: none, optional: true}",
    ),
    "coordinator.retries": ("coordinator.retries=3",),
    "coordinator.hold.seconds": ("coordinator.hold.seconds=3",),
    "coordinator.hold.maxRequests": ("coordinator.hold.maxRequests=3",),
    "coordinator.hold.maxBytes": ("coordinator.hold.maxBytes=3",),
    "coordinator.drain.timeoutSeconds": ("coordinator.drain.timeoutSeconds=7",),
    "profiling.enabled": ("profiling.enabled=false",),
    "profiling.maxSeconds": ("profiling.maxSeconds=7",),
    "observability.tracing.endpoint": ("observability.tracing.endpoint=http://collector:4318",),
    "observability.tracing.sampleRatio": ("observability.tracing.sampleRatio=0.5",),
    "control.heartbeatSeconds": ("control.heartbeatSeconds=2",),
    "control.deadAfterSeconds": ("control.deadAfterSeconds=7",),
}
#: They act before any process starts: a limit that the spec is checked by, a class that it is
#: laid over, the entry that all stages must be reached from.
BEFORE_ALL = {"gpuMemoryLimit", "configCls", "entryStage"}
BESIDE = (
    {"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"k": "1", "k2": "2"}},
    {"kind": "Secret", "metadata": {"name": "s2"}, "stringData": {"k": "3"}},
    {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"k": "4"}},
    {"kind": "ConfigMap", "metadata": {"name": "c2"}, "data": {"k": "5"}},
)


def settings(*changes: str) -> object:
    """All that the processes of `omni up` get, and the notices about the rest."""
    loaded = loading.loads(BASE, overrides=changes)
    found = references.resolve(loaded.spec, BESIDE, {}, namespace=None)
    plan = planning.plan(loaded.spec, name=loaded.name)
    read = [msgspec.structs.replace(part, pod={}, revision="") for part in (*plan.units, plan.coordinator)]
    return msgspec.to_builtins(
        (
            read,
            plan.replicas,
            plan.autoscaling,
            plan.local_gpus,
            found,
            loaded.spec.endpoints,
            loaded.spec.profiling,
            loaded.spec.observability,
        )
    )


def test_for_every_honoured_field_there_is_a_change_of_it() -> None:
    assert CHANGES.keys() | BEFORE_ALL == HONOURED


@pytest.mark.proves("ignored-field")
@pytest.mark.parametrize("field", CHANGES)
def test_a_change_of_an_honoured_field_reaches_the_processes(field: str) -> None:
    assert settings(*CHANGES[field]) != settings()


STAGES = (
    StageConfig(name="a", process="front", factory="m:f", next="b", relay=RelayConfig(device="cpu", credits=4)),
    StageConfig(name="b", process="back", factory="m:f", terminal=True),
)


def test_one_line_per_reason_names_all_fields_that_are_set_in_vain() -> None:
    spec = PipelineConfig(
        stages=STAGES,
        image="registry/omni:1",
        image_pull_policy="Always",
        process_groups=[ProcessGroup(name="back", replicas=2, placement=Placement(node_selector={"gpu": "h100"}))],
        coordinator=Coordinator(placement=Placement(priority_class_name="high")),
        control=Control(heartbeat_seconds=2, security=Security(mode="None")),
        data_plane=DataPlane(rdma=Rdma(resource_name="rdma/hca")),
        model_cache=ModelCache(type="EmptyDir"),
        suspend=True,
    )
    here = "not used by `omni up`"
    assert set(unsupported.notices(spec, local=True)) == {
        f"dataPlane.rdma: {here}: relays use the RDMA devices of this machine as they are",
        f"image, imagePullPolicy: {here}: processes run in the Python environment of `omni up`, not in an image",
        f"processGroups.back.placement, coordinator.placement: {here}: one machine has processes, not pods",
        f"control.security: {here}: processes talk over Unix sockets in a private folder",
        f"modelCache: {here}: weights lie where the libraries of this machine keep them",
        f"suspend: {here}: the pipeline runs until ^C",
    }


def test_what_a_cluster_does_is_not_named_for_it() -> None:
    spec = PipelineConfig(stages=STAGES, image="registry/omni:1")
    notices = unsupported.notices(spec, local=False)
    assert notices == ()


def test_what_is_as_by_default_is_not_named() -> None:
    spec = PipelineConfig(stages=[StageConfig(name="a", process="p", factory="m:f", terminal=True)], suspend=False)
    assert unsupported.notices(spec, local=True) == ()


def test_a_null_that_sets_nothing_is_among_the_notices(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("stages:\n- {name: a, process: a, factory: 'w:m', terminal: true, factory_args: {x: null}}\n")
    (notice,) = Prepared(file).notices
    assert notice.startswith("line 2: stages[0].factoryArgs.x: null sets nothing here")
