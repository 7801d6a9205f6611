"""Draws a plan as tables and faults as lines. Pure. Called by the commands."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from omnipipeline_spec import scaling
from omnipipeline_spec.types.errors import Fault
from omnipipeline_spec.types.plan import PipelinePlan, UnitPlan
from omnipipeline_spec.types.pods import COORDINATOR


def plan(plan: PipelinePlan, *, coordinators: int) -> Group:
    """The units with their processes and stages, then the edges between stages. ``coordinators``: how many."""
    units = Table(title=f"{plan.pipeline}: pods of revision {plan.current.revision}", title_justify="left", box=None)
    for column in ("UNIT", "REVISION", "REPLICAS", "GPUS", "PROCESSES", "STAGES"):
        units.add_column(column)
    for unit in plan.units:
        units.add_row(
            unit.name,
            unit.revision,
            scaling.shown(plan, unit.name),
            _gpus(unit),
            ", ".join(process for group in unit.groups for process in group.processes),
            ", ".join(stage.name for stage in unit.stages),
        )
    units.add_row(COORDINATOR, plan.coordinator.revision, str(coordinators), "-", COORDINATOR, "")
    edges = Table(title="edges", title_justify="left", box=None)
    for column in ("FROM", "TO", "KIND", "PLACE", "RELAY"):
        edges.add_column(column)
    for edge in plan.edges:
        edges.add_row(edge.source, edge.target, edge.kind, edge.transport.replace("_", " "), edge.relay)
    return Group(units, Text(), edges) if plan.edges else Group(units)


def fault(fault: Fault, source: str) -> Text:
    """``file:line: path: message``, as compilers print it."""
    place = f"{source}:{fault.line}: " if fault.line else f"{source}: "
    return Text.assemble((place, "dim"), (f"{fault.path}: " if fault.path else "", "bold"), fault.message)


def _gpus(unit: UnitPlan) -> str:
    """The number of GPUs of a pod, and the author's ids of them."""
    if not unit.gpu_ids:
        return "-"
    return f"{len(unit.gpu_ids)} ({', '.join(map(str, unit.gpu_ids))})"
