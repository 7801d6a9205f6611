"""The targets of a result, a chunk, a stream's end: what a hook may answer, checked against the declared graph."""

from __future__ import annotations

from collections.abc import Sequence

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.errors import HookError, RequestError, safe_str
from stage_runtime.rules.flow.gathering import names_of


def route(stage: str, declared: Sequence[str], returned: object) -> tuple[str, ...]:
    """The targets that ``routeFn`` chose among ``next``.

    Raises: HookError: None, empty, no names, or a name outside ``next``.
    """
    names = [returned] if isinstance(returned, str) else names_of(returned)
    if not names:
        raise HookError(
            stage,
            "routeFn",
            f"returned {safe_str(returned, limit=200, how=repr)}; expected one or more of {sorted(declared)}",
        )
    return _among(stage, "routeFn", names, declared, "next")


def stream_targets(
    stage: str, declared: Sequence[str], to: str | list[str] | None, *, terminal: bool = False
) -> tuple[str, ...]:
    """The targets of one chunk: all of ``streamTo`` unless it names some.

    terminal: it may name ``coordinator``, too: the stage's client.
    Raises: HookError: a name outside these.
    """
    if to is None:
        return tuple(declared)
    names = [to] if isinstance(to, str) else names_of(to)
    if not names:
        raise HookError(
            stage, "chunk.to", f"is {safe_str(to, limit=200, how=repr)}; expected one or more of {sorted(declared)}"
        )
    return _among(stage, "chunk.to", names, [*declared, COORDINATOR] if terminal else declared, "streamTo")


def done_targets(stage: str, declared: Sequence[str], returned: object) -> tuple[str, ...]:
    """The stream targets that get the final done signal. None: no target.

    Raises: HookError: no list of names, or a name outside ``streamTo``.
    """
    if returned is None:
        return ()
    names = [returned] if isinstance(returned, str) else names_of(returned)
    if names is None:
        raise HookError(
            stage,
            "streamDoneToFn",
            f"returned {safe_str(returned, limit=200, how=repr)}; expected a list of stage names or None",
        )
    return _among(stage, "streamDoneToFn", names, declared, "streamTo")


def terminals(declared: Sequence[str], returned: object) -> tuple[str, ...]:
    """The terminal stages that a request waits for. None: all of them.

    Raises: RequestError: a string, an empty answer, or a name that is not a terminal stage. Nothing has been sent yet.
    """
    if returned is None:
        return tuple(declared)
    names = None if isinstance(returned, str) else names_of(returned)
    unknown = sorted(set(names or ()) - set(declared))
    if not names or unknown:
        raise RequestError(
            "stage_failed",
            f"terminalStagesFn returned {safe_str(returned, limit=200, how=repr)}; "
            f"wanted some of {sorted(declared)}, as a list",
            hook="terminalStagesFn",
        )
    return tuple(name for name in declared if name in names)


def _among(stage: str, hook: str, names: Sequence[str], declared: Sequence[str], field: str) -> tuple[str, ...]:
    unknown = sorted(set(names) - set(declared))
    if unknown:
        raise HookError(stage, hook, f"names {unknown}, not in {field}; it declares {sorted(declared)}")
    return tuple(dict.fromkeys(names))
