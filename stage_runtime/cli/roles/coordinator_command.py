"""``omni coordinator``: the coordinator in the foreground; docs/cli.md lists the variables it reads."""

from __future__ import annotations

import os
import sys

import click

from omnipipeline_spec.types.pods import COORDINATOR


@click.command(COORDINATOR)
def command() -> None:
    """Run the coordinator in the foreground, with the settings of its environment.

    This process becomes `python -m stage_runtime coordinator`, the way supervisors start it.
    """
    os.execv(sys.executable, [sys.executable, "-P", "-m", "stage_runtime", COORDINATOR])
