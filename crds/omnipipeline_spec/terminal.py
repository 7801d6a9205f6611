"""How both command lines write lines on a terminal, of any encoding.

Here: lines for people, documents for programs, and standard streams that take any text. Not here: tables and colours
(`consoles`). Called by ``omni`` and ``kubectl omni``. Loads nothing but click.
"""

from __future__ import annotations

import codecs
import io
import sys
from typing import Final

import click

from omnipipeline_spec.types.errors import printable

#: Replacements for the characters of drawings, for a terminal that takes no more than ASCII.
_PLAIN: Final = {"─": "-", "│": "|", "█": "#", "░": ".", "▪": "*", "→": ">", "⇢": ">", "…": ".", "├": "|", "└": "`"}


def echo(text: str, *, err: bool = False) -> None:
    """Print lines for people, without control characters."""
    click.echo(plain(text), err=err)


def document(text: str) -> None:
    """Print a text for programs as it is: JSON, YAML, a drawing."""
    click.echo(text, nl=not text.endswith("\n"))


def plain(text: str) -> str:
    """A text of several lines without control characters."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def accept_any_text() -> None:
    """Let the standard streams take any text: what their encoding lacks is written in ASCII."""
    codecs.register_error("omni-plain", _plainly)
    for stream in (sys.stdout, sys.stderr):
        # Python's streams of the C locale take halves of surrogate pairs and refuse all other letters.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="omni-plain")


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """A handler of `codecs`: what an encoding lacks is written in ASCII."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(each, "?") for each in error.object[error.start : error.end]), error.end
