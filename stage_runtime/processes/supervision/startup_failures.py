"""Why a process ended before it was ready: what it reported, else what its exit code and output show.

Here: the exception and how it is made from ended children. Not here: what follows (`instances`). Called by `instances`;
raised to those that start a pipeline.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from stage_runtime.processes.supervision.children import Child, describe_exit


class StartupFailed(Exception):
    """A process ended, or did nothing, before it was ready; starting it again would end the same way."""

    def __init__(
        self,
        process: str,
        problem: str,
        *,
        stage: str = "",
        traceback: str = "",
        tail: Sequence[str] = (),
        reported: bool = False,
        hung: bool = False,
    ) -> None:
        super().__init__(f"{process}: {problem}")
        self.process = process
        self.problem = problem
        self.stage = stage
        self.traceback = traceback  #: The traceback as the child reported it; empty when the problem is enough.
        self.reported = reported  #: Whether the child reported its failure.
        self.tail = tuple(tail)  #: The end of its output, which was shown already.
        self.hung = hung  #: It did nothing until its time was up.

    @property
    def details(self) -> str:
        """The output that led to it: the traceback, else the end of the output."""
        return self.traceback if self.reported else "\n".join(self.tail)

    def with_cure(self, more: str) -> StartupFailed:
        """The same with something added to its problem."""
        problem = f"{self.problem}; {more}"
        return StartupFailed(
            self.process,
            problem,
            stage=self.stage,
            traceback=self.traceback,
            tail=self.tail,
            reported=self.reported,
            hung=self.hung,
        )

    def explanation(self) -> str:
        """All that is known, for a log that shows nothing else."""
        return f"{self}\n{self.details}".rstrip()


def to_blame(dead: Sequence[Child]) -> Child:
    """The one of the processes that ended together that reported a failure."""
    return next((child for child in dead if child.failure is not None), dead[0])


def failure_of(child: Child) -> StartupFailed:
    failure = child.failure
    return StartupFailed(
        child.command.name,
        _problem(child),
        stage=failure.stage if failure is not None else "",
        traceback=failure.traceback if failure is not None else "",
        tail=child.tail,
        reported=failure is not None,
    )


def _problem(child: Child) -> str:
    """The reason why a process ended, in one line.

    The output of a process while it loaded says how far it came. One that served was killed by a signal: its last words
    count if they are of a crash, and it can print nothing about SIGKILL.
    """
    if child.failure is not None:
        return child.failure.error
    code = child.exited.result()
    how = f"ended before its time ({describe_exit(code)})"
    if code == -signal.SIGKILL and child.was_ready:
        return how
    cause = child.crash if code < 0 and child.was_ready else child.cause
    return f"{how}: {cause}" if cause else how
