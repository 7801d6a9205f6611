"""The command ``omni``: what people type.

Here: the list of commands. Not here: what they do; each has a module of its own and is imported when it is
called, so that ``omni --help`` loads nothing. Called by the script ``omni`` and by ``python -m stage_runtime``.
"""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Any

import click

from omnipipeline_spec import terminal

#: command -> (module, its one line in --help). Order is the order of a first day with it.
COMMANDS = {
    "init": ("stage_runtime.cli.files.init", "Write a new pipeline to edit."),
    "up": ("stage_runtime.cli.serving.up", "Run a pipeline on this machine."),
    "plan": ("stage_runtime.cli.files.plan", "Show processes, pods, GPUs and the transport of each edge."),
    "validate": ("stage_runtime.cli.files.validate", "Name every fault of a pipeline."),
    "convert": ("stage_runtime.cli.files.convert", "Print a pipeline as the Kubernetes resource."),
    "prefetch": (
        "stage_runtime.cli.roles.prefetch",
        "Fetch a model of an object store, or check the one that is there.",
    ),
    "scale": ("stage_runtime.cli.running.scale", "Change the replicas of a group of a running `omni up`."),
    "restart": ("stage_runtime.cli.running.restart", "Replace the processes of a group of a running `omni up`."),
    "logs": ("stage_runtime.cli.running.logs", "Show what the processes of a running `omni up` have written."),
    "profile": ("stage_runtime.cli.running.profile", "Record where requests spend their time, and show it."),
    "call": ("stage_runtime.cli.running.call", "Have a stage's engine carry out an operation of its own."),
    "trace": ("stage_runtime.cli.running.trace", "Draw where the time of one request went."),
    "bench": ("stage_runtime.cli.running.bench", "Measure how long the answers of a running pipeline take."),
    "top": ("stage_runtime.cli.running.top", "Show the graph of a running pipeline with its queues and rates."),
    "stage": (
        "stage_runtime.cli.roles.stage_command",
        "Run one process of a process group, with its environment's settings.",
    ),
    "coordinator": (
        "stage_runtime.cli.roles.coordinator_command",
        "Run the coordinator's process, with its environment's settings.",
    ),
}


def _installs(error: ModuleNotFoundError) -> str:
    """The line for a package that is not installed. A module that an author's code lacks never comes here: who imports
    that code reports it."""
    return f"the package of the module {error.name!r} is not installed: pip install 'omnipipeline[runtime]'"


class _Commands(click.Group):
    """Finds a command's module when it is named."""

    def main(self, *args: Any, **more: Any) -> Any:
        # Nothing is to be tidied up until a command begins (`options.errors_as_messages`): ^C ends us as it ends
        # `cat`, not with a traceback from the middle of an import.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        terminal.accept_any_text()
        try:
            return super().main(*args, **more)
        except ModuleNotFoundError as error:
            terminal.echo(f"error: {_installs(error)}", err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="omnipipeline", prog_name="omni")
def main() -> None:
    """Pipelines of model stages: one YAML, on a laptop and on Kubernetes."""
