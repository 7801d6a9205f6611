"""Fan-in: which sources a request needs at a stage, and when all are there. Knows no hooks: the caller runs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stage_runtime.errors import HookError, safe_str


class Gathering:
    """One request's fan-in. Sources come in any order; the active set may be known from the start or later."""

    def __init__(self, stage: str, wait_for: Sequence[str], *, static: bool) -> None:
        self._stage = stage
        self._wait_for = tuple(wait_for)
        self._arrived: dict[str, Any] = {}
        self._skipped: set[str] = set()
        self._active: frozenset[str] | None = frozenset(wait_for) if static else None

    def arrive(self, source: str, payload: Any) -> None:
        """Take a payload.

        Raises: HookError: a second payload of a source, or one of a source outside ``wait_for`` or the resolved set:
            nothing would ever look at it. The request is wrong.
        """
        if source not in self._wait_for:
            raise HookError(self._stage, "waitFor", f"payload from {source!r}, not in {sorted(self._wait_for)}")
        if source in self._arrived:
            raise HookError(self._stage, "waitFor", f"a second payload from {source!r}")
        if self._active is not None and source not in self._active:
            raise self._outside([source])
        self._arrived[source] = payload

    def skip(self, source: str) -> None:
        """``source`` sends no payload of this request.

        Raises: HookError: no other source does, and ``waitForFn`` has not returned the sources.
        """
        self._skipped.add(source)
        if self._arrived:
            self._check_known()

    def lack(self, sources: Iterable[str]) -> None:
        """The request has no instance of these. Nothing has come yet."""
        self._skipped.update(sources)

    @property
    def possible(self) -> bool:
        """Whether it can still be complete: no source that it waits for was skipped; or ``waitForFn`` may still name
        the sources."""
        missing = self._skipped - self._arrived.keys()
        if self._active is not None:
            return not self._active & missing
        return not set(self._wait_for) <= self._arrived.keys() | missing or not missing

    def waits_after(self, source: str) -> bool:
        """Whether more must come once ``source`` has: unknown of a set that is not resolved."""
        return self._active is None or not self._active <= self._arrived.keys() | {source}

    def resolve(self, returned: object) -> None:
        """Take the result of ``waitForFn`` for the last arrival. None: not known yet.

        Raises: HookError: no list of names, empty, or not contained in ``wait_for``; or a source arrived that the
            resolved set leaves out; or still None when all of ``wait_for`` have come: nothing would ask it again.
        """
        if self._active is not None:
            return
        if returned is None:
            self._check_known()
            return
        names = names_of(returned)
        if names is None:
            raise HookError(
                self._stage,
                "waitForFn",
                f"returned {safe_str(returned, limit=200, how=repr)}; expected a list of stage names or None",
            )
        unknown = sorted(set(names) - set(self._wait_for))
        if not names or unknown:
            problem = f"names {unknown}, which it must not" if unknown else "gave an empty list"
            raise HookError(self._stage, "waitForFn", f"{problem}; waitFor is {sorted(self._wait_for)}")
        self._active = frozenset(names)
        outside = sorted(set(self._arrived) - self._active)
        if outside:
            raise self._outside(outside)

    @property
    def resolved(self) -> bool:
        return self._active is not None

    @property
    def complete(self) -> bool:
        return self._active is not None and self._active <= self._arrived.keys()

    def inputs(self) -> dict[str, Any]:
        """The payloads by source, in the order of ``wait_for``, whatever order they came in."""
        return {name: self._arrived[name] for name in self._wait_for if name in self._arrived}

    def take(self) -> dict[str, Any]:
        """The same as `inputs`, which are not held any longer: each may pin a slot of its sender."""
        inputs = self.inputs()
        self._arrived = dict.fromkeys(self._arrived)
        return inputs

    def _check_known(self) -> None:
        if self._active is None and self._arrived.keys() | self._skipped >= set(self._wait_for):
            problem = (
                f"returned None for the last payload: {sorted(self._arrived)} have arrived and no other source sends"
            )
            raise HookError(self._stage, "waitForFn", problem)

    def _outside(self, sources: Sequence[str]) -> HookError:
        return HookError(self._stage, "waitFor", f"payload from {list(sources)}, outside the set that was resolved")


def names_of(returned: object) -> list[str] | None:
    """A hook's answer as a list of names; None when it is not a list (or tuple, or set) of strings."""
    if not isinstance(returned, list | tuple | set | frozenset):
        return None
    names = list(returned)
    return names if all(isinstance(name, str) for name in names) else None
