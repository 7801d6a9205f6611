"""``omni validate``: every fault of a pipeline with its path, and an exit code for scripts."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.text import Text

from omnipipeline_spec import loading, planning
from omnipipeline_spec.errors import InvalidPipeline
from stage_runtime.cli import options


@click.command("validate")
@options.pipeline_options
def command(file: str, overrides: tuple[str, ...]) -> None:
    """Name every fault of a pipeline. Nothing is started and no cluster is asked; exit code 1 when there is a fault."""
    with options.told_plainly():
        try:
            loaded = loading.load(file, overrides=overrides)
            plan = planning.plan(loaded.spec, name=loaded.name)
        except InvalidPipeline as invalid:
            _show(invalid, file)
            sys.exit(options.EXIT_FAULT)
    click.echo(f"{file}: {plan.pipeline} is sound (revision {plan.current.revision})")


def _show(invalid: InvalidPipeline, file: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for fault in invalid.faults:
        place = f"{file}:{fault.line}: " if fault.line else f"{file}: "
        path = f"{fault.path}: " if fault.path else ""
        console.print(Text.assemble((place, "dim"), (path, "bold"), fault.message))
    count = len(invalid.faults)
    console.print(Text(f"{count} fault{'' if count == 1 else 's'}", style="bold red"))
