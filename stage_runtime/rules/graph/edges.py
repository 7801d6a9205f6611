"""A hash of the edges that a process declares, so that a request is bound only to instances with the same graph.

A process sends it in its Hello, from its own plan; the coordinator computes it from the graph of a pipeline revision.
It covers both ends of each edge, and the coordinator's edges to the entry and from the terminal stages. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import TypeAlias

import msgspec

from omnipipeline_spec.types.plan import PipelineRevision, StagePlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.rules.graph.kvpairs import KV
from stage_runtime.wire.frames import PROTOCOL

EdgeKey: TypeAlias = tuple[str, str, str]  #: source, target, ``normal``, ``stream`` or ``kv``


def of_process(stages: Collection[StagePlan]) -> str:
    """The schema that these stages' plans declare, all of one process."""
    edges: set[EdgeKey] = set()
    for stage in stages:
        edges.update((stage.name, target, "normal") for target in stage.next)
        edges.update((stage.name, target, "stream") for target in stage.stream_to)
        edges.update((source, stage.name, "normal") for source in stage.inputs_from)
        edges.update((source, stage.name, "stream") for source in stage.stream_from)
        if stage.kv_role == "prefill":
            edges.add((stage.name, stage.kv_peer, KV))
        elif stage.kv_role == "decode":
            edges.add((stage.kv_peer, stage.name, KV))
        if stage.entry:
            edges.add((COORDINATOR, stage.name, "normal"))
        if stage.terminal:
            edges.add((stage.name, COORDINATOR, "normal"))
    return _schema((stage.name for stage in stages), edges)


def of_revision(revision: PipelineRevision) -> dict[str, str]:
    """group -> the schema that its process must declare to serve ``revision``."""
    ends: list[EdgeKey] = [
        *revision.edges,
        (COORDINATOR, revision.entry, "normal"),
        *((stage, COORDINATOR, "normal") for stage in revision.terminals),
    ]
    return {group: _of_group(revision, group, ends) for group in revision.groups}


def _of_group(revision: PipelineRevision, group: str, edges: Iterable[EdgeKey]) -> str:
    stages = {stage for stage, its_group in revision.stages.items() if its_group == group}
    return _schema(stages, {edge for edge in edges if edge[0] in stages or edge[1] in stages})


def _schema(stages: Iterable[str], edges: Collection[EdgeKey]) -> str:
    """Prefixed with the protocol version: a process of another version is rejected whatever its edges are."""
    encoded = msgspec.msgpack.encode([sorted(stages), sorted(edges)])
    return f"{PROTOCOL}:{hashlib.blake2b(encoded, digest_size=8).hexdigest()}"
