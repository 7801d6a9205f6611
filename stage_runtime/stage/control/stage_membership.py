"""A process's registration at coordinators and its connections to neighbours.

It runs on the I/O thread. Called by `host`, which looks a message's handler up in `StageMembership.handlers`. Finding
the coordinators is `registration`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.errors import LimitReached
from stage_runtime.rules.members.adapters import AdapterRecord
from stage_runtime.rules.requests import forwarding
from stage_runtime.sockets.endpoints import limits
from stage_runtime.stage.control.registration import Registration
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.wire.messages import (
    AdminCall,
    Deregister,
    Detour,
    ForwardAbort,
    ForwardAbortReply,
    Members,
    Message,
    PeerUnreachable,
    Ready,
    Rejected,
    Welcome,
)
from stage_runtime.wire.parts import Member

log = logging.getLogger(__name__)

GONE_KEPT: Final = 1000  # a request may name one that has just left
MEET_AGAIN_S: Final = 1.5  # after a connection broke; by then the coordinator has given up what was under way


def pair_of(plan: StagePlan) -> tuple[str, ...]:
    """The other stage of a pair: both send to each other, asks and blocks."""
    return (plan.kv_peer,) if plan.kv_role else ()


class StageMembership:
    """The members that one process knows, and what it has announced."""

    registration: Registration  #: The registration of this incarnation.

    def __init__(self, plans: Iterable[StagePlan], process: ProcessContext, loop: asyncio.AbstractEventLoop) -> None:
        plans = tuple(plans)
        self.members: dict[str, Member] = {}  #: Instances that share requests with this one, by incarnation.
        #: The coordinators that have introduced a member and not reported that it is gone. The keys are those of
        #: ``members``.
        self._introducers: dict[str, set[str]] = {}
        #: Members that one coordinator alone had introduced when it was lost, and none since -> that coordinator.
        self._left: dict[str, str] = {}
        #: (coordinator, member): what is gone as that coordinator sees it, the oldest first. Another one may still bind
        #: requests to it: a coordinator may have lost its own connection alone.
        self._gone: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._process = process
        self._loop = loop
        self._adapters = AdapterRecord()  #: Outlives the incarnations, as the engines do.
        self._ready = False  #: All engines are loaded. Outlives the incarnations.
        self._limited = False  #: The refusal of a link at a limit was logged.
        self._leaving: str | None = None  #: Why it drains: no coordinator may bind anything new to it.
        #: The edges over which this process sends: source stage, target stage, the relay that the plan asks for.
        self._edges = [
            (plan.name, target, plan.relay.backend)
            for plan in plans
            for target in (*plan.next, *plan.stream_to, *pair_of(plan))
        ]
        self._neighbours = {
            name
            for plan in plans
            for name in (*plan.next, *plan.stream_to, *plan.stream_from, *plan.inputs_from, *pair_of(plan))
        } - {plan.name for plan in plans}
        self.on_gone: Callable[[str, str], None] = lambda peer, reason: None  #: An instance is gone or cut off; why.
        self.handlers: Mapping[type, Callable[[str, Any], None]] = {
            Members: self._members,
            ForwardAbort: self._forward_abort,
            ForwardAbortReply: self._forward_abort_reply,
            Detour: lambda _, message: self._process.channels.detoured(message.frame),
        }

    def wire(self, registration: Registration) -> None:
        """The process has its ends of the planes."""
        self.registration = registration
        self._process.channels.detours = lambda: registration.coordinators

    def reset(self) -> None:
        """The process takes a new incarnation: forget all members. `wire` must follow."""
        self.members.clear()
        self._introducers.clear()
        self._left.clear()
        self._gone.clear()

    # --- what is announced --------------------------------------------------------------------------------------

    def broadcast(self, message: Message) -> None:
        """Send it to every coordinator."""
        for coordinator in self.registration.coordinators:
            self._process.send(coordinator, message)

    def hint(self, message: Message) -> None:
        """Send it to every coordinator; it may be lost."""
        for coordinator in self.registration.coordinators:
            self._process.channels.hint(coordinator, message)

    def announce_ready(self) -> None:
        self._ready = True
        if self._leaving is None:
            self.broadcast(Ready(self._adapters.report()))

    def carried_out(self, call: AdminCall) -> None:
        """An engine has carried out an operation: coordinators learn of it if it concerns adapters."""
        if self._adapters.done(call.stage, call.operation, call.arguments) and self._ready and self._leaving is None:
            self.broadcast(Ready(self._adapters.report()))

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
        self.registration.ask_beats(sender, message.beat_s)
        if self._leaving is not None:
            self._process.send(sender, Deregister(self._leaving))
        elif self._ready:
            self._process.send(sender, Ready(self._adapters.report()))
        if message.coordinator.attempts_over:
            # It has ended what was bound to both, and sent the other end our departure, or has lost that end, too.
            for peer in [peer for peer, lost in self._left.items() if lost == sender]:
                self._forget(peer)
        self._pass_on()

    def lost(self, peer: str) -> bool:
        """A peer cannot be reached any more. True when it was a coordinator."""
        if peer in self.members:  # only our connection to it broke: the coordinator reports when it is gone
            self.broadcast(PeerUnreachable(peer))
            # It may still read what we sent until then: its slots must not be written again.
            self._process.send_queues.cut(peer)
            self.on_gone(peer, "the connection to it broke")
            self._loop.call_later(MEET_AGAIN_S, self._meet_again, peer)
            return False
        self._process.send_queues.forget(peer)
        if not self.registration.lost(peer):
            return False
        for member, introducers in self._introducers.items():
            if introducers == {peer}:
                self._left[member] = peer
            introducers.discard(peer)
        self._pass_on()
        return True

    def must_be_renewed(self, sender: str, message: Rejected) -> bool:
        """A coordinator has declared this process dead: whether it must take a new incarnation.

        Not where another coordinator holds it, whose requests would be lost: it drops those of ``sender`` and registers
        there again. But a Hello is refused only where another process has taken its place.
        """
        return bool(message.via) or not self.registration.coordinators.keys() - {sender}

    def _members(self, sender: str, message: Members) -> None:
        for member in message.joined:
            self._gone.pop((sender, member.incarnation), None)  # it is back
        self.meet(message.joined, by=sender)
        if message.beat_s is not None:
            self.registration.ask_beats(sender, message.beat_s)
        for peer in message.gone:
            self._gone[sender, peer] = None
            if len(self._gone) > GONE_KEPT:
                self._gone.popitem(last=False)
            introducers = self._introducers.get(peer)
            if introducers is not None:
                introducers.discard(sender)
                if not introducers:
                    self._forget(peer)

    def meet(self, members: Sequence[Member], *, by: str) -> None:
        """Requests of the coordinator ``by`` are bound to these and this process: connect to those that are new and
        neighbours.
        """
        for member in members:
            peer = member.incarnation
            if peer == self._process.incarnation or (by, peer) in self._gone:
                continue
            if peer in self.members:
                self._introducers[peer].add(by)
                self._left.pop(peer, None)
            elif self._neighbours.intersection(member.stages):
                self.members[peer] = member
                self._introducers[peer] = {by}
                self._connect(member)

    def introduced(self, sender: str, members: Sequence[Member], *, by: str) -> bool:
        """A request of the coordinator ``by`` came from a process without a link, and brings these. True: the sender
        has a link now.
        """
        known = sender in self.members
        self.meet(members, by=by)
        return not known and sender in self.members and self._process.channels.link(sender) is not None

    def _pass_on(self) -> None:
        """Send a coordinator the members whose introducers are all gone: no other would report their departure.

        They are kept until it does: the next request that is bound to both needs no new link.
        """
        coordinator = next(iter(self.registration.coordinators), None)
        orphans = [peer for peer, introducers in self._introducers.items() if not introducers]
        if coordinator is None or not orphans:
            return  # they go to the next coordinator that welcomes us
        for peer in orphans:
            self._introducers[peer].add(coordinator)
        members = (msgspec.structs.replace(self.members[peer], relays={}, stages=()) for peer in orphans)
        self._process.send(coordinator, Members(joined=tuple(members)))

    def _forget(self, peer: str) -> None:
        """No coordinator binds a request to it and this process any more."""
        del self.members[peer]
        del self._introducers[peer]
        self._left.pop(peer, None)
        self._process.channels.drop(peer)
        self._process.send_queues.forget(peer)
        self.on_gone(peer, "it is gone")

    def _connect(self, member: Member, *, asleep: bool = False) -> None:
        peer = member.incarnation
        edges = [edge for edge in self._edges if edge[1] in member.stages]
        try:
            if not asleep:
                limits.check()
            # A member that only sends to us gets acknowledgements over its own connection.
            self._process.channels.connect(peer, member.endpoint, asleep=asleep or not edges)
        except LimitReached as error:
            if not self._limited:
                self._limited = True
                log.error("no link to %s at %s (logged once, until there is room): %s", peer, member.endpoint, error)
            self._process.counters["limits"] += 1
            del self.members[peer]
            del self._introducers[peer]
            self._left.pop(peer, None)
            self.broadcast(PeerUnreachable(peer))  # the coordinator binds the request to others
            return
        self._process.relays.open(peer, member.relays)
        if not asleep:
            self._limited = False
            for source, target, backend in edges:
                self._process.send_queues.prepare(source, target, peer, backend)

    def _meet_again(self, peer: str) -> None:
        member = self.members.get(peer)
        if member is not None and self._process.channels.link(peer) is None:
            self._process.send_queues.forget(peer)
            self._connect(member, asleep=True)  # it may be gone, and the coordinator that sent it, too

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
