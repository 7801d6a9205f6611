"""``omni call STAGE OPERATION``: an operation of a stage's own engine, on all of its instances."""

from __future__ import annotations

from typing import Any

import click

from omnipipeline_spec import operations, terminal
from stage_runtime.cli import options
from stage_runtime.cli.running.server import server, server_options


@click.command("call")
@click.argument("stage")
@click.argument("operation")
@click.option("--arguments", metavar="JSON", default="{}", help="What the operation takes: a JSON object.")
@click.option(
    "--timeout",
    type=options.Finite(0, operations.MAX_TIMEOUT_S, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds.",
)
@server_options
def command(stage: str, operation: str, arguments: str, timeout: float, **which: Any) -> None:
    """Have every instance of STAGE carry out an OPERATION that its engine offers, and show what each answers.

    The exit code is 1 if any of them failed.
    """
    try:
        body = operations.body(stage, operation, operations.arguments(arguments), timeout_s=timeout)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arguments") from None
    with server(**which) as client:
        answer = client.post(operations.ROUTE, body, timeout_s=timeout + operations.ANSWER_S)
        lines = list(operations.lines(answer))
        for line in lines:
            terminal.echo(line.text, err=line.failed)
    if any(line.failed for line in lines):
        raise SystemExit(1)
