"""The planner makes the plan that every process gets from a spec."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnipipeline_spec import planning
from omnipipeline_spec.loading import from_resource
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types import canonical
from omnipipeline_spec.types.errors import InvalidPipeline
from omnipipeline_spec.types.plan import EdgePlan, GroupPlan, Limits, PipelinePlan, RelayPlan, StagePlan, UnitPlan
from omnipipeline_spec.types.resource import API_VERSION, KIND
from tests.contract.rulecases import Document, pair, spec, stage


def plan_of(document: Document) -> PipelinePlan:
    resource = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "p"}, "spec": document}
    return planning.plan(from_resource(resource).spec)


def unit_of(document: Document, name: str) -> UnitPlan:
    return next(unit for unit in plan_of(document).units if unit.name == name)


def revisions(document: Document) -> dict[str, str]:
    plan = plan_of(document)
    return {unit.name: unit.revision for unit in plan.units} | {"coordinator": plan.coordinator.revision}


def test_the_whole_plan_of_a_small_pipeline() -> None:
    document = pair(
        {"streamTo": ["b"], "process": "front", "factoryArgs": {"x": 1.0, "y": 1}},
        {"process": "back", "relay": {"slotSizeMb": 1, "credits": 4}},
        runtimeOverrides={"a": {"y": 2, "z": 3}},
    )
    plan = plan_of(document)
    first, second = plan.units
    assert first == UnitPlan(
        pipeline="p",
        name="front",
        groups=(GroupPlan(name="front", unit="front", index=0, stages=("a",), processes=("front",)),),
        stages=(
            StagePlan(
                name="a",
                group="front",
                factory="work:make",
                factory_args={"x": 1, "y": 2, "z": 3},
                next=("b",),
                stream_to=("b",),
                entry=True,
            ),
        ),
        revision=first.revision,
    )
    assert second.stages == (
        StagePlan(
            name="b",
            group="back",
            factory="work:make",
            terminal=True,
            inputs_from=("a",),
            stream_from=("a",),
            relay=RelayPlan(slot_bytes=1 << 20, credits=4),
        ),
    )
    assert plan.edges == (
        EdgePlan(source="a", target="b", kind="normal", transport="network", relay="tcp", medium="tcp+curve"),
        EdgePlan(source="a", target="b", kind="stream", transport="network", relay="tcp", medium="tcp+curve"),
    )
    assert plan.replicas == {"front": 1, "back": 1}
    assert plan.local_gpus == {"front": ((),), "back": ((),)}
    assert plan.current.units == {"front": first.revision, "back": second.revision}
    assert plan.current.stages == {"a": "front", "b": "back"}
    assert (plan.current.entry, plan.current.terminals) == ("a", ("b",))
    assert plan.current.edges == (("a", "b", "normal"), ("a", "b", "stream"))
    assert (plan.coordinator.pipeline, plan.coordinator.model) == ("p", "p")


def test_groups_that_share_a_gpu_share_a_unit_and_its_devices_are_renumbered() -> None:
    plan = plan_of(
        spec(
            stage("cpu", next=["thinker"]),
            stage("thinker", next=["talker"], process=None, tpSize=2, gpu=[7, 4], gpuMemory={"fraction": 0.5}),
            stage("talker", next=["vocoder"], gpu=[4], gpuMemory={"fraction": 0.3}),
            stage("vocoder", gpu=[9]),
        )
    )
    assert {unit.name: (tuple(group.name for group in unit.groups), unit.gpu_ids) for unit in plan.units} == {
        "cpu": (("cpu",), ()),
        "thinker": (("thinker", "talker"), (4, 7)),
        "vocoder": (("vocoder",), (9,)),
    }
    shared = plan.units[1]
    assert [(each.name, each.gpus, each.gpu_memory_fraction) for each in shared.stages] == [
        ("thinker", (1, 0), 0.5),
        ("talker", (0,), 0.3),
    ]
    assert [(group.name, group.index, group.processes) for group in shared.groups] == [
        ("thinker", 0, ("thinker_tp0", "thinker_tp1")),
        ("talker", 1, ("talker",)),
    ]
    assert shared.pod == {"gpus": 2, "gpuResourceName": "nvidia.com/gpu"}
    assert plan.local_gpus == {"cpu": ((),), "thinker": ((4, 7),), "talker": ((4,),), "vocoder": ((9,),)}


def test_fusion_merges_whole_groups_and_keeps_the_firsts_name() -> None:
    plan = plan_of(
        spec(
            stage("a", next=["b"], process="front"),
            stage("b", next=["c"], process="back"),
            stage("c", next=["d"], process="back"),
            stage("d", process="tail"),
            fusedStages=[["a", "b"], ["c", "d"]],
            processGroups=[{"name": "front", "replicas": 3}],
        )
    )
    assert [(group.name, group.stages) for unit in plan.units for group in unit.groups] == [
        ("front", ("a", "b", "c", "d"))
    ]
    assert plan.replicas == {"front": 3}
    assert {edge.relay for edge in plan.edges} == {"in_process"}


def test_the_process_of_a_tensor_parallel_stage_is_the_prefix_of_its_ranks() -> None:
    unit = unit_of(pair({"tpSize": 2, "gpu": [0, 1], "process": "big"}), "big")
    assert unit.groups[0].processes == ("big_tp0", "big_tp1")


RDMA = {"rdma": {"resourceName": "rdma/hca"}}


@pytest.mark.parametrize(
    ("first", "second", "fields", "transport", "relay", "medium"),
    [
        ({"process": "p"}, {"process": "p"}, {}, "in_process", "in_process", "reference"),
        ({}, {}, {}, "network", "tcp", "tcp+curve"),
        ({}, {}, {"relayBackend": "shm"}, "network", "shm", "memory"),
        ({}, {}, {"relayBackend": "nixl"}, "network", "nixl", "tcp"),
        ("gpu", "gpu", {"relayBackend": "nixl"}, "same_pod", "nixl", "tcp"),
        ({}, {}, {"relayBackend": "mooncake"}, "network", "mooncake", "tcp"),
        ({}, {}, {"dataPlane": RDMA}, "network", "nixl", "rdma"),
        ({}, {}, {"dataPlane": RDMA, "relayBackend": "mooncake"}, "network", "mooncake", "rdma"),
        (
            {},
            {},
            {"dataPlane": {**RDMA, "mooncakeProtocol": "tcp"}, "relayBackend": "mooncake"},
            "network",
            "mooncake",
            "tcp",
        ),
        ("gpu", "gpu", {}, "same_pod", "cuda_ipc", "gpu"),
        ("gpu", "gpu", {"relayBackend": "cuda_ipc"}, "same_pod", "cuda_ipc", "gpu"),
        ("gpu", "gpu", {"relayBackend": "nccl"}, "same_pod", "nccl", "tcp"),
        ("gpu", "gpu", {"relayBackend": "tcp"}, "same_pod", "tcp", "tcp+curve"),
        ("gpu", "gpu", {"relayBackend": "shm"}, "same_pod", "shm", "memory"),
    ],
)
def test_an_edge_travels_as_its_ends_are_placed(
    first: Any, second: Any, fields: Document, transport: str, relay: str, medium: str
) -> None:
    on_gpu = {"gpu": [3], "gpuMemory": {"fraction": 0.4}}
    ends = [on_gpu if end == "gpu" else end for end in (first, second)]
    (edge,) = plan_of(pair(*ends, **fields)).edges
    assert (edge.transport, edge.relay, edge.medium) == (transport, relay, medium)


@pytest.mark.parametrize(
    ("backend", "gpu", "given", "device"),
    [
        ("auto", [0], {}, "cuda"),
        ("auto", [], {}, "cpu"),
        ("nixl", [0], {}, "cuda"),
        ("nccl", [0], {}, "cuda"),
        ("shm", [0], {}, "cuda"),
        ("shm", [0], {"device": "cpu"}, "cpu"),
        ("nccl", [0], {"device": "cpu"}, "cpu"),
    ],
)
def test_tensors_arrive_where_the_stage_is_placed_unless_it_says_otherwise(
    backend: str, gpu: list[int], given: Any, device: str
) -> None:
    unit = unit_of(pair({"gpu": gpu, "relay": given}, relayBackend=backend), "a")
    assert unit.stages[0].relay.device == device


def test_settings_of_groups_in_one_pod_are_put_together() -> None:
    half = {"gpu": [0], "gpuMemory": {"fraction": 0.4}}
    unit = unit_of(
        pair(
            half,
            half,
            processGroups=[
                {
                    "name": "a",
                    "replicas": 2,
                    "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
                    "sharedMemory": "1Gi",
                    "drain": {"timeoutSeconds": 30},
                    "placement": {"nodeSelector": {"gpu": "h100"}},
                },
                {
                    "name": "b",
                    "resources": {"requests": {"cpu": 1}, "limits": {"memory": "4Gi"}},
                    "sharedMemory": "512Mi",
                    "drain": {"timeoutSeconds": 60},
                    "startup": {"deadlineSeconds": 60},
                    "gpuResourceName": "amd.com/gpu",
                },
            ],
        ),
        "a",
    )
    assert unit.pod == {
        "gpuResourceName": "amd.com/gpu",
        "gpus": 1,
        "placement": {"nodeSelector": {"gpu": "h100"}},
        "resources": {"requests": {"cpu": "1500m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "sharedMemory": "1536Mi",
    }
    assert (unit.drain_timeout_s, unit.startup_deadline_s, unit.stuck_after_s) == (60.0, 60.0, 300.0)


def test_a_place_near_stages_names_their_units_and_leaves_other_revisions_as_they_are() -> None:
    apart = pair({"gpu": [0]}, {"gpu": [1]})
    keys = ["kubernetes.io/hostname", "rack"]
    near = {"name": "b", "placement": {"near": ["a"], "nearTopologyKeys": keys, "gpuProducts": ["L4"]}}
    placed = {**apart, "processGroups": [near]}
    assert unit_of(placed, "b").pod["placement"] == {"gpuProducts": ["L4"], "near": ["a"], "nearTopologyKeys": keys}
    assert unit_of(placed, "a") == unit_of(apart, "a")
    default = {"name": "b", "placement": {"near": ["a"]}}
    settings = unit_of({**apart, "processGroups": [default]}, "b").pod["placement"]
    assert settings == {"near": ["a"], "nearTopologyKeys": keys[:1]}


def test_gpus_by_a_claim_are_in_the_revision_and_another_class_changes_it() -> None:
    groups = [{"name": "b", "gpuClaim": {"deviceClassName": "gpu.example.com", "selectors": ["true"]}}]
    claimed = {**pair({"gpu": [0]}, {"gpu": [1]}), "processGroups": groups}
    unit = unit_of(claimed, "b")
    assert unit.pod == {"gpus": 1, "gpuClaim": {"deviceClassName": "gpu.example.com", "selectors": ["true"]}}
    other = unit_of({**claimed, "processGroups": [{"name": "b", "gpuClaim": {"deviceClassName": "other"}}]}, "b")
    assert other.revision != unit.revision
    on_cpu = planning.without_gpus(plan_of(claimed))
    assert [each.pod for each in on_cpu.units] == [{}, {}]


def test_local_replicas_have_the_devices_they_are_given() -> None:
    group = {"name": "a", "replicas": 2, "localGpus": [[4], [5]]}
    assert plan_of(pair({"gpu": [0]}, processGroups=[group])).local_gpus["a"] == ((4,), (5,))
    group = {"name": "a", "replicas": 2}
    assert plan_of(pair({"gpu": [0]}, processGroups=[group])).local_gpus["a"] == ((0,), (0,))


BASE = pair(
    {"process": "front"},
    {"process": "back"},
    processGroups=[{"name": "front"}],
    modelPath="m",
    modelCache={"type": "PersistentVolumeClaim", "size": "1Gi"},
)
REVISION_CASES: dict[str, tuple[Document, set[str]]] = {
    "replicas": ({"processGroups": [{"name": "front", "replicas": 3}]}, set()),
    "replicas by the load": ({"processGroups": [{"name": "front", "autoscaling": {"maxReplicas": 3}}]}, set()),
    "local devices' absence": ({"processGroups": []}, set()),
    "exposure": ({"expose": {"service": {"type": "NodePort"}, "ingress": {"host": "x"}}}, set()),
    "rollout": ({"rollout": {"maxSurge": 2, "paused": True}}, set()),
    "disruption": ({"disruption": {"podDisruptionBudget": {}}}, set()),
    "network policy": ({"networkPolicy": {}}, set()),
    "suspension": ({"suspend": True}, set()),
    "profiling but its storage": ({"profiling": {"enabled": False, "maxSeconds": 5}}, set()),
    "the size of the cache's claim": ({"modelCache": {"type": "PersistentVolumeClaim", "size": "2Gi"}}, set()),
    "a name for the default": ({"gpuMemoryLimit": 0.95, "relayBackend": "auto", "suspend": False}, set()),
    "the local sockets' folder": ({"endpoints": {"basePath": "/tmp/x"}}, set()),
    "profiling storage": ({"profiling": {"storage": {"claimName": "x"}}}, {"front", "back", "coordinator"}),
    "the cache's claim": (
        {"modelCache": {"type": "PersistentVolumeClaim", "claimName": "x"}},
        {"front", "back"},
    ),
    "a restart": ({"restartedAt": "now"}, {"front", "back", "coordinator"}),
    "the image": ({"image": "x:1"}, {"front", "back", "coordinator"}),
    "code": ({"code": {"inline": {"a.py": "1"}}}, {"front", "back"}),  # which come from a module of the image
    "one group's resources": (
        {"processGroups": [{"name": "front", "resources": {"limits": {"cpu": 1}}}]},
        {"front"},
    ),
    "one stage's arguments": ({"runtimeOverrides": {"b": {"x": 1}}}, {"back"}),
    "admission": ({"coordinator": {"http": {"maxInFlight": 9}}}, {"coordinator"}),
    "what is served": ({"serves": ["chat"]}, {"coordinator"}),
}


@pytest.mark.parametrize("name", REVISION_CASES)
def test_a_change_gives_new_revisions_to_what_it_must_restart_and_to_nothing_else(name: str) -> None:
    change, restarted = REVISION_CASES[name]
    before, after = revisions(BASE), revisions({**BASE, **change})
    assert {unit for unit in before if before[unit] != after[unit]} == restarted


def test_a_revision_is_eight_hex_digits_and_the_same_on_every_machine() -> None:
    assert revisions(pair()) == {"a": "429206df", "b": "b92febe4", "coordinator": "55b2bc67"}


def test_a_unit_of_a_neighbours_edge_changes_only_with_its_own_declared_edges() -> None:
    three = [stage("a", next=["b"], routeFn="w:r"), stage("b", next=["c"]), stage("c")]
    before = revisions(spec(*three))
    after = revisions(spec(stage("a", next=["b", "c"], routeFn="w:r"), *three[1:]))
    assert {unit for unit in before if before[unit] != after[unit]} == {"a", "c"}


def test_a_plan_has_the_given_name_or_one_made_of_the_model() -> None:
    config = PipelineConfig(
        model_path="Org/Some_Model-7B", stages=[StageConfig(name="a", process="a", factory="w:m", terminal=True)]
    )
    assert planning.plan(config).pipeline == "some-model-7b"
    assert planning.plan(config, name="mine").pipeline == "mine"
    assert planning.plan(config).coordinator.model == "Org/Some_Model-7B"


def test_a_bad_name_and_the_specs_faults_are_reported_together() -> None:
    config = PipelineConfig(stages=[StageConfig(name="a", factory="w:m", terminal=True)])
    with pytest.raises(InvalidPipeline) as raised:
        planning.plan(config, name="x-peers")
    assert [fault.path for fault in raised.value.faults] == ["metadata.name", "stages[0].process"]


def test_on_a_cpu_ids_become_nothing_and_ranks_stay() -> None:
    plan = plan_of(
        pair(
            {"tpSize": 2, "gpu": [0, 1], "process": None, "gpuMemory": {"fraction": 0.5}},
            {"gpu": [0], "gpuMemory": {"fraction": 0.4}},
        )
    )
    bare = planning.without_gpus(plan)
    (unit,) = bare.units
    assert [(each.name, each.gpus, each.tp_size, each.relay.device) for each in unit.stages] == [
        ("a", (), 2, "cpu"),
        ("b", (), 1, "cpu"),
    ]
    assert unit.gpu_ids == () and unit.pod == {}
    assert unit.revision != plan.units[0].revision
    assert [edge.relay for edge in bare.edges] == ["shm"]
    assert bare.local_gpus == {"a": ((),), "b": ((),)}


def test_on_a_cpu_a_relay_between_gpus_is_what_auto_chooses() -> None:
    half = {"gpu": [0], "gpuMemory": {"fraction": 0.4}}
    bare = planning.without_gpus(plan_of(pair(half, half, relayBackend="cuda_ipc")))
    assert {stage.relay.backend for unit in bare.units for stage in unit.stages} == {"auto"}
    assert (bare.coordinator.relay_backend, [edge.relay for edge in bare.edges]) == ("auto", ["shm"])


def test_a_number_that_equals_its_default_is_not_hashed_however_it_was_made() -> None:
    computed = UnitPlan(pipeline="p", name="u", groups=(), stages=(), drain_timeout_s=float("120"))
    decoded = msgspec.json.decode(b'{"pipeline":"p","name":"u","groups":[],"stages":[]}', type=UnitPlan)
    assert canonical.encode(computed) == canonical.encode(decoded)
    assert b"drain" not in canonical.encode(computed)


def test_a_pair_is_two_stages_with_an_edge_that_carries_kv() -> None:
    document = pair(
        {"streamTo": ["b"]},
        {
            "process": None,
            "gpuMemory": {"fraction": 0.5},
            "factoryArgs": {"x": 1, "y": 1, "z": 1},
            "disaggregation": {
                "prefill": {"process": "apart", "gpu": [3], "factoryArgs": {"y": 2, "z": 2}},
                "decode": {"process": "here", "gpu": [1, 2], "tpSize": 2},
            },
        },
        runtimeOverrides={"b": {"z": 3}},
        processGroups=[{"name": "apart", "replicas": 0}, {"name": "here", "replicas": 2}],
    )
    plan = plan_of(document)
    stages = {stage.name: stage for unit in plan.units for stage in unit.stages}
    assert stages["b-prefill"] == StagePlan(
        name="b-prefill",
        group="apart",
        factory="work:make",
        factory_args={"x": 1, "y": 2, "z": 3},
        gpus=(0,),
        gpu_memory_fraction=0.5,
        relay=RelayPlan(device="cuda"),
        kv_role="prefill",
        kv_peer="b",
    )
    decode = stages["b"]
    assert (decode.group, decode.gpus, decode.tp_size) == ("here", (0, 1), 2)
    assert (decode.kv_role, decode.kv_peer, decode.factory_args) == ("decode", "b-prefill", {"x": 1, "y": 1, "z": 3})
    assert plan.edges[-1] == EdgePlan(
        source="b-prefill", target="b", kind="kv", transport="network", relay="tcp", medium="tcp+curve"
    )
    assert plan.current.edges == (("a", "b", "normal"), ("a", "b", "stream"), ("b-prefill", "b", "kv"))
    assert plan.current.stages == {"a": "a", "b": "here", "b-prefill": "apart"}
    assert plan.current.terminals == ("b",)
    assert plan.replicas == {"a": 1, "here": 2, "apart": 0}
    assert plan.local_gpus == {"a": ((),), "here": ((1, 2), (1, 2)), "apart": ()}
    assert [unit.pod.get("gpus") for unit in plan.units] == [None, 2, 1]


def test_a_unit_that_is_scaled_by_its_load_starts_with_the_least_and_has_devices_for_the_most() -> None:
    limits = {"minReplicas": 0, "maxReplicas": 3, "targetUtilization": 0.5, "scaleDownDelaySeconds": 5}
    scaled = plan_of(pair({"gpu": [1]}, processGroups=[{"name": "a", "autoscaling": limits}]))
    assert scaled.replicas == {"a": 0, "b": 1}
    assert scaled.autoscaling == {"a": Limits(least=0, most=3, target_utilization=0.5, down_delay_s=5.0)}
    assert scaled.local_gpus["a"] == ((1,), (1,), (1,))


def test_replicas_of_prefill_are_in_no_revision() -> None:
    one, none = (
        pair(
            second={"disaggregation": {"prefill": {"process": "apart"}}},
            processGroups=[{"name": "apart", "replicas": count}],
        )
        for count in (1, 0)
    )
    assert revisions(one) == revisions(none)


def test_one_gpu_of_a_pair_is_one_pod() -> None:
    budget = {"gpu": [0], "gpuMemory": {"fraction": 0.4}}
    apart = {"disaggregation": {"prefill": {"process": "apart", "gpu": [0]}}}
    plan = plan_of(spec(stage("b", **budget, **apart)))
    assert [(unit.name, [group.name for group in unit.groups]) for unit in plan.units] == [("b", ["b", "apart"])]
    assert (plan.edges[0].transport, plan.edges[0].relay) == ("same_pod", "cuda_ipc")
