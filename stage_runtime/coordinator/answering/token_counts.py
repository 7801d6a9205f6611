"""Tokens of one answer, so far and in all: stages report `Usage`, and their chunks carry counts until then. Pure."""

from __future__ import annotations

import operator
from typing import Any, Final, TypeAlias

import msgspec

from stage_runtime.coordinator.events import AnswerEvent, ChunkEvent, TokenUsage
from stage_runtime.wire.outputs import USAGE_SO_FAR
from stage_runtime.wire.values import Usage

#: Counts in the order of the fields of `Usage`; chunks carry the first three.
Counts: TypeAlias = tuple[int, ...]
_CARRIED: Final = 3
_NONE: Final[Counts] = (0,) * len(Usage.__struct_fields__)


class TokenCounts:
    """Takes a request's events in order. Nothing in them is trusted: an author may write the same metadata."""

    def __init__(self) -> None:
        self._carried: dict[str, list[int]] = {}  #: The last `_CARRIED` counts that a chunk has carried, by stage.
        self._reported: dict[str, Counts] = {}  #: The sum of what each stage has reported.

    def take(self, event: AnswerEvent) -> None:
        """`note`, and `add` for each value."""
        self.note(event)
        for value in event.data if type(event.data) is list else (event.data,):
            if type(value) is Usage:
                self.add(event.stage, value)

    def shown(self) -> TokenUsage | None:
        """None: no stage has said anything."""
        if not self._carried and not self._reported:
            return None
        total = self.total
        return TokenUsage(
            prompt_tokens=total.prompt_tokens,
            completion_tokens=total.completion_tokens,
            cached_tokens=total.cached_tokens,
        )

    def note(self, event: AnswerEvent) -> None:
        """Notes the counts that a chunk's metadata carry. Its values are counted by `add`."""
        if isinstance(event, ChunkEvent) and event.metadata and USAGE_SO_FAR in event.metadata:
            carried = event.metadata[USAGE_SO_FAR]
            if _are_counts(carried):
                self._carried[event.stage] = carried

    def add(self, stage: str, usage: Usage) -> None:
        before = self._reported.get(stage, _NONE)
        self._reported[stage] = tuple(map(operator.add, before, msgspec.structs.astuple(usage)))

    @property
    def total(self) -> Usage:
        """The counts of all stages. A stage's report counts once it is not behind what its chunks have carried."""
        stages = self._carried.keys() | self._reported.keys()
        none = list(_NONE[:_CARRIED])
        both = [((*self._carried.get(one, none), *_NONE[_CARRIED:]), self._reported.get(one, _NONE)) for one in stages]
        most = [tuple(map(max, *pair)) for pair in both]
        return Usage(*(sum(counts) for counts in zip(*most, strict=True))) if most else Usage()


def _are_counts(value: Any) -> bool:
    if type(value) is not list or len(value) != _CARRIED:
        return False
    prompt, completion, cached = value  # one by one: it is asked for each token
    is_whole = type(prompt) is type(completion) is type(cached) is int
    return is_whole and prompt >= 0 and completion >= 0 and cached >= 0
