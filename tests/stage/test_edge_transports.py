"""The relay and the medium of each edge of a process: counted from its plans and the peers that it knows."""

from __future__ import annotations

from omnipipeline_spec.types.plan import RelayPlan, StagePlan
from stage_runtime.stage.outputs import edge_transports

TO = {("b1", "auto"): ("shm", "memory"), ("b2", "auto"): ("tcp", "tcp+curve"), ("c1", "nixl"): ("nixl", "tcp")}


def transport(peer: str, backend: str) -> tuple[str, str]:
    return TO.get((peer, backend), ("refused", "none"))


def test_every_edge_is_counted_by_the_transport_to_each_instance_of_its_target() -> None:
    plans = [
        StagePlan(name="a", group="g", factory="m:a", next=("b", "d"), stream_to=("b",)),
        StagePlan(name="d", group="g", factory="m:d", next=("c",), relay=RelayPlan(backend="nixl")),
        StagePlan(name="e", group="g", factory="m:e", terminal=True),
    ]
    peers = {"b1": ("b", "x"), "b2": ("b",), "b3": ("b",), "c1": ("c",), "u1": ("upstream",)}
    assert edge_transports.count(plans, peers, ["k"], transport) == {
        ("a", "b", "shm", "memory"): 1,
        ("a", "b", "tcp", "tcp+curve"): 1,
        ("a", "b", "refused", "none"): 1,
        ("a", "d", "in_process", "reference"): 1,
        ("d", "c", "nixl", "tcp"): 1,
        ("e", "coordinator", "refused", "none"): 1,
    }


def test_a_process_that_knows_nobody_has_its_own_edges_alone() -> None:
    plan = StagePlan(name="a", group="g", factory="m:a", next=("b",))
    assert edge_transports.count([plan], {}, [], transport) == {}
