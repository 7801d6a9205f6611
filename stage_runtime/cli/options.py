"""What several commands share: the options that name a pipeline, and errors told without a traceback.

Called by the commands beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from omnipipeline_spec.errors import SpecError
from stage_runtime.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])

EXIT_FAULT = 1  # the pipeline, or what it names, has to change


def pipeline_options(function: Function) -> Function:
    """``-f FILE`` and ``--set path=value``."""
    function = click.option(
        "overrides", "--set", multiple=True, metavar="PATH=VALUE", help="Change a value of the spec; may be repeated."
    )(function)
    return click.option(
        "file",
        "-f",
        "--file",
        required=True,
        metavar="FILE",
        help="A resource, a plain YAML, FILE.py[:name] or package.module:name.",
    )(function)


@contextmanager
def told_plainly() -> Iterator[None]:
    """A user's fault ends the command with its message alone."""
    try:
        yield
    except (SpecError, ConfigurationError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAULT)
