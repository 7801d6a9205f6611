"""Errors of the contract, and the faults they carry.

Here: `Fault` (one problem of a pipeline and its path) and the exceptions. Not here: what counts as a fault (`shapes`
for form, `topology` for meaning). Every reader of a spec catches `SpecError`.

    SpecError                 the author's file has to change
    ├── UnreadableSpec        it cannot be read: no such file, invalid YAML, no pipeline in the module
    └── InvalidPipeline       it was read and is invalid; carries all its faults
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

SHOWN: Final = 1000  # characters of a message: it may quote a value of megabytes
QUOTED_BITS: Final = 256  # of an integer that is written out


def clipped(text: str, *, most: int = SHOWN) -> str:
    """``text`` without its middle if it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2) :]}"


def printable(text: str) -> str:
    """``text`` without control characters: a terminal obeys some of them, and anybody may have written them."""
    return _OBEYED.sub("�", text)


#: Control characters, line breaks of Unicode, marks that turn the direction of a text, halves of surrogate pairs.
_OBEYED: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def quoted(value: Any) -> str:
    """A value in a message. Its ``__repr__`` may raise; Python refuses to write thousands of digits."""
    if isinstance(value, int) and value.bit_length() > QUOTED_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        return clipped(repr(value))
    except Exception:  # an author's class may raise anything
        return f"a {type(value).__name__}"


class Fault(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One problem of a pipeline, with its path in the resource's spelling."""

    path: str  #: Such as ``stages[2].next``; empty for the whole spec.
    message: str
    names: tuple[str, ...] = ()  #: The stages, groups or keys involved, for tools that point at them.
    line: int | None = None  #: The line in the file that was read, when there is one.

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "path", clipped(self.path))
        msgspec.structs.force_setattr(self, "message", clipped(self.message))

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.path else self.message
        return f"line {self.line}: {text}" if self.line else text


class SpecError(Exception):
    """The author's file has to change before anything can run."""


class UnreadableSpec(SpecError):
    """The source contains no spec; the message names the file and, when known, the line."""

    def __init__(self, message: str) -> None:
        super().__init__(clipped(message))


class InvalidPipeline(SpecError):
    """The spec was read and is invalid."""

    def __init__(self, faults: Iterable[Fault], *, source: str | None = None) -> None:
        self.faults = tuple(faults)
        self.source = source
        super().__init__(self._text())

    def _text(self) -> str:
        count = len(self.faults)
        head = f"{self.source or 'the pipeline'} has {count} fault{'' if count == 1 else 's'}:"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])
