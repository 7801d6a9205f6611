"""``omni call STAGE OPERATION``: an operation of a stage's own engine, on all of its instances."""

from __future__ import annotations

import json
from typing import Any, Final

import click

from stage_runtime.cli.server import server, server_options
from stage_runtime.profiler.formats.table import printable

ANSWER_S: Final = 30.0  # of the coordinator, after the last of the instances


def _object(context: click.Context, parameter: click.Parameter, value: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        given = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"no JSON: {error}") from None
    if not isinstance(given, dict):
        raise click.BadParameter("a JSON object is expected, as in '{\"level\": 1}'")
    return given


@click.command("call")
@click.argument("stage")
@click.argument("operation")
@click.option(
    "--arguments", metavar="JSON", callback=_object, default="{}", help="What the operation takes: a JSON object."
)
@click.option(
    "--timeout", type=click.FloatRange(0, 3600, min_open=True), default=60.0, show_default=True, help="Seconds."
)
@server_options
def command(stage: str, operation: str, arguments: dict[str, Any], timeout: float, **which: Any) -> None:
    """Have every instance of STAGE carry out an OPERATION that its engine offers, and show what each answers.

    The exit code is 1 if any of them failed.
    """
    body = {"operation": operation, "stages": [stage], "arguments": arguments, "timeout_seconds": timeout}
    with server(**which) as asked:
        answer = asked.post("/operations", body, timeout_s=timeout + ANSWER_S)
        for one in answer["results"]:
            name = f"{one['instance']} rank {one['rank']}" if one["rank"] else one["instance"]
            shown = json.dumps(one["value"], ensure_ascii=False) if one["error"] is None else one["error"]
            click.echo(printable(f"{name}: {shown}"), err=one["error"] is not None)
        failed = answer["failed"] > 0
    if failed:
        raise SystemExit(1)
