"""``omni validate``: every fault of a pipeline with its path, and an exit code for scripts."""

from __future__ import annotations

import sys

import click
from rich.text import Text

from omnipipeline_spec import consoles, loading, planning, terminal
from omnipipeline_spec.types.errors import InvalidPipeline
from omnipipeline_spec.validation import topology
from stage_runtime.cli import options
from stage_runtime.processes.one_machine.preparing import author_folder, unsupported


@click.command("validate")
@options.pipeline_options
@click.option(
    "--imports", is_flag=True, help="Import factories and hooks too, in a process of its own. Runs their modules."
)
def command(file: str, overrides: tuple[str, ...], imports: bool) -> None:
    """Name every fault of a pipeline. Nothing is started and no cluster is contacted; exit code 1 when there is a
    fault."""
    with options.errors_as_messages():
        try:
            author_folder.check(author_folder.of(file))
            loaded = loading.load(file, overrides=overrides)
            plan = planning.plan(loaded.spec, name=loaded.name)
            if imports:
                _check_imports(file, overrides)
        except InvalidPipeline as invalid:
            _show(invalid, file)
            sys.exit(options.EXIT_FAULT)
        for notice in unsupported.notices(loaded.spec, local=False):
            terminal.echo(f"note: {notice}", err=True)
        for warning in (*loaded.dropped, *topology.warnings(loaded.spec)):
            terminal.echo(f"warning: {warning}", err=True)
        terminal.echo(f"{file}: {plan.pipeline} is valid (revision {plan.current.revision})")


def _check_imports(file: str, overrides: tuple[str, ...]) -> None:
    """Raises: InvalidPipeline: with all functions that cannot be had."""
    from stage_runtime.processes.one_machine.preparing import importing
    from stage_runtime.processes.one_machine.preparing.prepared import Prepared

    found = importing.faults(Prepared(file, overrides=overrides))
    if found:
        raise InvalidPipeline(found, source=file)


def _show(invalid: InvalidPipeline, file: str) -> None:
    console = consoles.console(stderr=True, soft_wrap=True)
    for fault in invalid.faults:
        place = f"{file}:{fault.line}: " if fault.line else f"{file}: "
        path = f"{fault.path}: " if fault.path else ""
        console.print(Text.assemble((place, "dim"), (path, "bold"), fault.message))
    count = len(invalid.faults)
    console.print(Text(f"{count} fault{'' if count == 1 else 's'}", style="bold red"))
