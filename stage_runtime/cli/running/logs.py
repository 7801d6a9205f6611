"""``omni logs``: what the processes of a running `omni up` have written."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import click

from omnipipeline_spec import terminal
from stage_runtime.cli import options
from stage_runtime.cli.running import runs
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine.kept_output import Reader

LOOK_S: Final = 0.2  # between two looks at a file that is followed
Lines = Iterable[tuple[str, str]]


@click.command("logs")
@click.argument("processes", nargs=-1, metavar="[PROCESS]...")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends.")
@click.option(
    "--tail", type=click.IntRange(0), metavar="N", help="Begin N lines before the end. Default: all that is kept."
)
@runs.run_options
def command(processes: tuple[str, ...], follow: bool, tail: int | None, **which: Any) -> None:
    """Show what the processes of a running `omni up` have written: the last 8 to 16 MiB.

    PROCESS is a process (`voice.1`) or a process group; the coordinator is one.
    """
    with options.errors_as_messages():
        reader = Reader(runs.find(**which))
        written: set[str] = set()
        try:
            _show(_meant(reader.all(), processes, written), tail)
            _check(processes, written, follow)
            while follow:
                time.sleep(LOOK_S)
                _show(_meant(reader.new(), processes, written), None)
        except FileNotFoundError:
            if not follow:
                raise ConfigurationError("the run has ended") from None
        finally:
            reader.close()


def _meant(lines: Lines, processes: tuple[str, ...], written: set[str]) -> Iterator[tuple[str, str]]:
    """written: gets the names of all processes and groups that have lines."""
    for process, line in lines:
        names = {process, process.partition(".")[0]}
        written |= names
        if not processes or not names.isdisjoint(processes):
            yield process, line


def _check(processes: tuple[str, ...], written: set[str], follow: bool) -> None:
    """Raises: ConfigurationError: a name without a line. Only a note is shown where it may still get some."""
    unknown = sorted(set(processes) - written)
    if not unknown:
        return
    problem = f"nothing is kept of {', '.join(unknown)}; these have written: {', '.join(sorted(written))}"
    if not follow:
        raise ConfigurationError(problem)
    terminal.echo(f"note: {problem}", err=True)


def _show(lines: Lines, tail: int | None) -> None:
    for process, line in lines if tail is None else deque(lines, min(tail, sys.maxsize)):
        terminal.echo(f"{process} | {line}")
