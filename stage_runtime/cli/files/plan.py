"""``omni plan``: what a pipeline becomes, before anything of it exists.

Here: the table, and choosing a form. Not here: pictures (`drawing`), the plan itself (the contract).
"""

from __future__ import annotations

import click
import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from omnipipeline_spec import consoles, loading, planning, scaling, terminal
from omnipipeline_spec.types.plan import EdgePlan, GroupPlan, PipelinePlan, UnitPlan
from omnipipeline_spec.validation import topology
from stage_runtime.cli import options
from stage_runtime.cli.files.drawing import mermaid, svg
from stage_runtime.processes.one_machine.preparing import unsupported

TRANSPORTS = {"in_process": "same process", "same_pod": "same pod", "network": "between pods"}
WIDTH_WITHOUT_TERMINAL = 160  # a file has no edge; 80 columns would cut names


@click.command("plan")
@options.pipeline_options
@click.option("--cpu", is_flag=True, help="As `omni up --cpu` would run it.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "mermaid", "svg", "json"]),
    default="table",
    show_default=True,
    help="svg is a picture for a file; json is the whole plan.",
)
@click.option(
    "--explain",
    is_flag=False,
    flag_value="",
    metavar="[PATH]",
    help="Instead, print each value of the spec with its source: the file and line, a default, --set. "
    "PATH, as in --set, names some.",
)
def command(file: str, overrides: tuple[str, ...], cpu: bool, output: str, explain: str | None) -> None:
    """Show process groups, pods, GPUs and the transport of each edge. Nothing is started and no cluster is
    contacted."""
    with options.errors_as_messages():
        loaded = loading.load(file, overrides=overrides)
        plan = planning.plan(loaded.spec, name=loaded.name)
        if cpu:
            plan = planning.without_gpus(plan)
        for notice in unsupported.notices(loaded.spec, local=False):
            terminal.echo(f"note: {notice}", err=True)
        for warning in (*loaded.dropped, *topology.sure_warnings(loaded.spec)):
            terminal.echo(f"warning: {warning}", err=True)
        if explain is not None:
            for each in loading.explain(loaded, explain or None):
                terminal.echo(f"{each.path} = {msgspec.json.encode(each.value).decode()}  # {each.source}")
            return
        match output:
            case "json":
                terminal.document(msgspec.json.format(msgspec.json.encode(plan)).decode())
            case "svg":
                terminal.document(svg.render(plan))
            case "mermaid":
                terminal.document(mermaid.render(plan))
            case _:
                consoles.console(width_elsewhere=WIDTH_WITHOUT_TERMINAL).print(tables(plan))


def tables(plan: PipelinePlan) -> Group:
    """Processes, then edges, under one line about the whole."""
    current = plan.current
    head = Text.assemble(
        (plan.pipeline, "bold"),
        f"  revision {current.revision}  entry {current.entry}  terminal {', '.join(current.terminals)}",
        f"  serves {', '.join((*plan.coordinator.serves, '/v1/pipeline'))}",
    )
    notes = [Text(note, style="dim") for note in _notes(plan)]
    return Group(head, "", _processes(plan), "", _edges(plan), *notes)


def _processes(plan: PipelinePlan) -> Table:
    drawn = _table("POD", "PROCESS", "STAGES", "GPUS", "REPLICAS")
    for unit in plan.units:
        for group in unit.groups:
            first = group.index == 0
            drawn.add_row(
                Text(unit.name if first else "", style="bold"),
                "\n".join(group.processes),
                ", ".join(group.stages),
                _gpus(unit, group),
                scaling.shown(plan, unit.name) if first else "",
            )
    return drawn


def _gpus(unit: UnitPlan, group: GroupPlan) -> str:
    """The author's ids; on the line of each rank that rank's own."""
    stages = [stage for stage in unit.stages if stage.name in group.stages and stage.gpus]
    if group.tp_size > 1:
        return "\n".join(str(unit.gpu_ids[position]) for stage in stages for position in stage.gpus)
    return ", ".join(map(str, sorted({unit.gpu_ids[position] for stage in stages for position in stage.gpus})))


def _edges(plan: PipelinePlan) -> Table:
    device_of = {stage.name: stage.relay.device for unit in plan.units for stage in unit.stages}
    drawn = _table("FROM", "TO", "KIND", "TRANSPORT", "RELAY", "MEDIUM", "ARRIVES ON")
    for edge in plan.edges:
        device = device_of.get(edge.target, "cpu")
        drawn.add_row(edge.source, edge.target, edge.kind, TRANSPORTS[edge.transport], *_relay(edge), device)
    return drawn


def _notes(plan: PipelinePlan) -> list[str]:
    """Notes on the words of the edges, and where `omni up` uses something else."""
    between = [edge for edge in plan.edges if edge.transport == "network"]
    notes = []
    if between and plan.coordinator.relay_backend == "auto":
        relays = " and ".join(sorted({edge.relay for edge in between}))
        notes.append(
            f"between pods: each POD is a pod of a cluster, and {relays} is for there. `omni up` runs all of them on "
            "this machine and uses shm, or cuda_ipc where both ends have one GPU."
        )
    if any(edge.medium == "tcp+curve" for edge in plan.edges):
        notes.append("tcp+curve: TCP, encrypted with the key that the operator gives every pipeline.")
    return ["", *notes] if notes else []


def _relay(edge: EdgePlan) -> tuple[str, str]:
    return ("by reference", "") if edge.relay == "in_process" else (edge.relay, edge.medium)


def _table(*headings: str) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        drawn.add_column(heading)
    return drawn
