"""``omni convert``: any pipeline, printed as the resource that ``kubectl apply`` takes."""

from __future__ import annotations

import click

from omnipipeline_spec import loading, terminal
from omnipipeline_spec.generating import writing
from stage_runtime.cli import options


@click.command("convert")
@click.argument("file")
@click.option("overrides", "--set", multiple=True, metavar="PATH=VALUE", help="Change a value; may be repeated.")
def command(file: str, overrides: tuple[str, ...]) -> None:
    """Print a pipeline as the Kubernetes resource.

    FILE is a resource, a plain YAML, FILE.py[:name] or package.module:name of a Python PipelineConfig.
    """
    with options.errors_as_messages():
        loaded = loading.load(file, overrides=overrides)
        for warning in loaded.dropped:
            terminal.echo(f"warning: {warning}", err=True)
        document = writing.resource(loaded.spec, name=loaded.name, metadata=loaded.metadata)
        terminal.document(writing.to_yaml(document))
