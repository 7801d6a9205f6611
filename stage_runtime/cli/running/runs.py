"""Finding the `omni up` that a command is meant for, and sending it.

Called by `scale`, `restart` and `profile`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine import admin
from stage_runtime.processes.starting import rundir

Function = TypeVar("Function", bound=Callable[..., Any])


def run_options(function: Function) -> Function:
    """Options that select a run, when there are several."""
    function = click.option("--base-path", metavar="FOLDER", help="The spec's endpoints.basePath, if it has one.")(
        function
    )
    function = click.option("--pid", type=int, help="Process id of the `omni up`, when one name runs several times.")(
        function
    )
    return click.option("--pipeline", metavar="NAME", help="The pipeline; needed when several run here.")(function)


def order(what: admin.Scale | admin.Restart, *, pipeline: str | None, pid: int | None, base_path: str | None) -> None:
    """Give the order to the one run that is meant.

    Raises: ConfigurationError: none or several are meant, or it was refused.
    """
    asyncio.run(admin.send(find(pipeline=pipeline, pid=pid, base_path=base_path), what))


def url(*, pipeline: str | None, pid: int | None, base_path: str | None) -> tuple[str, Path | None]:
    """The address where the one run that is meant serves HTTP, and the certificate that it shows, if it has one.

    Raises: ConfigurationError: none or several are meant, or it is starting.
    """
    _, facts = _meant(pipeline=pipeline, pid=pid, base_path=base_path)
    if "url" not in facts:
        name = f"{facts.get('pipeline')} (pid {facts.get('pid')})"
        raise ConfigurationError(f"{name} is starting and takes no requests yet: `omni logs` shows what it does")
    return str(facts["url"]), Path(facts["certificate"]) if "certificate" in facts else None


def find(*, pipeline: str | None, pid: int | None, base_path: str | None) -> Path:
    """Folder of the one run that is meant. Raises: ConfigurationError: none or several are meant."""
    return _meant(pipeline=pipeline, pid=pid, base_path=base_path)[0]


def _meant(*, pipeline: str | None, pid: int | None, base_path: str | None) -> tuple[Path, dict[str, Any]]:
    runs = list(rundir.running(base_path))
    meant = [
        (folder, facts)
        for folder, facts in runs
        if pipeline in (None, facts.get("pipeline")) and pid in (None, facts.get("pid"))
    ]
    if len(meant) == 1:
        return meant[0]
    there = ", ".join(f"{facts.get('pipeline')} (pid {facts.get('pid')})" for _, facts in runs) or "none"
    asked = "".join(
        f"--{name} {value}: " for name, value in (("pipeline", pipeline), ("pid", pid)) if value is not None
    )
    same_name = len({facts.get("pipeline") for _, facts in meant}) == 1
    problem = f"several `omni up` run here, select one with {'--pid' if same_name else '--pipeline'}"
    raise ConfigurationError(f"{asked}{problem if meant else 'no such `omni up` runs here'}; running: {there}")
