"""The kv edges of a pipeline revision: which prefill stage sends KV blocks to which decode stage. Pure.

No request needs a kv edge: a decode stage without a prefill instance computes the prompt itself. So the rules about
what a request meets and waits for leave these edges and their prefill stages out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from omnipipeline_spec.types.plan import PipelineRevision

Edge: TypeAlias = tuple[str, str, str]  #: source, target, ``normal``, ``stream`` or ``kv``

KV: Final = "kv"


def without(edges: Iterable[Edge]) -> list[Edge]:
    """The edges that carry payloads and streams."""
    return [edge for edge in edges if edge[2] != KV]


def prefills(revision: PipelineRevision) -> dict[str, str]:
    """Prefill stage -> its decode stage."""
    return {source: target for source, target, kind in revision.edges if kind == KV}


def served(revision: PipelineRevision) -> dict[str, str]:
    """stage -> group, of the stages that requests meet."""
    apart = prefills(revision)
    return {stage: group for stage, group in revision.stages.items() if stage not in apart}


def prefills_alone(edges: Iterable[Edge], bindings: Mapping[str, str], incarnation: str) -> bool:
    """Whether a request is bound to the instance as a prefill stage only: it does without, if it must."""
    stages = {stage for stage, bound in bindings.items() if bound == incarnation}
    return bool(stages) and stages <= {source for source, _, kind in edges if kind == KV}
