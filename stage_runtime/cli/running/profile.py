"""``omni profile``: record where requests spend their time, and show it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click

from omnipipeline_spec import terminal
from stage_runtime.cli import options
from stage_runtime.cli.running.server import CoordinatorClient, server, server_options
from stage_runtime.errors import ConfigurationError, naming

FORMATS: Final = ("table", "json", "html", "perfetto", "tar")


@click.group("profile")
def command() -> None:
    """Record where requests spend their time: start, stop, report; or run, which does all three."""


@command.command("start")
@click.option("--run", "run_id", metavar="NAME", help="Name of the run. Default: derived from the time.")
@click.option("--torch", is_flag=True, help="A trace of torch's operations, too.")
@click.option("--max-seconds", type=click.IntRange(1), help="End the run after so many seconds, if it was not stopped.")
@server_options
def start(run_id: str | None, torch: bool, max_seconds: int | None, **which: Any) -> None:
    """Begin to record events on every process of the pipeline."""
    with server(**which) as client:
        answer = client.post("/start_profile", _start_body(run_id, torch, max_seconds))
        _show_states(answer)
        terminal.echo(f"recording {answer['run_id']}; `omni profile stop` ends it")


@command.command("stop")
@click.option("--run", "run_id", metavar="NAME", help="Which run; without it: the one that is recorded.")
@server_options
def stop(run_id: str | None, **which: Any) -> None:
    """End a run."""
    with server(**which) as client:
        answer = client.post("/stop_profile", {"run_id": run_id})
        _show_states(answer)
        terminal.echo(f"{answer['run_id'] or 'nothing'} was recorded")


@command.command("list")
@server_options
def list_(**which: Any) -> None:
    """Show the runs, newest first."""
    with server(**which) as client:
        for run in client.json("/profiles")["runs"]:
            begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["started_at"]))
            terminal.echo(f"{run['run_id']}  {begun}  {'recording' if run['recording'] else 'stopped'}")


@command.command("report")
@click.option("--run", "run_id", metavar="NAME", help="Which run; without it: the newest.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write there.")
@server_options
def report(run_id: str | None, form: str, out: Path | None, **which: Any) -> None:
    """Show a run: as a table, a page for the browser (html), a trace for ui.perfetto.dev, or all its files (tar)."""
    _check_out(out)
    with server(**which) as client:
        _report(client, run_id, form, out)


@command.command("run")
@click.option("--seconds", type=options.SECONDS, default=20.0, show_default=True, help="How long.")
@click.option("--torch", is_flag=True, help="A trace of torch's operations, too.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write there.")
@server_options
def run(seconds: float, torch: bool, form: str, out: Path | None, **which: Any) -> None:
    """Record for a while, then show the report."""
    _check_out(out)
    with server(**which) as client:
        answer = client.post("/start_profile", _start_body(None, torch, None))
        try:
            _show_states(answer)
            time.sleep(seconds)
        finally:  # ^C ends the run early, and shows what there is
            client.post("/stop_profile", {"run_id": answer["run_id"]})
        _report(client, answer["run_id"], form, out)


def _check_out(out: Path | None) -> None:
    """Called before anything is recorded. Raises: click.BadParameter: the folder of ``out`` does not exist."""
    if out is not None and not out.parent.is_dir():
        raise click.BadParameter(f"{out.parent} is not a folder", param_hint="--out")


def _start_body(run_id: str | None, torch: bool, max_seconds: int | None) -> dict[str, Any]:
    return {"run_id": run_id, "enable_torch": torch, "max_seconds": max_seconds}


def _show_states(answer: dict[str, Any]) -> None:
    """Name the stages that failed."""
    for each in answer["stages"]:
        if each["error"] is not None:
            terminal.echo(f"{each['stage']} ({each['instance']}): {each['state']}: {each['error']}", err=True)


def _report(client: CoordinatorClient, run_id: str | None, form: str, out: Path | None) -> None:
    if run_id is None:
        known = client.json("/profiles")["runs"]
        if not known:
            raise ConfigurationError("no profile has been taken: omni profile start")
        run_id = known[0]["run_id"]
    path = f"/profiles/{quote(run_id, safe='', errors='replace')}"
    content = client.get(path if form == "tar" else f"{path}/report?format={form}")
    if out is None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    with naming(out):
        out.write_bytes(content)
    terminal.echo(f"{out}: {len(content)} bytes")
