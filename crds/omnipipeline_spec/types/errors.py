"""The errors of the contract, and the fault they carry.

Here: `Fault`, one thing that is wrong with a pipeline and where, and the small tree that is raised. Not here: what
counts as a fault (`shapes` for form, `topology` for meaning). Every reader of a spec catches `SpecError`.

    SpecError                 the author's file has to change
    ├── UnreadableSpec        it cannot be read at all: no such file, no YAML, no pipeline in the module
    └── InvalidPipeline       it was read, and these are all its faults
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Fault(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One thing that is wrong, with its place in the resource's own spelling."""

    path: str  #: Such as ``stages[2].next``; empty when the whole spec is meant.
    message: str
    names: tuple[str, ...] = ()  #: The stages, groups or keys involved, for tools that point at them.
    line: int | None = None  #: In the file that was read, when there is one.

    def __str__(self) -> str:
        told = f"{self.path}: {self.message}" if self.path else self.message
        return f"line {self.line}: {told}" if self.line else told


class SpecError(Exception):
    """The author's file has to change before anything can run."""


class UnreadableSpec(SpecError):
    """There is no spec in what was given; the message names the file and, when known, the line."""


class InvalidPipeline(SpecError):
    """The spec was read and is not sound."""

    def __init__(self, faults: Iterable[Fault], *, source: str | None = None) -> None:
        self.faults = tuple(faults)
        self.source = source
        super().__init__(self._text())

    def _text(self) -> str:
        count = len(self.faults)
        head = f"{self.source or 'the pipeline'} has {count} fault{'' if count == 1 else 's'}:"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])
