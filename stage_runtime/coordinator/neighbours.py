"""Sends instances the endpoints of those that they share requests with, and reports departures to them.

Here: which messages follow from a binding, a departure, or what an instance says of others. Not here: who knows whom
(`rules.members.introductions`), who is a member (`membership`). This runs on the I/O thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules.binding.membership_state import MembershipState
from stage_runtime.rules.flow.watched_time import LATE_S
from stage_runtime.rules.members.introductions import Introductions
from stage_runtime.wire.messages import Members, Message
from stage_runtime.wire.parts import Member

TICK_S: Final = 0.01  # departures within it are sent together


class Neighbours:
    """The pairs of instances that one coordinator has introduced."""

    def __init__(
        self,
        state: MembershipState,
        send: Callable[[str, Message], bool],
        loop: asyncio.AbstractEventLoop,
        *,
        fenced: Collection[str],
        registered_by_s: float,
    ) -> None:
        """fenced: incarnations that were declared dead; others add to them and remove. registered_by_s: by then an
        instance that another one names has registered here, if it lives.
        """
        self._state = state
        self._send = send
        self._loop = loop
        self._fenced = fenced
        self._registered_by_s = registered_by_s
        self._introductions = Introductions()
        self._gone: dict[str, list[str]] = {}  #: A member to notify -> members that are gone; sent after `TICK_S`.

    def introduce(self, revision: PipelineRevision, bindings: Mapping[str, str]) -> tuple[Member, ...]:
        """A request is bound: its instances are introduced to each other, where they were not yet.

        Returns: what the request itself brings along, because it may arrive before that.
        """
        news = self._introductions.bind(revision.edges, bindings, time.monotonic())
        for incarnation, others in news.introduced.items():
            self._send(incarnation, Members(joined=self._members(others)))
        return self._members(news.along)

    def peer_unreachable(self, sender: str, peer: str) -> None:
        """Two instances have no connection; at a limit, one of them has forgotten the other's endpoint."""
        self._introductions.lost(sender, peer)
        if sender in self._state.instances:
            self._watch_for(sender, [peer])

    def adopt(self, sender: str, message: Members) -> None:
        """An instance knows these from a coordinator that is gone: their departure is for this one to report."""
        if sender not in self._state.instances:
            return
        for member in message.joined:
            if member.incarnation in self._state.instances:
                self._introductions.adopt(sender, member.incarnation)
        self._watch_for(sender, [one.incarnation for one in message.joined])

    def leave(self, incarnation: str) -> None:
        """It is not a member any more: it is sent nothing, and the members that know it get a message."""
        self._gone.pop(incarnation, None)
        self._note_gone(incarnation)

    def send_gone(self) -> None:
        """One message for each that knew them, however many have left within a tick."""
        gone, self._gone = self._gone, {}
        for incarnation, others in gone.items():
            self._send(incarnation, Members(gone=tuple(others)))

    def _note_gone(self, incarnation: str) -> None:
        """Sent with what else happens within a tick."""
        for other in self._introductions.leave(incarnation):
            if not self._gone:
                self._loop.call_later(TICK_S, self.send_gone)
            self._gone.setdefault(other, []).append(incarnation)

    def _watch_for(self, sender: str, peers: Iterable[str]) -> None:
        """Report those that are not members to ``sender``: at once where they were declared dead here, else if they
        have not registered by then (`MembershipTimes`).
        """
        unknown = [one for one in peers if one not in self._state.instances]
        gone = tuple(one for one in unknown if one in self._fenced)
        if gone:
            self._send(sender, Members(gone=gone))
        later = [one for one in unknown if one not in self._fenced]
        for one in later:
            self._introductions.adopt(sender, one)
        if later:
            self._report_later(later)

    def _report_later(self, peers: Sequence[str], again: bool = True) -> None:
        due = self._loop.time() + self._registered_by_s
        self._loop.call_at(due, self._report_unknown, peers, due, again)

    def _report_unknown(self, peers: Sequence[str], due: float, again: bool) -> None:
        """again: a coordinator that was stopped meanwhile has not read their messages yet, and waits once more."""
        if again and self._loop.time() > due + LATE_S:
            self._report_later(peers, again=False)
            return
        for peer in peers:
            if peer not in self._state.instances:
                self._note_gone(peer)

    def _members(self, incarnations: Iterable[str]) -> tuple[Member, ...]:
        instances = self._state.instances
        return tuple(instances[one].member for one in incarnations if one in instances)
