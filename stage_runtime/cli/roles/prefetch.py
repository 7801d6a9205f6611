"""``omni prefetch``: a model of an object store into a folder; what the prefetch Job of a cluster runs, too."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import click

from omnipipeline_spec import terminal
from omnipipeline_spec.types import quantities
from stage_runtime import settings
from stage_runtime.cli import options
from stage_runtime.errors import ConfigurationError


@click.command("prefetch")
@click.argument("url", envvar="OMNI_MODEL_PATH")
@click.option("--folder", type=click.Path(path_type=Path), help="Of all fetched models; stages look into the same one.")
@click.option(
    "--quick", is_flag=True, help="Hash only files whose size or time differs; do without the store if whole."
)
@click.option("--bound", help="Of all models in the folder, such as 200Gi: those not used lately are deleted for URL.")
def command(url: str, folder: Path | None, quick: bool, bound: str | None) -> None:
    """Fetch the model below URL (s3://BUCKET/PREFIX) into a folder, or check the one that is there.

    A file that was fetched before is not fetched again, a damaged file is. Credentials and the endpoint are in the
    variables of AWS' tools (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...). FOLDER is OMNI_MODELS_DIR by default, else
    ~/.cache/omnipipeline/models.
    """
    from stage_runtime.processes.containers import fetching, termination
    from stage_runtime.weights import folders
    from stage_runtime.weights.cache import Fetch
    from stage_runtime.weights.progress import Progress
    from stage_runtime.weights.source import Interrupted, Source

    # Bytes that have come are on the disk. PID 1 of a container ignores a SIGTERM that it does not handle: the kubelet,
    # and the drain of a node with it, would wait for the whole grace period.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    began = time.monotonic()
    log = settings.termination_log(os.environ)
    try:
        root = folder or folders.root(os.environ)
        limit = _limit(bound)
        progress = Progress(terminal.echo)
        with fetching.serving(lambda: (progress.report.bytes_done, progress.report.bytes_total), os.environ):
            fetch = Fetch(Source(url, os.environ), root, progress, say=terminal.echo, bound=limit)
            done = fetch.ensure(thorough=not quick)
    except (ConfigurationError, Interrupted, OSError) as error:
        termination.write(log, f"cannot fetch {url}: {error}")
        terminal.echo(f"cannot fetch {url}: {error}", err=True)
        sys.exit(options.EXIT_FAULT)
    terminal.echo(f"{url} is whole in {done} ({time.monotonic() - began:.1f} s)")


def _limit(bound: str | None) -> int | None:
    """Raises: ConfigurationError: it is not a quantity of bytes."""
    try:
        return quantities.parse_bytes(bound) if bound else None
    except ValueError as error:
        raise ConfigurationError(f"--bound: {error}") from error
