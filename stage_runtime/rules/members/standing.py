"""Instances whose queue stands: work waits there, and none of it is begun for a while. Pure.

An instance says in its beats what waits and how many steps each stage has taken. One that says nothing more, with
requests bound to it, stands too: its connection lives, and its Python does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

BEATS: Final = 2.0  # times between two beats, in which nothing is heard of what was begun meanwhile


class _Seen(msgspec.Struct):
    """The reports of one instance."""

    beat_at: float
    progress: Mapping[str, int] = {}
    waiting: Mapping[str, int] = {}
    moved_at: dict[str, float] = {}  #: stage -> when it began something last, or had nothing to begin


class Standing:
    """All instances of one coordinator."""

    def __init__(self, stands_s: float) -> None:
        """stands_s: how long nothing is begun at an instance whose queue stands."""
        self._stands_s = stands_s
        self._seen: dict[str, _Seen] = {}

    def beat(self, incarnation: str, waiting: Mapping[str, int], progress: Mapping[str, int], now: float) -> None:
        seen = self._seen.setdefault(incarnation, _Seen(now, moved_at={}))
        for stage, count in waiting.items():
            if not count or stage not in seen.moved_at or progress.get(stage) != seen.progress.get(stage):
                seen.moved_at[stage] = now
        seen.beat_at, seen.waiting, seen.progress = now, waiting, progress

    def leave(self, incarnation: str) -> None:
        self._seen.pop(incarnation, None)

    def stands(self, incarnation: str, bound: int, now: float, *, beat_s: float = 0.0) -> bool:
        """bound: requests that are bound to it. beat_s: the longest time between two of its beats."""
        stands_s = max(self._stands_s, BEATS * beat_s)
        seen = self._seen.get(incarnation)
        if seen is None:
            return False
        if bound and now - seen.beat_at >= stands_s:
            return True
        return any(count and now - seen.moved_at[stage] >= stands_s for stage, count in seen.waiting.items())
