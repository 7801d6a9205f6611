"""``omni restart GROUP``: new processes for a process group of a running `omni up`."""

from __future__ import annotations

import click

from omnipipeline_spec import terminal
from stage_runtime.cli import options
from stage_runtime.cli.running import runs
from stage_runtime.processes.one_machine import admin


@click.command("restart")
@click.argument("group")
@runs.run_options
def command(group: str, pipeline: str | None, pid: int | None, base_path: str | None) -> None:
    """Replace every instance of a process group of a running `omni up` by a new one, one after another.

    A new instance is ready on CPU before the old one finishes what is bound to it and goes: no request is lost.
    A GPU has no room for both; the old one goes first.
    """
    with options.errors_as_messages():
        runs.order(admin.Restart(group=group), pipeline=pipeline, pid=pid, base_path=base_path)
        terminal.echo(f"{group}: restarted")
