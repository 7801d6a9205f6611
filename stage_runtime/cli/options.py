"""Parts that several commands share: the options that name a pipeline, and errors printed without a traceback.

Called by the commands beside it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import click

from omnipipeline_spec import terminal
from omnipipeline_spec.types.errors import SpecError
from stage_runtime.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])

EXIT_FAULT = 1  # the pipeline, or what it names, has to change
EXIT_INTERRUPTED = 130  # by ^C before it was done, as shells have it


class Finite(click.FloatRange):
    """A range of finite numbers: click compares nan with its bounds, and none of them excludes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found} is not a finite number", param, ctx)
        return found


SECONDS = Finite(0.1, 1e9)  # a command waits thirty years at most; the system takes ten times as many


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


def need(*modules: str) -> None:
    """Raises: ModuleNotFoundError: one of them is not installed, before another process meets that."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """A user's fault, and what the operating system refuses, ends the command with its message alone."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # from here on there may be something to tidy up
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except (SpecError, ConfigurationError) as error:
        _fail(str(error))
    except BrokenPipeError:  # `| head` has what it wanted
        _leave_output_alone()
        sys.exit(EXIT_FAULT)
    except OSError as error:
        _fail(_refused(error))
    except KeyboardInterrupt:
        terminal.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _refused(error: OSError) -> str:
    """The refusal of the operating system, with the file that it was about."""
    if error.filename is None and isinstance(error, FileNotFoundError) and _working_directory_is_gone():
        return "the working directory is gone"
    return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror or str(error)


def _working_directory_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _fail(problem: str) -> None:
    with suppress(OSError):  # standard error may be gone as well
        terminal.echo(f"error: {problem}", err=True)
    _leave_output_alone()
    sys.exit(EXIT_FAULT)


def _leave_output_alone() -> None:
    """Output that could not be written is not tried again when the interpreter ends: it would print a traceback."""
    if sys.stdout is None:  # closed before the program began
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
