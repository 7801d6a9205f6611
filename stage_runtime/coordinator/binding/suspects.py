"""Requests that were under way at an instance when it ended: which instances they are at now, and which ends them.

The rules are `rules.requests.suspicion`'s. Called by `live_requests` and `waiting`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.rules.requests import suspicion
from stage_runtime.rules.requests.suspicion import COMMON_CAUSE_S, Blame

log = logging.getLogger(__name__)

#: Seconds after a stage has reported that it has no connection to an instance: by then a death is declared, or the
#: stage has connected again, which it does 1.5 s after the connection broke
#: (`stage.control.stage_membership.MEET_AGAIN_S`).
UNREACHABLE_S: Final = 2.0
NAMED_MOST: Final = 10  # requests in a log line


class _Record(msgspec.Struct):
    """The suspicion against one request."""

    deaths: dict[str, list[str]] = {}  #: stage -> its instances that ended while the request was under way there
    began_at: float = 0.0  #: Its attempt.
    cleared_after_s: float = 0.0  #: See `suspicion.cleared_after_s`.


class Suspects:
    """Those of one coordinator."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._records: dict[RequestHandle, _Record] = {}  #: Live requests that an instance has ended under.
        self._died_at = -math.inf  #: When an instance ended last.

    def died(self, incarnation: str, handles: Collection[RequestHandle]) -> dict[RequestHandle, tuple[str, Blame]]:
        """An instance has ended, with these requests under way. Returns: for each the stage that it was there for, and
        what that means."""
        now = self._loop.time()
        if now - self._died_at < COMMON_CAUSE_S and not self._records.keys() & set(handles):
            self._records.clear()  # it ends for the same reason as the one a moment ago: no request's
            self._died_at = now
            return {one: (_stage_at(one, incarnation), Blame.NONE) for one in handles}
        self._died_at = now
        stages = {one: _stage_at(one, incarnation) for one in sorted(handles, key=lambda one: one.admitted_at)}
        uncleared = {handle for handle in handles if self._deaths(handle, stages[handle]) and not self._cleared(handle)}
        found = {}
        for handle, stage in stages.items():
            others = len(uncleared - {handle})
            found[handle] = stage, suspicion.blame(self._deaths(handle, stage), other_suspects=others)
        for handle, (stage, blame) in found.items():
            ended = self._note(handle, stage, incarnation)
            if blame is Blame.ITS_OWN:
                log.error(
                    "request %s was under way at each of these instances of %r when it ended: %s; it is not sent again",
                    handle.id,
                    stage,
                    ", ".join(ended),
                )
        if handles:
            named = ", ".join(handle.id for handle in list(handles)[:NAMED_MOST])
            more = f" and {len(handles) - NAMED_MOST} more" if len(handles) > NAMED_MOST else ""
            log.warning("%s has ended with these requests under way: %s%s", incarnation, named, more)
        return found

    def lives(self, incarnation: str) -> None:
        """An instance that was thought to have ended was cut off only."""
        for handle, record in list(self._records.items()):
            record.deaths = {
                stage: left
                for stage, ended in record.deaths.items()
                if (left := [one for one in ended if one != incarnation])
            }
            if not record.deaths:
                del self._records[handle]

    def not_reached(self, handle: RequestHandle, incarnation: str) -> bool:
        """A stage has no connection to an instance that the request is bound to. True: it is a suspect, so its attempt
        is not given up before it is known whether that instance has ended."""
        stage = next((stage for stage, bound in handle.bindings.items() if bound == incarnation), None)
        if stage is not None:
            handle.unreached[incarnation] = stage
        handle.unreachable[incarnation] = self._loop.time() + UNREACHABLE_S
        return handle in self._records

    def died_unreached(self, incarnation: str, handles: Iterable[RequestHandle]) -> None:
        """An instance has ended, which a stage may not have reached for some of these before that was known."""
        for handle in handles:
            stage = handle.unreached.pop(incarnation, None)
            if stage is not None and incarnation not in handle.bindings.values():
                self._note(handle, stage, incarnation)

    def began(self, handle: RequestHandle) -> None:
        """A new attempt of it is under way."""
        record = self._records.get(handle)
        if record is not None:
            record.began_at = self._loop.time()

    def forget(self, handle: RequestHandle) -> bool:
        """It is over. False: nothing was held against it."""
        return self._records.pop(handle, None) is not None

    def taken(self, handle: RequestHandle) -> frozenset[str]:
        """The instances at which as many other suspects of the same stage are as may be at once."""
        record = self._records.get(handle)
        if record is None:
            return frozenset()
        found = set[str]()
        for stage in record.deaths:
            there = Counter(one.bindings[stage] for one in self._at_large(stage) if one is not handle)
            of_stage = [len(one.deaths[stage]) for one in self._records.values() if stage in one.deaths]
            most = suspicion.at_once(len(of_stage), unclear=max(of_stage) > 1)
            found.update(instance for instance, count in there.items() if count >= most)
        return frozenset(found)

    @property
    def instances(self) -> set[str]:
        """The instances at which one is: new requests keep away from them where there are others."""
        stages = {stage for record in self._records.values() for stage in record.deaths}
        return {one.bindings[stage] for stage in stages for one in self._at_large(stage)}

    # --- inside -------------------------------------------------------------------------------------------------

    def _at_large(self, stage: str) -> Iterable[RequestHandle]:
        """Suspects of this stage that are at one of its instances and were not cleared."""
        return (
            one
            for one, record in self._records.items()
            if stage in record.deaths and stage in one.bindings and not self._cleared(one)
        )

    def _deaths(self, handle: RequestHandle, stage: str) -> int:
        record = self._records.get(handle)
        return 0 if record is None else len(record.deaths.get(stage, ()))

    def _cleared(self, handle: RequestHandle) -> bool:
        """It has streamed, or runs for longer than before."""
        record = self._records[handle]
        return handle.tracked.streamed or self._loop.time() - record.began_at > record.cleared_after_s

    def _note(self, handle: RequestHandle, stage: str, incarnation: str) -> list[str]:
        now = self._loop.time()
        record = self._records.setdefault(handle, _Record(deaths={}, began_at=handle.attempt_began_at))
        ended = record.deaths.setdefault(stage, [])
        ended.append(incarnation)
        record.cleared_after_s = suspicion.cleared_after_s(now - record.began_at)
        return ended


def _stage_at(handle: RequestHandle, incarnation: str) -> str:
    return next(stage for stage, bound in handle.bindings.items() if bound == incarnation)
