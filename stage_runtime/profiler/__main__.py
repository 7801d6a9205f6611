"""``python -m stage_runtime.profiler DIR``: the report of a run's event files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from stage_runtime.errors import ConfigurationError
from stage_runtime.profiler import event_files, views
from stage_runtime.profiler.formats import html, perfetto, table


@click.command(name="python -m stage_runtime.profiler")
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--format", "form", type=click.Choice(["table", "json", "html", "perfetto"]), default="table")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write there instead of to the terminal.")
def main(folder: Path, form: str, out: Path | None) -> None:
    """Show where the time of recorded requests went. FOLDER holds the event files, in subfolders too."""
    try:
        found = event_files.read(folder)
        if out is None:
            write(found, form, sys.stdout.buffer)
            return
        with out.open("wb") as file:
            write(found, form, file)
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{out or 'standard output'}: {error.strerror or error}") from error


def write(found: event_files.Events, form: str, file: BinaryIO) -> None:
    """Write the run's events in one of the formats."""
    match form:
        case "json":
            file.write(msgspec.json.encode(views.report_of(found)) + b"\n")
        case "html":
            file.write(html.page(found).encode())
        case "perfetto":
            perfetto.write(found, file)
        case _:
            file.write(table.text(views.report_of(found, timeline=False)).encode())


if __name__ == "__main__":
    main()
