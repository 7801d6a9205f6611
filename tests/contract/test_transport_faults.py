"""Faults of relays, their ranks and devices; ways between pods without TCP are in `test_topology`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.errors import InvalidPipeline
from omnipipeline_spec.validation import topology
from tests.contract.rulecases import pair

HALF: dict[str, Any] = {"gpu": [0], "gpuMemory": {"fraction": 0.4}}


def faults(document: Any) -> list[str]:
    spec, found = topology.of_document(document)
    assert spec is not None
    return [f"{fault.path}: {fault.message}" for fault in found]


def ranked(first: Any, second: Any, **spec: Any) -> list[str]:
    return faults(pair({"relay": first}, {"relay": second}, **{"relayBackend": "nccl", **spec}))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ranked({"rank": 0, "worldSize": 2}, {"rank": 1, "worldSize": 2}), []),
        (ranked({"rank": 0, "worldSize": 2}, {}), []),
        (ranked({"rank": 0}, {}), ["stages[0].relay.rank: needs worldSize, too"]),
        (ranked({"worldSize": 2}, {}), ["stages[0].relay.worldSize: needs rank, too"]),
        (
            ranked({"rank": 2, "worldSize": 2}, {}),
            ["stages[0].relay.rank: 2 is not a rank of a world of 2: use 0 to 1"],
        ),
        (
            ranked({"rank": 0, "worldSize": 2}, {"rank": 0, "worldSize": 2}),
            ["stages[1].relay.rank: 0 is taken by the process 'a'"],
        ),
        (
            ranked({"rank": 0, "worldSize": 2}, {"rank": 1, "worldSize": 3}),
            ["stages[1].relay.worldSize: 3 of 'b' differs from 2 of 'a'"],
        ),
        (
            ranked({"rank": 0, "worldSize": 2}, {}, relayBackend="auto"),
            ["stages[0].relay.rank: is of an NCCL world, and relayBackend is auto: remove it, or set nccl"],
        ),
        (
            faults(
                pair(
                    {"process": "p", "relay": {"rank": 0, "worldSize": 2}},
                    {"process": "p", "relay": {"rank": 1, "worldSize": 2}},
                    relayBackend="nccl",
                )
            ),
            ["stages[1].relay.rank: 1 of 'b' differs from 0 of its process 'p'"],
        ),
        (faults(pair({"relay": {"device": "cuda"}})), ["stages[0].relay.device: is cuda, and 'a' has no gpu"]),
        (faults(pair({"gpu": [0], "relay": {"device": "cuda"}})), []),
        (faults(pair(HALF, HALF, relayBackend="cuda_ipc")), []),
        (faults(pair({"process": "p"}, {"process": "p"}, relayBackend="cuda_ipc")), []),
        (
            faults(pair({"gpu": [0]}, {}, relayBackend="cuda_ipc")),
            [
                "relayBackend: is cuda_ipc, and 'b' of the edge a -> b has no gpu: give it one, or use auto",
            ],
        ),
        (faults(pair({"gpu": [0], "relay": {"device": "cpu"}})), []),
        (faults(pair(relayBackend="mooncake", dataPlane={"mooncakeProtocol": "tcp"})), []),
        (
            faults(pair(relayBackend="nixl", dataPlane={"mooncakeProtocol": "tcp"})),
            ["dataPlane.mooncakeProtocol: is of mooncake, and relayBackend is nixl"],
        ),
        (
            faults(
                pair(
                    dataPlane={"mooncakeProtocol": "tcp", "allowTCP": False, "rdma": {"resourceName": "rdma/hca"}},
                )
            ),
            ["dataPlane.mooncakeProtocol: is tcp, and allowTCP is false"],
        ),
    ],
)
def test_nonsense_about_relays_is_refused_with_its_path(found: list[str], expected: list[str]) -> None:
    assert found == expected


def test_shm_between_pods_is_refused_on_a_cluster_and_warned_of_elsewhere() -> None:
    apart = msgspec.convert(pair(relayBackend="shm"), PipelineConfig)
    message = (
        "relayBackend: is shm, which never crosses pods, and on a cluster 'a' and 'b' run in different pods: use auto"
    )
    assert [str(fault) for fault in topology.warnings(topology.check(apart))] == [message]
    with pytest.raises(InvalidPipeline) as refused:
        topology.check_on_cluster(apart)
    assert [str(fault) for fault in refused.value.faults] == [message]
    together = msgspec.convert(pair(relayBackend="shm", fusedStages=[["a", "b"]]), PipelineConfig)
    topology.check_on_cluster(together)
    assert topology.warnings(together) == ()
