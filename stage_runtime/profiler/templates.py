"""Events whose metadata are known before, but for two numbers. Noted by hot paths, made into lines by the writer.

A note is a tuple: no mapping is made in the thread that notes it. Used by `recorder`, and by who makes templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

_encode = msgspec.json.Encoder().encode


class Template:
    """Events of one stage that happen at the same moment.

    events: the name and the metadata of each; each also gets ``attempt``. number: the name of a further number that
    is noted each time, in the metadata of the last event.
    """

    __slots__ = ("_lines", "_number", "stage")

    def __init__(self, stage: str, *events: tuple[str, Mapping[str, Any]], number: str | None = None) -> None:
        self.stage: Final = stage
        #: The name of each event, and its metadata as JSON up to the value of ``attempt``.
        self._lines = tuple((name, _encode({**metadata, "attempt": 0})[:-2]) for name, metadata in events)
        self._number = None if number is None else b"," + _encode(number) + b":"

    def __len__(self) -> int:
        """How many events."""
        return len(self._lines)

    def with_numbers(self, attempt: int, number: int) -> list[tuple[str, msgspec.Raw]]:
        """The name and the metadata, as JSON, of each event. Attempts have new numbers: none is kept."""
        end = b"%d}" % attempt
        made = [(name, msgspec.Raw(metadata + end)) for name, metadata in self._lines]
        if self._number is not None:
            name, metadata = self._lines[-1]
            made[-1] = name, msgspec.Raw(b"%b%d%b%d}" % (metadata, attempt, self._number, number))
        return made


#: template, request id, nanoseconds since the epoch, attempt, number
Note = tuple[Template, str, int, int, int]
