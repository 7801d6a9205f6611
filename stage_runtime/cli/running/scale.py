"""``omni scale GROUP N``: more or fewer replicas of a process group of a running `omni up`."""

from __future__ import annotations

import click

from omnipipeline_spec import terminal
from stage_runtime.cli import options
from stage_runtime.cli.running import runs
from stage_runtime.processes.one_machine import admin


@click.command("scale")
@click.argument("group")
@click.argument("replicas", type=click.IntRange(0, 1000))
@runs.run_options
def command(group: str, replicas: int, pipeline: str | None, pid: int | None, base_path: str | None) -> None:
    """Change the replicas of a process group of a running `omni up`, without losing a request.

    Returns when new instances are ready, or old ones have finished what was bound to them.
    """
    with options.errors_as_messages():
        runs.order(admin.Scale(group=group, replicas=replicas), pipeline=pipeline, pid=pid, base_path=base_path)
        terminal.echo(f"{group}: {replicas} replica{'' if replicas == 1 else 's'}")
