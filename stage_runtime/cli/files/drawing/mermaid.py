"""The picture of a plan as a mermaid flowchart, for places that draw it themselves (GitHub, GitLab).

Called by `cli.files.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable

from omnipipeline_spec.types.plan import EdgePlan, GroupPlan, PipelinePlan, UnitPlan


def render(plan: PipelinePlan) -> str:
    """The flowchart's text, ending in a newline."""
    ids = {stage: f"s{number}" for number, stage in enumerate(plan.current.stages)}
    lines = ["flowchart LR", "  request([request])", "  answer([answer])"]
    for number, unit in enumerate(plan.units):
        lines += _unit(unit, number, plan.replicas[unit.name], ids)
    lines.append(f"  request --> {ids[plan.current.entry]}")
    lines += [_edge(edge, ids) for edge in plan.edges]
    lines += [f"  {ids[stage]} --> answer" for stage in plan.current.terminals]
    return "\n".join(lines) + "\n"


def _unit(unit: UnitPlan, number: int, replicas: int, ids: dict[str, str]) -> Iterable[str]:
    times = f" x{replicas}" if replicas > 1 else ""
    gpus = f", GPU {', '.join(map(str, unit.gpu_ids))}" if unit.gpu_ids else ""
    yield f'  subgraph u{number}["pod {_said(unit.name)}{times}{gpus}"]'
    for group in unit.groups:
        yield from _group(group, f"u{number}g{group.index}", ids)
    yield "  end"


def _group(group: GroupPlan, name: str, ids: dict[str, str]) -> Iterable[str]:
    ranks = f", {group.tp_size} ranks" if group.tp_size > 1 else ""
    yield f'    subgraph {name}["process {_said(group.name)}{ranks}"]'
    for stage in group.stages:
        yield f'      {ids[stage]}["{_said(stage)}"]'
    yield "    end"


def _edge(edge: EdgePlan, ids: dict[str, str]) -> str:
    arrow = {"stream": "-.->", "kv": "==>"}.get(edge.kind, "-->")
    relay = edge.relay.replace("_", " ")
    label = {"stream": f"stream, {relay}", "kv": f"KV, {relay}"}.get(edge.kind, relay)
    return f'  {ids[edge.source]} {arrow}|"{label}"| {ids[edge.target]}'


def _said(text: str) -> str:
    return text.replace('"', "#quot;")
