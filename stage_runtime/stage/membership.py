"""A process's registration at coordinators and its connections to neighbours.

On the I/O thread. Called by `host`, which looks a message's handler up in `StageMembership.handlers`. Finding the
coordinators is `registration`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.rules import forwarding
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.stage.registration import Registration
from stage_runtime.wire.messages import (
    Deregister,
    ForwardAbort,
    ForwardAbortReply,
    Member,
    Members,
    Message,
    PeerUnreachable,
    Ready,
    Welcome,
)

log = logging.getLogger(__name__)

MEET_AGAIN_S: Final = 1.5  # after a connection broke; by then the coordinator has given up what was under way


class StageMembership:
    """The members that one process knows, and what it has announced."""

    registration: Registration  #: Of this incarnation.

    def __init__(self, plans: Iterable[StagePlan], process: ProcessContext, loop: asyncio.AbstractEventLoop) -> None:
        plans = tuple(plans)
        self.members: dict[str, Member] = {}  #: Instances of neighbour stages that coordinators named, by incarnation.
        self._process = process
        self._loop = loop
        self._ready = False  #: All engines are loaded. Outlives the incarnations.
        self._leaving: str | None = None  #: Why it drains: no coordinator may bind anything new to it.
        self._neighbours = {
            name for plan in plans for name in (*plan.next, *plan.stream_to, *plan.stream_from, *plan.inputs_from)
        } - {plan.name for plan in plans}
        self.handlers: Mapping[type, Callable[[str, Any], None]] = {
            Members: self._members,
            ForwardAbort: self._forward_abort,
            ForwardAbortReply: self._forward_abort_reply,
        }

    def wire(self, registration: Registration) -> None:
        """The process has its ends of the planes."""
        self.registration = registration

    def reset(self) -> None:
        """The process takes a new incarnation: forget all members. `wire` must follow."""
        self.members.clear()

    # --- what is announced --------------------------------------------------------------------------------------

    def broadcast(self, message: Message) -> None:
        """Send it to every coordinator."""
        for coordinator in self.registration.coordinators:
            self._process.send(coordinator, message)

    def announce_ready(self) -> None:
        self._ready = True
        if self._leaving is None:
            self.broadcast(Ready())

    def deregister(self, reason: str) -> None:
        """Bind nothing new to us.

        Coordinators that come later, or know only a later incarnation of ours, are notified when they send Welcome.
        """
        self._leaving = reason
        self.broadcast(Deregister(reason))

    # --- who is there -------------------------------------------------------------------------------------------

    def welcome(self, sender: str, message: Welcome) -> None:
        """A coordinator has welcomed this process; its link is open."""
        self.registration.welcomed_again(sender, message)
        self._process.relays.open(sender, message.coordinator.relays)
        self._meet(message.members)
        if self._leaving is not None:
            self._process.send(sender, Deregister(self._leaving))
        elif self._ready:
            self._process.send(sender, Ready())

    def lost(self, peer: str) -> bool:
        """A peer cannot be reached any more. True when it was a coordinator."""
        if peer in self.members:  # only our connection to it broke: the coordinator reports when it is gone
            self.broadcast(PeerUnreachable(peer))
            # Until then it may still look at what we sent: its slots must not be written again.
            self._process.send_queues.cut(peer)
            self._loop.call_later(MEET_AGAIN_S, self._meet_again, peer)
            return False
        self._process.send_queues.forget(peer)
        return self.registration.lost(peer)

    def _members(self, sender: str, message: Members) -> None:
        self._meet(message.joined)
        for peer in message.gone:
            if self.members.pop(peer, None) is not None:
                self._process.channels.drop(peer)
                self._process.send_queues.forget(peer)

    def _meet(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.incarnation == self._process.incarnation or not self._neighbours.intersection(member.stages):
                continue
            self.members[member.incarnation] = member
            self._process.channels.connect(member.incarnation, member.endpoint)
            self._process.relays.open(member.incarnation, member.relays)

    def _meet_again(self, peer: str) -> None:
        member = self.members.get(peer)
        if member is not None and self._process.channels.link(peer) is None:
            self._process.send_queues.forget(peer)
            self._meet([member])

    # --- between coordinators -----------------------------------------------------------------------------------

    def _forward_abort(self, sender: str, message: ForwardAbort) -> None:
        """A coordinator received an abort of a request that another one owns: forward it to all others."""
        owners = forwarding.owners(message.asker, self.registration.coordinators)
        for owner in owners:
            self._process.send(owner, message)
        if not owners:
            self._process.send(sender, ForwardAbortReply(message.request_id, message.asker, False))

    def _forward_abort_reply(self, sender: str, message: ForwardAbortReply) -> None:
        owners = len(forwarding.owners(message.asker, self.registration.coordinators))
        reply = ForwardAbortReply(message.request_id, message.asker, message.aborted, owners)
        self._process.send(message.asker, reply)
