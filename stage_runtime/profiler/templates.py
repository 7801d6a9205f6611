"""Events whose metadata are known before, but for two numbers. Noted by hot paths, made into lines by the writer.

A note is a tuple: no mapping is made in the thread that notes it. Used by `recorder`, and by who makes templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

KEPT: Final = 256  # encoded metadata of one template, by its numbers

_encode = msgspec.json.Encoder().encode


class Template:
    """Events of one stage that happen at the same moment.

    events: the name and the metadata of each; each also gets ``attempt``. number: the name of a further number that
    is noted each time, in the metadata of the last event.
    """

    __slots__ = ("_events", "_known", "_number", "stage")

    def __init__(self, stage: str, *events: tuple[str, Mapping[str, Any]], number: str | None = None) -> None:
        self.stage: Final = stage
        self._events = events
        self._number = number
        self._known: dict[tuple[int, int], Sequence[tuple[str, msgspec.Raw]]] = {}

    def __len__(self) -> int:
        """How many events."""
        return len(self._events)

    def with_numbers(self, attempt: int, number: int) -> Sequence[tuple[str, msgspec.Raw]]:
        """The name and the metadata, as JSON, of each event. Of the writer's thread."""
        return self._known.get((attempt, number)) or self._make(attempt, number)

    def _make(self, attempt: int, number: int) -> Sequence[tuple[str, msgspec.Raw]]:
        given = [{**metadata, "attempt": attempt} for _, metadata in self._events]
        if self._number is not None:
            given[-1][self._number] = number
        names = (name for name, _ in self._events)
        made = tuple(zip(names, (msgspec.Raw(_encode(metadata)) for metadata in given), strict=True))
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[attempt, number] = made
        return made


#: template, request id, nanoseconds since the epoch, attempt, number
Note = tuple[Template, str, int, int, int]
