"""Each fault of a pipeline, with its path, its words and the names involved; and all of them at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from omnipipeline_spec.loading import from_resource
from omnipipeline_spec.pipeline import GpuMemory, PipelineConfig, StageConfig
from omnipipeline_spec.types.errors import InvalidPipeline
from omnipipeline_spec.types.resource import API_VERSION, KIND
from omnipipeline_spec.validation import topology
from tests.contract.rulecases import Document, pair, spec, stage


def faults(document: Document) -> list[str]:
    """The faults of a spec, one line each."""
    try:
        from_resource({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "p"}, "spec": document})
    except InvalidPipeline as error:
        return [str(fault) for fault in error.faults]
    return []


def on_gpu(gpu: int, **budget: Any) -> Document:
    return {"gpu": [gpu]} | ({"gpuMemory": budget} if budget else {})


TP: Document = {"tpSize": 2, "gpu": [0, 1], "process": None}
THREE = ["a", "b", "c"]


def chain(*names: str, **fields: Document) -> list[Document]:
    """Stages one after the other; ``fields`` adds to the stage of that name."""
    following = dict(itertools.pairwise(names))
    return [
        stage(name, **({"next": [following[name]]} if name in following else {}) | fields.get(name, {}))
        for name in names
    ]


#: Spec -> what is said of it though it is sound.
DOUBTS: dict[str, tuple[Document, list[str]]] = {
    "a route chooses": (
        spec(stage("a", next=["b", "c"], routeFn="w:r"), stage("b", next=["c"]), stage("c")),
        [
            "stages[2]: 'c' gets results of 'a', 'b' and has no waitFor: a request in which more than one of them "
            "sends to it fails",
        ],
    ),
    "a join may be late": (
        spec(
            stage("a", next=["b", "d"]),
            stage("b", next=["c"], routeFn="w:r"),
            stage("d", next=["c", "e"], routeFn="w:r"),
            stage("c", next=["e"], waitFor=["b", "d"], mergeFn="w:m"),
            stage("e"),
        ),
        [
            "stages[4]: 'e' gets results of 'd', 'c' and has no waitFor: a request in which more than one of them "
            "sends to it fails",
        ],
    ),
    "a stream starts a stage": (
        spec(stage("a", next=["c"], streamTo=["b"]), stage("b", next=["c"]), stage("c")),
        [
            "stages[2]: 'c' gets results of 'a', 'b' and has no waitFor: a request in which more than one of them "
            "sends to it fails",
        ],
    ),
    "a stream and a payload": (spec(stage("a", next=["b"], streamTo=["c"]), stage("b", next=["c"]), stage("c")), []),
    "a join": (
        spec(stage("a", next=["b", "c"]), stage("b", next=["c"]), stage("c", waitFor=["a", "b"], mergeFn="w:m")),
        [],
    ),
    "a projection for a target that gets chunks alone": (
        spec(
            stage("a", next=["b"], streamTo=["b", "c"], projectPayload={"b": "w:p", "c": "w:p"}),
            stage("b", next=["c"]),
            stage("c"),
        ),
        [
            "stages[0].projectPayload: 'c' gets no result of 'a', only chunks, which are not projected: the function "
            "is never called",
        ],
    ),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_what_some_requests_meet_or_no_request_calls_is_a_warning_and_no_fault(name: str) -> None:
    document, doubts = DOUBTS[name]
    assert faults(document) == []
    loaded = from_resource({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "p"}, "spec": document})
    assert [str(one) for one in topology.warnings(loaded.spec)] == doubts


APART: Document = {"disaggregation": {"prefill": {"process": "apart"}}}

CASES: dict[str, tuple[Document, list[str]]] = {
    "prefill apart": (pair(second=APART), []),
    "prefill and decode, each with its GPUs": (
        pair(
            second={
                "process": None,
                "gpuMemory": {"fraction": 0.5},
                "disaggregation": {
                    "prefill": {"process": "apart", "gpu": [0, 1], "tpSize": 2},
                    "decode": {"process": "d", "gpu": [2]},
                },
            }
        ),
        [],
    ),
    "no replicas of prefill": (pair(second=APART, processGroups=[{"name": "apart", "replicas": 0}]), []),
    "no replicas of another group": (
        pair(second=APART, processGroups=[{"name": "b", "replicas": 0}]),
        ["processGroups[0].replicas: of 'b' must be at least 1: only a prefill group may have 0"],
    ),
    "a stage called like a prefill stage": (
        spec(*chain("a", "b-prefill", "b", b=APART)),
        [
            "stages[2].disaggregation: of 'b' adds the stage 'b-prefill', and a stage of that name is declared",
        ],
    ),
    "prefill in the process of another stage": (
        pair({"process": "apart"}, APART),
        [
            "stages[1].disaggregation.prefill.process: 'apart' is the process of 'a' too; prefill of 'b' needs a "
            "process of its own, so that it scales apart",
        ],
    ),
    "prefill in the process of its decode": (
        pair(second={"process": "apart", **APART}),
        [
            "stages[1].disaggregation.prefill.process: 'apart' is the process of 'b' too; prefill of 'b' needs a "
            "process of its own, so that it scales apart",
        ],
    ),
    "two prefills in one process": (
        spec(*chain("a", "b", a=APART, b=APART)),
        [
            "stages[0].disaggregation.prefill.process: 'apart' is the process of 'b-prefill' too; prefill of 'a' needs "
            "a process of its own, so that it scales apart",
            "stages[1].disaggregation.prefill.process: 'apart' is the process of 'a-prefill' too; prefill of 'b' needs "
            "a process of its own, so that it scales apart",
        ],
    ),
    "prefill on fewer GPUs than ranks": (
        pair(second={"disaggregation": {"prefill": {"process": "apart", "gpu": [3], "tpSize": 2}}}),
        [
            "stages[1].disaggregation.prefill.gpu: of 'b-prefill' must list 2 distinct ids, one per rank of tpSize; "
            "it lists 1",
        ],
    ),
    "prefill that shares a GPU": (
        pair(second={"gpu": [0], "disaggregation": {"prefill": {"process": "apart", "gpu": [0]}}}),
        [
            "stages[1].gpuMemory: of 'b' is required: processes 'b', 'apart' share GPU 0",
            "stages[1].disaggregation.prefill.gpuMemory: of 'b-prefill' is required: processes 'b', 'apart' share GPU "
            "0",
        ],
    ),
    "prefill called coordinator": (
        pair(second={"disaggregation": {"prefill": {"process": "coordinator"}}}),
        ["stages[1].disaggregation.prefill.process: 'coordinator' is reserved for the coordinator"],
    ),
    "decode in two places": (
        pair(
            second={
                "gpu": [1],
                "disaggregation": {"prefill": {"process": "apart"}, "decode": {"process": "d", "gpu": [2]}},
            }
        ),
        [
            "stages[1].process: of 'b' is set twice, with different values: here and in disaggregation.decode",
            "stages[1].gpu: of 'b' is set twice, with different values: here and in disaggregation.decode",
        ],
    ),
    "a fused stage with prefill apart": (
        pair(second=APART, fusedStages=[["a", "b"]]),
        ["fusedStages[0]: 'b' has disaggregation and cannot be fused: its process scales apart"],
    ),
    "a name too long for its prefill stage": (
        spec(stage("b" * 60, process="p", **APART)),
        [
            f"stages[0].name: {'b' * 60!r} is too long for its prefill stage {'b' * 60 + '-prefill'!r}: at most 63 "
            "characters",
        ],
    ),
    "more stages than control ports": (
        spec(*chain(*(f"s{index}" for index in range(64)), s63=APART)),
        ["stages: are 64, and 1 more for prefill; at most 64 are allowed"],
    ),
    "shared memory between a pair on one machine": (pair(second=APART, relayBackend="shm"), []),
    "a pair without TCP": (
        spec(stage("a", **APART), dataPlane={"allowTCP": False}),
        [
            "dataPlane.allowTCP: is false, but 'a-prefill' and 'a' run in different pods and relayBackend 'auto' "
            "cannot connect them without TCP: set dataPlane.rdma",
        ],
    ),
    "unknown names are listed sorted": (
        pair({"next": ["zz", "b", "yy"], "waitFor": ["gone"], "mergeFn": "w:m", "streamTo": ["b", "xx"]}),
        [
            "stages[0].next: 'yy', 'zz' are not stages",
            "stages[0].waitFor: 'gone' is not a stage",
            "stages[0].streamTo: 'xx' is not a stage",
            "stages[0].waitFor: 'a' is the entry: new requests come from no stage, so its fan-in is never complete",
        ],
    ),
    "a projection needs an edge": (
        pair({"projectPayload": {"b": "w:p", "c": "w:p"}}),
        ["stages[0].projectPayload: 'c' must be in next or streamTo of 'a'"],
    ),
    "chunks at the end go where chunks go": (
        pair({"streamTo": ["b"], "streamAtEnd": ["b", "c"]}),
        ["stages[0].streamAtEnd: 'c' must be in streamTo of 'a'"],
    ),
    "neither next nor terminal": (
        spec(stage("a", terminal=None), stage("b")),
        [
            "stages[0]: 'a' has neither next nor terminal: true; exactly one of the two must be set",
            "stages[1]: 'b' cannot be reached from the entry 'a'",
        ],
    ),
    "both next and terminal": (
        pair({"terminal": True}),
        ["stages[0]: 'a' is terminal and has next; exactly one of the two must be set"],
    ),
    "a route on a terminal stage": (
        pair({}, {"routeFn": "w:r"}),
        ["stages[1].routeFn: 'b' has no next to choose from; it is terminal"],
    ),
    "a fan-in without its merge, hooks without their fields": (
        spec(
            stage("a", next=["b"], streamDoneToFn="w:d"),
            stage("b", next=["c"], waitFor=["a"]),
            stage("c", mergeFn="w:m", waitForFn="w:f"),
        ),
        [
            "stages[0].streamDoneToFn: of 'a' has no targets without streamTo",
            "stages[1].mergeFn: of 'b' is required, because waitFor is set",
            "stages[2].mergeFn: of 'c' has nothing to merge without waitFor",
            "stages[2].waitForFn: of 'c' has nothing to choose from without waitFor",
        ],
    ),
    "a source that never routes here": (
        spec(stage("a", next=["b", "c"]), stage("b", streamTo=["c"]), stage("c", waitFor=["a", "b"], mergeFn="w:m")),
        [
            "stages[2].waitFor: 'b' never routes to 'c', so its fan-in is never complete: add it to next of 'b'",
        ],
    ),
    "names of the pipeline": (
        pair(entryStage="x", runtimeOverrides={"y": {}}, fusedStages=[["a", "z"]]),
        [
            "entryStage: 'x' is not a stage",
            "runtimeOverrides.y: 'y' is not a stage",
            "fusedStages[0]: 'z' is not a stage",
        ],
    ),
    "no terminal, and a cycle with its way": (
        spec(stage("a", next=["b"]), stage("b", next=["c"]), stage("c", next=["b"])),
        [
            "stages: no stage is terminal, so no request would ever end",
            "stages[1]: the graph has a cycle: b → c → b",
        ],
    ),
    "a cycle through a stream": (
        spec(stage("a", next=["b"]), stage("b", streamTo=["a"])),
        ["stages[0]: the graph has a cycle: a → b → a"],
    ),
    "two payloads for one stage, whatever a request asks": (
        spec(stage("a", next=["b", "c"]), stage("b", next=["c"]), stage("c")),
        [
            "stages[2]: 'c' takes one payload per request, but 'a', 'b' send it one each: join them by waitFor and "
            "mergeFn, or choose one by routeFn",
        ],
    ),
    "two payloads behind a join": (
        spec(
            stage("a", next=["b", "c"]),
            stage("b", next=["d"]),
            stage("c", next=["d", "e"]),
            stage("d", next=["e"], waitFor=["b", "c"], mergeFn="w:m"),
            stage("e"),
        ),
        [
            "stages[4]: 'e' takes one payload per request, but 'c', 'd' send it one each: join them by waitFor and "
            "mergeFn, or choose one by routeFn",
        ],
    ),
    "a payload that a join leaves out": (
        spec(
            stage("a", next=["b", "c"], routeFn="w:r"),
            stage("b", next=["c"]),
            stage("c", waitFor=["b"], mergeFn="w:m"),
        ),
        ["stages[2].waitFor: of 'c' leaves out 'a', which sends to it: a request in which that happens fails"],
    ),
    "a stage that names itself": (
        pair({"next": ["a", "b"]}),
        ["stages[0].next: 'a' names itself"],
    ),
    "a stage out of reach, seen from the entry": (
        spec(*chain(*THREE), entryStage="b"),
        ["stages[0]: 'a' cannot be reached from the entry 'b'"],
    ),
    "every missing process": (
        pair({"process": None}, {"process": None}),
        [
            f"stages[{index}].process: of '{name}' is required: stages with the same value share an OS process; "
            "it has no default"
            for index, name in enumerate("ab")
        ],
    ),
    "reserved names": (
        spec(stage("coordinator", process="p", next=["b"]), stage("b", process="coordinator")),
        [
            "stages[0].name: 'coordinator' is reserved for the coordinator",
            "stages[1].process: 'coordinator' is reserved for the coordinator",
        ],
    ),
    "ranks and ids": (
        spec(
            stage("a", next=["b"], tpSize=2, gpu=[0], process=None),
            stage("b", next=["c"], gpu=[1, 2]),
            stage("c", gpu=[5, 5], tpSize=2),
        ),
        [
            "stages[2].gpu[1]: 5 is already at stages[2].gpu[0]",
            "stages[0].gpu: of 'a' must list 2 distinct ids, one per rank of tpSize; it lists 1",
            "stages[1].gpu: of 'b' lists 2 ids, but its tpSize is 1: such a stage has at most one GPU",
            "stages[1].process: process group 'b' would span several GPUs: 'b' on GPU 1, 2; give them processes of "
            "their own",
        ],
    ),
    "the process of ranks is their own": (
        pair({**TP, "process": "p"}, {"process": "p"}),
        ["stages[0].process: 'p' is the process of 'b' too; 'a' with tpSize > 1 shares none"],
    ),
    "derived names of ranks": (
        pair(TP, {"process": "a_tp1"}),
        ["stages[1].process: 'a_tp1', process group 'a_tp1', collides with a rank of 'a': both are called 'a-tp1'"],
    ),
    "names that are one on the cluster": (
        spec(stage("a_b", next=["a-b"], process="x_y"), stage("a-b", process="x-y")),
        [
            "stages[1].process: 'x-y', process group 'x-y', collides with process group 'x_y': both are called 'x-y'",
            "stages[1].name: 'a-b' and 'a_b' become one name when _ is replaced by -",
        ],
    ),
    "two GPUs in one process": (
        pair({"process": "p", "gpu": [0]}, {"process": "p", "gpu": [1]}),
        [
            "stages[0].process: process group 'p' would span several GPUs: 'a' on GPU 0, 'b' on GPU 1; give them "
            "processes of their own",
        ],
    ),
    "a shared GPU without budgets": (
        pair(on_gpu(0), on_gpu(0, fraction=0.5)),
        ["stages[0].gpuMemory: of 'a' is required: processes 'a', 'b' share GPU 0"],
    ),
    "budgets beyond the limit, with their sum": (
        pair(on_gpu(0, fraction=0.5), on_gpu(0, fraction=0.6)),
        [
            "stages[0].gpuMemory: the budgets on GPU 0 sum to 1.1 (a 0.5 + b 0.6); gpuMemoryLimit is 0.95",
        ],
    ),
    "a limit of one's own": (
        pair(on_gpu(0, fraction=0.5), on_gpu(0, fraction=0.3), gpuMemoryLimit=0.7),
        ["stages[0].gpuMemory: the budgets on GPU 0 sum to 0.8 (a 0.5 + b 0.3); gpuMemoryLimit is 0.7"],
    ),
    "budgets that fit exactly, in binary too": (
        pair(on_gpu(0, fraction=0.65), on_gpu(0, fraction=0.3)),
        [],
    ),
    "both kinds on one GPU": (
        pair(on_gpu(0, fraction=0.5), on_gpu(0, bytes="1Gi")),
        [
            "stages[1].gpuMemory: GPU 0 has budgets by fraction ('a') and by bytes ('b'); use one of the two",
        ],
    ),
    "budgets of the wrong form": (
        spec(
            stage("a", next=["b"], gpuMemory={"fraction": 0.5}),
            stage("b", next=["c"], gpu=[0], gpuMemory={}),
            stage("c", gpu=[1], gpuMemory={"bytes": "0"}),
        ),
        [
            "stages[0].gpuMemory: of 'a' is set, but the stage has no gpu",
            "stages[1].gpuMemory: of 'b' must have exactly one of fraction and bytes",
            "stages[2].gpuMemory.bytes: '0' must be more than 0",
        ],
    ),
    "fusion of what is not a line": (
        spec(
            stage("a", next=["b", "c"]),
            stage("b", next=["d"]),
            stage("c", next=["d"]),
            stage("d", waitFor=["b", "c"], mergeFn="w:m"),
            fusedStages=[["a", "b"], ["c", "d"]],
        ),
        [
            "fusedStages[0]: 'a' must route to 'b' alone to be fused with it; it routes to 'b', 'c'",
            "fusedStages[1]: 'd' must get results from 'c' alone to be fused with it; 'b' routes to it too",
        ],
    ),
    "fusion across a gap, backwards, and twice": (
        spec(*chain(*THREE), fusedStages=[["a", "c"], ["b", "a"]]),
        [
            "fusedStages[0]: 'a' must route to 'c' alone to be fused with it; it routes to 'b'",
            "fusedStages[0]: 'c' must get results from 'a' alone to be fused with it; 'b' routes to it too",
            "fusedStages[1]: 'a' is in fusedStages[0] too: merge the lists",
            "fusedStages[1]: 'b' must route to 'a' alone to be fused with it; it routes to 'c'",
        ],
    ),
    "fusion with ranks": (
        pair(TP, fusedStages=[["a", "b"]]),
        [
            "fusedStages[0]: 'a' has tpSize > 1 and cannot be fused",
        ],
    ),
    "fusion over two GPUs": (
        pair(on_gpu(0), on_gpu(1), fusedStages=[["a", "b"]]),
        [
            "stages[0].process: process group 'a' would span several GPUs: 'a' on GPU 0, 'b' on GPU 1; give them "
            "processes of their own",
        ],
    ),
    "refining what is not there, and what was absorbed": (
        pair(fusedStages=[["a", "b"]], processGroups=[{"name": "b"}, {"name": "x"}]),
        [
            "processGroups[0].name: 'b' was fused into process group 'a': configure that one",
            "processGroups[1].name: 'x' is not a process group; there are 'a'",
        ],
    ),
    "one pod, two replica counts": (
        pair(
            on_gpu(0, fraction=0.4),
            on_gpu(0, fraction=0.4),
            processGroups=[{"name": "a", "replicas": 2}, {"name": "b", "replicas": 3}],
        ),
        [
            "processGroups[1].replicas: process groups that share a GPU share a pod and must have the same "
            "replicas: 'a': 2, 'b': 3",
        ],
    ),
    "one pod, one group by its load and one not": (
        pair(
            on_gpu(0, fraction=0.4),
            on_gpu(0, fraction=0.4),
            processGroups=[{"name": "a", "autoscaling": {"maxReplicas": 2}}, {"name": "b", "replicas": 2}],
        ),
        ["processGroups[1].replicas: 'b' shares a pod with 'a', which has autoscaling: leave replicas out"],
    ),
    "replicas by the load, wrong in every way": (
        pair(
            coordinator={"hold": {"seconds": 0}},
            processGroups=[
                {
                    "name": "a",
                    "replicas": 2,
                    "autoscaling": {
                        "minReplicas": 3,
                        "maxReplicas": 2,
                        "targetQueueSeconds": 1,
                        "targetUtilization": 0.5,
                    },
                },
                {"name": "b", "autoscaling": {"minReplicas": 0, "maxReplicas": 2}},
            ],
        ),
        [
            "processGroups[0].autoscaling: 'a' has both replicas and autoscaling: leave one out",
            "processGroups[0].autoscaling.minReplicas: of 'a' must not be more than maxReplicas: 3 > 2",
            "processGroups[0].autoscaling: 'a' has both targetQueueSeconds and targetUtilization: leave one out",
            "processGroups[1].autoscaling.minReplicas: of 'b' is 0 and needs coordinator.hold.seconds: a request waits "
            "for its first instance",
        ],
    ),
    "no request may wait for a group that may have no instance": (
        pair(
            coordinator={"hold": {"maxRequests": 0, "maxBytes": 0}},
            processGroups=[{"name": "b", "autoscaling": {"minReplicas": 0, "maxReplicas": 2}}],
        ),
        [
            "processGroups[0].autoscaling.minReplicas: of 'b' is 0 and needs coordinator.hold.maxRequests: a request "
            "waits for its first instance",
        ],
    ),
    "one pod, two places and two templates": (
        pair(
            on_gpu(0, fraction=0.4),
            on_gpu(0, fraction=0.4),
            processGroups=[
                {"name": "a", "placement": {"nodeSelector": {"x": "1"}}, "podTemplate": {"spec": {}}},
                {"name": "b", "placement": {"nodeSelector": {"x": "2"}}, "podTemplate": {"spec": {"hostIPC": True}}},
            ],
        ),
        [
            f"processGroups[1].{field}: process groups that share a GPU share a pod and must have the same "
            f"{field}: 'a', 'b'"
            for field in ("placement", "podTemplate")
        ],
    ),
    "places that cannot be": (
        pair(
            on_gpu(0, fraction=0.4),
            on_gpu(0, fraction=0.4),
            processGroups=[
                {"name": "a", "placement": {"near": ["b", "c"], "gpuProducts": ["H100"]}},
                {"name": "b", "placement": {"near": ["b", "c"], "gpuProducts": ["H100"]}},
            ],
            coordinator={
                "placement": {
                    "near": ["a"],
                    "nearTopologyKeys": [],
                    "gpuProducts": ["H100"],
                    "affinity": {"podAffinity": {}, "nodeAffinity": {}},
                }
            },
        ),
        [
            "processGroups[0].placement.near[0]: 'b' runs in the same pod as 'a'",
            "processGroups[0].placement.near[1]: 'c' is not a stage",
            "processGroups[1].placement.near[0]: 'b' runs in the same pod as 'b'",
            "processGroups[1].placement.near[1]: 'c' is not a stage",
            "coordinator.placement.nearTopologyKeys: is empty, and near has stages: name the label of a domain, "
            "such as kubernetes.io/hostname",
            "coordinator.placement.near: and affinity.podAffinity exclude each other: write one of them",
            "coordinator.placement.gpuProducts: 'coordinator' has no gpu",
            "coordinator.placement.gpuProducts: and affinity.nodeAffinity exclude each other: write one of them",
        ],
    ),
    "one pod through a third group": (
        spec(
            stage("a", next=["b"], **on_gpu(0, fraction=0.4)),
            stage("b", next=["c"], tpSize=2, gpu=[0, 1], gpuMemory={"fraction": 0.4}),
            stage("c", **on_gpu(1, fraction=0.4)),
            processGroups=[{"name": "a", "replicas": 1}, {"name": "c", "replicas": 2}],
        ),
        [
            "processGroups[1].replicas: process groups that share a GPU share a pod and must have the same "
            "replicas: 'a': 1, 'c': 2",
        ],
    ),
    "devices of local replicas": (
        spec(
            *chain("a", "b", "c", a=on_gpu(0), c=TP | {"gpu": [1, 2]}),
            processGroups=[
                {"name": "a", "replicas": 2, "localGpus": [[0]]},
                {"name": "b", "localGpus": [[1]]},
                {"name": "c", "localGpus": [[3, 3]]},
            ],
        ),
        [
            "processGroups[0].localGpus: of 'a' must have one list per replica: 2, not 1",
            "processGroups[1].localGpus: process group 'b' runs on the CPU and has no devices",
            "processGroups[2].localGpus[0]: [3, 3] must be 2 distinct device ids, as the stages of 'c' have",
        ],
    ),
    "environment": (
        pair(
            env=[
                {"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "B", "valueFrom": {}},
                {"name": "OMNI_HTTP_PORT", "value": "9000"},
                {"name": "OMNI_LOG_FORMAT", "value": "text"},
                {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
                {"name": "RANK", "value": "0"},
                {"name": "HF_HOME", "value": "/models"},
                {"name": "PYTHONPATH", "value": "/app"},
            ],
            envFrom=[{}],
        ),
        [
            "env[0]: 'A' has both value and valueFrom",
            "env[1].valueFrom: of 'B' must have exactly one source",
            "env[2].name: 'OMNI_HTTP_PORT' is set by the operator itself",
            "env[4].name: 'NVIDIA_VISIBLE_DEVICES' is derived from the stages' gpu",
            "envFrom[0]: must have exactly one of secretRef and configMapRef",
        ],
    ),
    "environment that another field sets": (
        pair(
            {"tpSize": 2, "gpu": [0, 1], "process": None},
            env=[
                {"name": "RANK", "value": "0"},
                {"name": "HF_HOME", "value": "/models"},
                {"name": "OTEL_TRACES_SAMPLER", "value": "always_on"},
                {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
            ],
            modelCache={"type": "EmptyDir"},
            observability={"tracing": {"endpoint": "http://collector:4317"}},
            code={"configMapRef": {"name": "mine"}},
        ),
        [
            "env[0].name: 'RANK' is set for each rank of a stage with tpSize > 1",
            "env[1].name: 'HF_HOME' is set by modelCache",
            "env[2].name: 'OTEL_TRACES_SAMPLER' is set by observability.tracing",
            "env[3].valueFrom: 'PYTHONPATH' is joined with the folder of code.configMapRef, so it must be a plain "
            "value",
        ],
    ),
    "environment that comes too late": (
        pair(envDefaults={"OMNI_PLAN": "x", "OMNI_LOG_FORMAT": "text", "PYTHONPATH": "/app", "HF_HUB_OFFLINE": "1"}),
        [
            "envDefaults.OMNI_LOG_FORMAT: 'OMNI_LOG_FORMAT' is read before envDefaults is applied: set it in env",
            "envDefaults.OMNI_PLAN: 'OMNI_PLAN' is set by the operator itself",
            "envDefaults.PYTHONPATH: 'PYTHONPATH' is read before envDefaults is applied: set it in env",
        ],
    ),
    "environment of a generated container, by the template": (
        pair(
            processGroups=[
                {
                    "name": "a",
                    "podTemplate": {
                        "spec": {
                            "containers": [
                                {"name": "sidecar", "env": [{"name": "OMNI_PLAN", "value": "its own"}]},
                                {"name": "stage", "env": [{"name": "A"}, {"name": "OMNI_POD_IP", "value": "::1"}]},
                                {"name": "stage", "env": [{"name": "PYTHONPATH", "value": "/app"}]},
                            ]
                        }
                    },
                }
            ],
            coordinator={"podTemplate": {"spec": {"containers": [{"name": "coordinator", "env": {}}]}}},
        ),
        [
            "processGroups[0].podTemplate.spec.containers[1].env[1].name: 'OMNI_POD_IP' is set by the operator itself",
            "processGroups[0].podTemplate.spec.containers[2].env[0].name: 'PYTHONPATH' can only be set in env, "
            "where it is joined with the operator's own value",
            "coordinator.podTemplate.spec.containers[0].env: must be a list of variables with names: anything else "
            "would replace the operator's own",
        ],
    ),
    "code": (
        pair(code={"inline": {"../x.py": "1", "a/b.py": "2"}}),
        [
            "code.inline['../x.py']: '../x.py' is not a file name: use letters, digits, '.', '-' and "
            "'_', without folders",
            "code.inline['a/b.py']: 'a/b.py' is not a file name: use letters, digits, '.', '-' and "
            "'_', without folders",
        ],
    ),
    "code in place of what is there": (
        pair(
            code={
                "inline": {
                    **{"stage_runtime.py": "", "numpy.py": "", "types.py": "", "json.so": ""},
                    **{
                        "zmq.cpython-311-x86_64-linux-gnu.so": "",
                        "types.json": "",
                        "numpy_words.py": "",
                        "words.py": "",
                    },
                }
            }
        ),
        [
            "code.inline['json.so']: would be imported in place of the module json; give it another name",
            "code.inline['numpy.py']: would be imported in place of the module numpy; give it another name",
            "code.inline['stage_runtime.py']: would be imported in place of the module stage_runtime; give it another "
            "name",
            "code.inline['types.py']: would be imported in place of the module types; give it another name",
            "code.inline['zmq.cpython-311-x86_64-linux-gnu.so']: would be imported in place of the module zmq; give "
            "it another name",
        ],
    ),
    "too much code": (
        pair(code={"inline": {name: "#" * 200_000 for name in ("a.py", "b.py", "c.py")}}),
        ["code.inline: has 600000 bytes; at most 524288 are allowed: build an image FROM ours instead"],
    ),
    "limits below requests": (
        pair(processGroups=[{"name": "a", "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1G"}}}]),
        ["processGroups[0].resources.limits.memory: 1G is less than the request of 2Gi"],
    ),
    "ports and beats": (
        pair(coordinator={"http": {"port": 8001}}, control={"heartbeatSeconds": 5}),
        [
            "coordinator.http.port: 8001 is used in every pod (admin, probes or control)",
            "control.deadAfterSeconds: 3 must be more than heartbeatSeconds 5, or peers are "
            "considered dead between two heartbeats",
        ],
    ),
    "the cache": (
        pair(modelCache={"type": "PersistentVolumeClaim", "prefetch": {"enabled": True}}),
        [
            "modelCache: of type PersistentVolumeClaim must have exactly one of claimName and size",
            "modelCache.prefetch: needs modelPath",
        ],
    ),
    "a model in a store that nothing fetches": (
        pair(modelPath="s3://b/m", modelRevision="v1", modelCache={"type": "EmptyDir"}),
        [
            "modelPath: 's3://b/m' needs modelCache.prefetch.enabled: true",
            "modelRevision: does not apply to an object store: name another prefix",
        ],
    ),
    "a route with a parent twice": (
        pair(expose={"route": {"parentRefs": [{"name": "g", "port": each} for each in (443, 80, 443)]}}),
        ["expose.route.parentRefs[2]: names Gateway g twice, with the same listener and port"],
    ),
    "a route to all listeners of a Gateway and to one of them": (
        pair(expose={"route": {"parentRefs": [{"name": "g"}, {"name": "h"}, {"name": "g", "sectionName": "tls"}]}}),
        [
            "expose.route.parentRefs[2].sectionName: names Gateway g with sectionName, an earlier one without it: the "
            "Gateway API takes all with it, or none"
        ],
    ),
    "an address without a bucket": (
        pair(modelPath="s3:///m?x", modelCache={"prefetch": {"secretName": "keys"}}),
        [
            "modelCache.prefetch.secretName: needs enabled: true",
            "modelPath: 's3:///m?x' is not s3://BUCKET/PREFIX",
        ],
    ),
    "the cache of another type": (
        pair(modelPath="m", modelCache={"claimName": "c", "prefetch": {"enabled": True}}),
        [
            "modelCache: of type None must not have claimName or storageClassName",
            "modelCache.prefetch: needs type PersistentVolumeClaim or Node; None keeps nothing between pods",
        ],
    ),
    "models on nodes with the settings of others": (
        pair(modelPath="some/model", modelCache={"type": "Node", "size": "1Gi", "claimName": "c"}),
        [
            "modelCache: of type Node must not have claimName or storageClassName",
            "modelCache.size: the operator's chart bounds the directories of nodes",
            "modelCache.prefetch: type Node needs enabled: true: stages cannot write there",
        ],
    ),
    "an image without a reference": (
        pair(modelPath="some/model", modelCache={"type": "Image", "size": "1Gi"}),
        [
            "modelCache: of type Image must have image",
            "modelCache.size: an image has its own size",
            "modelPath: 'some/model' must begin with /models/, where the image of modelCache is mounted",
        ],
    ),
    "an image of another type": (
        pair(modelCache={"image": "weights:1", "pullPolicy": "Never"}),
        ["modelCache: of type None must not have image", "modelCache.pullPolicy: needs type Image"],
    ),
    "a cache without a type": (
        pair(modelCache={"size": "10Gi"}),
        ["modelCache.size: needs type EmptyDir or PersistentVolumeClaim; the type is None, the default"],
    ),
    "a storage class for a claim that exists": (
        pair(modelCache={"type": "PersistentVolumeClaim", "claimName": "c", "storageClassName": "fast"}),
        ["modelCache.storageClassName: applies to a claim made from size; claimName names an existing claim"],
    ),
    "hosts that no URL can have": (
        pair(coordinator={"http": {"mediaHosts": ["a.example", "a.example:8443", "::1", "é.example", "10.0.0.1:80"]}}),
        [],
    ),
    "more hosts that no URL can have": (
        pair(coordinator={"http": {"mediaHosts": ["https://a.example", "*.example", "", "a.example/b", "a b", "u@a"]}}),
        [
            f"coordinator.http.mediaHosts[{index}]: {host!r} is not a host: write it as host or host:port"
            for index, host in enumerate(["https://a.example", "*.example", "", "a.example/b", "a b", "u@a"])
        ],
    ),
    "allowed hosts that no page can have": (
        pair(coordinator={"http": {"allowedHosts": ["a.example", "a.example:8443", "https://a.example", "*", ""]}}),
        [
            f"coordinator.http.allowedHosts[{index}]: {host!r} is not a host name: write it without scheme and port"
            for index, host in enumerate(["", "a.example:8443", "https://a.example", "*", ""])
            if index
        ],
    ),
    "amounts of devices that differ from the stages' own": (
        spec(
            *chain("a", "b", a={"gpu": [0]}, b=TP | {"gpu": [1, 2]}),
            processGroups=[
                {"name": "a", "resources": {"limits": {"nvidia.com/gpu": 3}, "requests": {"nvidia.com/gpu": "1"}}},
                {
                    "name": "b",
                    "gpuResourceName": "amd.com/gpu",
                    "resources": {"limits": {"nvidia.com/gpu": 3, "amd.com/gpu": 3}, "requests": {"rdma/hca": 1}},
                },
            ],
            dataPlane={"rdma": {"resourceName": "rdma/hca", "count": 2}},
        ),
        [
            "processGroups[0].resources.limits.nvidia.com/gpu: is 3, but the stages of 'a' have gpu ids for 1: "
            "leave it out",
            "processGroups[1].resources.requests.rdma/hca: is 1, but dataPlane.rdma.count is 2: leave it out",
            "processGroups[1].resources.limits.amd.com/gpu: is 3, but the stages of 'b' have gpu ids for 2: "
            "leave it out",
        ],
    ),
    "devices for a group without any": (
        pair(processGroups=[{"name": "a", "gpuResourceName": "amd.com/gpu"}]),
        ["processGroups[0].gpuResourceName: process group 'a' runs on the CPU and has no devices"],
    ),
    "a claim for a group without any devices": (
        pair(processGroups=[{"name": "a", "gpuClaim": {"deviceClassName": "gpu"}}]),
        ["processGroups[0].gpuClaim: process group 'a' runs on the CPU and has no devices"],
    ),
    "an amount beside a claim": (
        pair(
            {"gpu": [0]},
            processGroups=[
                {
                    "name": "a",
                    "gpuClaim": {"deviceClassName": "gpu"},
                    "resources": {"limits": {"nvidia.com/gpu": 1, "amd.com/gpu": 1}},
                }
            ],
        ),
        ["processGroups[0].resources.limits.nvidia.com/gpu: is 1, but the GPUs of 'a' come by gpuClaim: leave it out"],
    ),
    "GPUs in two ways": (
        pair(
            on_gpu(0, fraction=0.4),
            on_gpu(0, fraction=0.4),
            processGroups=[
                {"name": "a", "gpuClaim": {"deviceClassName": "gpu"}},
                {"name": "b", "gpuResourceName": "amd.com/gpu"},
            ],
        ),
        [
            "processGroups[1].gpuResourceName: and gpuClaim of 'a' exclude each other in a pod: write one of them",
        ],
    ),
    "a pod with two claims": (
        pair(
            on_gpu(0, fraction=0.4),
            on_gpu(0, fraction=0.4),
            processGroups=[
                {"name": "a", "gpuClaim": {"deviceClassName": "gpu"}},
                {"name": "b", "gpuClaim": {"deviceClassName": "gpu", "selectors": ["true"]}},
            ],
        ),
        [
            "processGroups[1].gpuClaim: process groups that share a GPU share a pod and must have the same gpuClaim: "
            "'a', 'b'"
        ],
    ),
    "devices of replicas that a group has of its pod": (
        pair(
            on_gpu(0, fraction=0.4),
            on_gpu(0, fraction=0.4),
            processGroups=[{"name": "a", "replicas": 2}, {"name": "b", "localGpus": [[0], [1]]}],
        ),
        [],
    ),
    "devices of too few replicas": (
        pair(
            on_gpu(0, fraction=0.4),
            on_gpu(0, fraction=0.4),
            processGroups=[{"name": "a", "replicas": 2}, {"name": "b", "localGpus": [[0]]}],
        ),
        ["processGroups[1].localGpus: of 'b' must have one list per replica: 2, not 1"],
    ),
    "profiling storage": (
        pair(profiling={"storage": {}}),
        ["profiling.storage: must have exactly one of emptyDir and claimName"],
    ),
    "no way between pods": (
        pair(relayBackend="shm", dataPlane={"allowTCP": False}),
        [
            "dataPlane.allowTCP: is false, but 'a' and 'b' run in different pods and relayBackend 'shm' cannot "
            "connect them without TCP",
        ],
    ),
    "a library's own sockets are TCP, too": (
        pair(relayBackend="nixl", dataPlane={"allowTCP": False}),
        [
            "dataPlane.allowTCP: is false, but 'a' and 'b' run in different pods and relayBackend 'nixl' cannot "
            "connect them without TCP: set dataPlane.rdma",
        ],
    ),
    "rdma is a way between pods": (
        pair(dataPlane={"allowTCP": False, "rdma": {"resourceName": "rdma/hca"}}),
        [],
    ),
    "one pod needs no way": (
        pair({"process": "p"}, {"process": "p"}, relayBackend="shm", dataPlane={"allowTCP": False}),
        [],
    ),
    "duplicates": (
        spec(stage("a", next=["b", "b"]), stage("b", process="x"), stage("b", process="y")),
        [
            "stages[0].next[1]: 'b' is already at stages[0].next[0]",
            "stages[2].name: 'b' is already at stages[1].name",
        ],
    ),
    "instances' names": (
        pair({"process": "p@r1"}),
        ["stages[0].process: 'p@r1' ends like the name of an instance; the suffix @rN is reserved"],
    ),
    "no stages": ({"stages": []}, ["stages: has 0 entries; at least 1 are required"]),
    "no spec at all": ({}, ["stages: is required"]),
    "form and meaning at once": (
        pair({"next": ["ghost"], "tp_size": 2, "contextLength": 1}),
        [
            "stages[0].tp_size: unknown key; did you mean tpSize?",
            "stages[0].contextLength: unknown key; known are disaggregation, factory, factoryArgs, gpu, gpuMemory, "
            "mergeFn, name, next, process, projectPayload, relay, routeFn, streamAtEnd, streamDoneToFn, streamTo, "
            "terminal, tpSize, waitFor, waitForFn",
            "stages[0].next: 'ghost' is not a stage",
            "stages[1]: 'b' cannot be reached from the entry 'a'",
        ],
    ),
}


@pytest.mark.proves("second-payload", "wrong-spec")
@pytest.mark.parametrize("name", CASES)
def test_every_fault_is_named_with_its_path(name: str) -> None:
    document, expected = CASES[name]
    assert faults(document) == expected


def test_a_fault_carries_the_names_involved() -> None:
    found = topology.faults(
        PipelineConfig(
            stages=[
                StageConfig(name="a", process="p", factory="w:m", next="b", gpu=0, gpu_memory=GpuMemory(fraction=0.6)),
                StageConfig(
                    name="b", process="q", factory="w:m", terminal=True, gpu=0, gpu_memory=GpuMemory(fraction=0.6)
                ),
            ]
        )
    )
    assert [fault.names for fault in found] == [("a", "b")]


def test_a_value_built_in_python_is_checked_as_a_file_is() -> None:
    spec_ = PipelineConfig(stages=[StageConfig(name="A", process="p", factory="nowhere", tp_size=0, terminal=True)])
    assert [fault.path for fault in topology.faults(spec_)] == [
        "stages[0].name",
        "stages[0].factory",
        "stages[0].tpSize",
    ]
    with pytest.raises(InvalidPipeline, match="3 faults"):
        topology.check(spec_)


def test_a_scalar_gpu_cannot_serve_several_ranks() -> None:
    spec_ = PipelineConfig(stages=[StageConfig(name="a", factory="w:m", tp_size=2, gpu=0, terminal=True)])
    assert [str(fault) for fault in topology.faults(spec_)] == [
        "stages[0].gpu: of 'a' must list 2 distinct ids, one per rank of tpSize; it lists 1"
    ]
