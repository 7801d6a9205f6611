"""``omni stage``: one process of a process group in the foreground; docs/cli.md lists the variables it reads."""

from __future__ import annotations

import os
import sys

import click


@click.command("stage")
def command() -> None:
    """Run one process of a process group in the foreground, with the settings of its environment.

    This process becomes `python -m stage_runtime stage`, the way supervisors start it.
    """
    os.execv(sys.executable, [sys.executable, "-P", "-m", "stage_runtime", "stage"])
