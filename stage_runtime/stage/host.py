"""One process of a process group: its stages, and everything that is said to them. `sockets.channels.Handler`.

Holds no thread of its own: the I/O thread calls `received`, the stages' threads call what `output.ProcessContext`
lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.base import Engine
from stage_runtime.errors import TransferError, ValueRefused
from stage_runtime.relays.fetching import Fetched, Fetching
from stage_runtime.relays.registry import Relays
from stage_runtime.relays.send_queues import attempt_key
from stage_runtime.rules import forwarding
from stage_runtime.sockets.channels import Channels
from stage_runtime.stage.administration import Administration
from stage_runtime.stage.arrivals import Sealed
from stage_runtime.stage.idle_trimming import IdleTrimming
from stage_runtime.stage.mutation_check import CheckedPayload, MutationCheck
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.stage.ranks import RankPlane
from stage_runtime.stage.registration import Registration
from stage_runtime.stage.stage import Stage
from stage_runtime.stage.stage_input import StageInput
from stage_runtime.stage.tensor_parallel import Leader
from stage_runtime.wire.messages import (
    Abort,
    Admin,
    Beat,
    Body,
    Complete,
    Consumed,
    DataReady,
    Deregister,
    Ended,
    Failure,
    ForwardAbort,
    ForwardAbortReply,
    HandBack,
    Header,
    Member,
    Members,
    Message,
    PeerUnreachable,
    ProfilerStart,
    ProfilerStop,
    RankFailed,
    Ready,
    Rejected,
    Release,
    RequestRef,
    Shutdown,
    Skip,
    Stalled,
    Submit,
    Unbound,
    Welcome,
)

log = logging.getLogger(__name__)

MEET_AGAIN_S: Final = 1.5  # after a connection broke; by then the coordinator has given up what was under way
LOST_OWNERS_KEPT: Final = 100
RANKS_AGREE_S: Final = 5.0  # within which all ranks have raised what one has raised


class Host:
    """The stages of one process and their neighbours."""

    def __init__(
        self,
        plans: Sequence[StagePlan],
        *,
        incarnation: str,
        loop: asyncio.AbstractEventLoop,
        on_loaded: Callable[[], None],
        on_failed: Callable[[str, BaseException], None],
        on_shutdown: Callable[[str], None],
        on_unbound: Callable[[str], None],
        on_fenced: Callable[[], None],
        mutation_check: MutationCheck | None = None,
        leader: Leader | None = None,
    ) -> None:
        self.process = ProcessContext(incarnation, mutation_check)
        self.members: dict[str, Member] = {}
        self.registration: Registration
        self._fetching: Fetching
        self._loop = loop
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._on_shutdown = on_shutdown
        self._on_unbound = on_unbound
        self._on_fenced = on_fenced
        self._leader = leader
        self._ranks: RankPlane | None = None
        self._ready = False
        self._leaving: str | None = None  #: Why it drains: no coordinator may bind anything new to it.
        self._loading = len(plans)
        self._releases: dict[str, list[int]] = {}
        self._lost_owners: OrderedDict[str, None] = OrderedDict()  #: Coordinators that are gone; the oldest first.
        self.stages = {
            plan.name: Stage(plan, self.process, crashed=self._stage_crashed, loop=loop, leader=leader)
            for plan in plans
        }
        self.process.inputs = {name: stage.input for name, stage in self.stages.items()}
        self._idle_trimming = IdleTrimming(self.stages.values())
        self._administration = Administration(self.stages, self.process.send)
        self._neighbours = {
            name for plan in plans for name in (*plan.next, *plan.stream_to, *plan.stream_from, *plan.inputs_from)
        } - set(self.stages)
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            Submit: self._submit,
            DataReady: self._data_ready,
            Skip: self._skip,
            Stalled: self._stalled,
            Abort: self._abort,
            ForwardAbort: self._forward_abort,
            ForwardAbortReply: self._forward_abort_reply,
            Ended: self._ended,
            Release: self._release,
            Consumed: self._consumed,
            Welcome: self._welcome,
            Members: self._members,
            Shutdown: lambda _, message: self._on_shutdown(message.reason),
            Unbound: lambda sender, _: self._on_unbound(sender),
            Admin: self._administration.ask,
            ProfilerStart: self._administration.tell_all,
            ProfilerStop: self._administration.tell_all,
            Rejected: self._rejected,
        }

    def wire(self, channels: Channels, registration: Registration, relays: Relays) -> None:
        """Take the process's ends of the planes; before anything is said."""
        self.process.wire(channels, relays)
        self.registration = registration
        self._fetching = Fetching(relays, self._loop)

    def load(self, make: Callable[[StagePlan], Engine]) -> None:
        """Load every stage's engine, one after the other, each on its own thread."""
        names = deque(self.stages)

        def loaded(name: str, error: BaseException | None) -> None:
            self._loop.call_soon_threadsafe(self._one_loaded, name, error)
            if error is None and names:
                self.stages[names.popleft()].start(make, loaded)

        if names:
            self.stages[names.popleft()].start(make, loaded)

    # --- sockets.channels.Handler -------------------------------------------------------------------------------

    def introduced(self, sender: str, message: Message) -> bool:
        if isinstance(message, Welcome):
            self._lost_owners.pop(sender, None)  # its frames before this one may be heard again first
            return self.registration.welcomed(sender, message)
        if isinstance(message, Rejected):
            self._rejected(sender, message)
        return False

    def received(self, sender: str, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            self.process.counters["unexpected"] += 1
            return
        handler(sender, message)

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None:
        """Its owner ends the request, here too. What belongs to none is counted and logged by the link."""
        if request is None:
            return
        stage = next(iter(self.stages))
        failure = Failure("stage_failed", f"a message of {sender} could not be read: {problem}", stage, "receive")
        with contextlib.suppress(ValueRefused):  # no id that anybody knows
            self.process.send(request.owner, Complete(request.request_id, request.attempt, stage, failure=failure))

    def lost(self, peer: str) -> None:
        if peer in self.members:  # only our connection to it broke: the coordinator says when it is gone
            for coordinator in self.registration.coordinators:
                self.process.send(coordinator, PeerUnreachable(peer))
            # Until then it may still look at what we sent: its slots must not be written again.
            self.process.send_queues.cut(peer)
            self._loop.call_later(MEET_AGAIN_S, self._meet_again, peer)
            return
        self._forget(peer)
        if self.registration.lost(peer):
            orphans = self._drop_owner(peer)
            log.warning("coordinator %s is gone; %d of its requests aborted", peer, orphans)

    # --- what the process does with it --------------------------------------------------------------------------

    def release(self, peer: str, transfer: int) -> None:
        """The last view of what a peer put has died: tell it, all that died lately in one message."""
        if not self._releases:
            self._loop.call_soon(self._send_releases)
        self._releases.setdefault(peer, []).append(transfer)

    def beat(self) -> None:
        """Tell every coordinator how it goes."""
        self._idle_trimming.beat(self.process.relays)
        outgoing = Beat(
            {name: stage.waiting for name, stage in self.stages.items()},
            {name: stage.running for name, stage in self.stages.items()},
            {name: stage.inbox.taken for name, stage in self.stages.items()},
            self.gauges(),
        )
        for coordinator in self.registration.coordinators:
            self.process.send(coordinator, outgoing)

    def gauges(self) -> dict[str, float]:
        found: dict[str, float] = {f"relay_{name}": float(value) for name, value in self.process.relays.stats().items()}
        found["transfers_in_flight"] = float(self.process.send_queues.outstanding)
        found["sends_queued"] = float(self.process.send_queues.queued)
        for name, count in (self.process.channels.counters + self.process.counters).items():
            found[f"control_{name}"] = float(count)
        return found

    def reborn(self, incarnation: str) -> None:
        """Everything that the life before was asked for is dropped; `wire` must follow."""
        for stage in self.stages.values():
            stage.input.abort_all()
        self._fetching.close()
        self._releases.clear()
        self._lost_owners.clear()  # what was bound to the life before is addressed to it
        self.members.clear()
        self.process.incarnation = incarnation
        for stage in self.stages.values():
            stage.output.renew()

    def announce_ready(self) -> None:
        self._ready = True
        if self._leaving is not None:
            return
        for coordinator in self.registration.coordinators:
            self.process.send(coordinator, Ready())

    def deregister(self, reason: str) -> None:
        """Bind nothing new to us; and what has not begun here may go to another instance, if there is one.

        Coordinators that come later, or know us by a later incarnation only, are told when they say Welcome.
        """
        self._leaving = reason
        for stage in self.stages.values():
            if stage.plan.entry:
                for work in stage.input.works():
                    if work.began_at is None:
                        self.process.send(work.owner, HandBack(work.request_id, work.attempt, stage.plan.name))
        for coordinator in self.registration.coordinators:
            self.process.send(coordinator, Deregister(reason))

    @property
    def idle(self) -> bool:
        """No request is at any stage, nothing waits to be sent, nobody holds a slot of ours."""
        busy = any(stage.waiting or stage.running for stage in self.stages.values())
        followed = self._ranks is None or self._ranks.idle
        return (
            not busy and followed and not self.process.send_queues.outstanding and not self.process.send_queues.queued
        )

    def close(self, timeout_s: float) -> bool:
        """Stop the stages' threads. False when one did not end in time."""
        for stage in self.stages.values():
            stage.input.abort_all()  # what is left runs its `finally` blocks
        ended = [stage.close(timeout_s) for stage in self.stages.values()]
        self._fetching.close()
        return all(ended)

    def _rejected(self, sender: str, message: Rejected) -> None:
        log.error("a coordinator refuses this process: %s", message.reason)
        self.process.counters["rejected"] += 1
        if message.fenced:
            self._on_fenced()

    # --- requests -----------------------------------------------------------------------------------------------

    def _submit(self, sender: str, message: Submit) -> None:
        stage_input = self._target(message.target)
        if stage_input is not None and not self._orphan(message.header, sender, message.body):
            self._fetching.fetch(
                sender,
                message.body,
                attempt_key(message.header.owner, message.header.request_id, message.header.attempt),
                lambda fetched: stage_input.payload(
                    message.header, "", self._checked(message.header, message.target, "the client", "payload", fetched)
                ),
                lambda error: stage_input.lost(message.header, error),
                holder=message.target,
            )

    def _data_ready(self, sender: str, message: DataReady) -> None:
        stage_input = self._target(message.target)
        if stage_input is None or self._orphan(message.header, sender, message.body):
            return
        header, source, body = message.header, message.source, message.body
        if message.failure is not None:
            stage_input.broken(header, source, message.failure)
        elif message.is_done and body is None:
            stage_input.end(header, source, message.chunk_id or 0)
        elif body is not None:
            self._fetching.fetch(
                sender,
                body,
                attempt_key(header.owner, header.request_id, header.attempt),
                lambda fetched: self._arrived(stage_input, message, fetched),
                lambda error: stage_input.lost(header, error),
                holder=message.target,
            )

    def _arrived(self, stage_input: StageInput, message: DataReady, received: Fetched) -> None:
        name = "payload" if message.chunk_id is None else "chunk"
        fetched = self._checked(message.header, message.target, message.source, name, received)
        if message.is_done:
            stage_input.end(message.header, message.source, message.chunk_id or 0, fetched)
        elif message.chunk_id is None:
            stage_input.payload(message.header, message.source, fetched, message.timings)
        else:
            stage_input.chunk(
                message.header, message.source, message.chunk_id, message.modality, fetched, message.weight
            )

    def _checked(self, header: Header, target: str, source: str, name: str, fetched: Fetched) -> Sealed:
        if self.process.mutation_check is None:
            return fetched
        key = attempt_key(header.owner, header.request_id, header.attempt)
        return CheckedPayload(fetched, self.process.mutation_check, target, source, key, name)

    def _skip(self, sender: str, message: Skip) -> None:
        stage_input = self._target(message.target)
        if stage_input is not None and not self._orphan(message.header, sender, None):
            stage_input.skip(message.header, message.source, message.chunks)

    def _stalled(self, sender: str, message: Stalled) -> None:
        stage_input = self.process.sibling(message.target)
        if stage_input is not None:
            stage_input.source_stalled(message.source, sender, message.stalled)

    def _abort(self, sender: str, message: Abort) -> None:
        self._drop(message.owner, message.request_id, message.attempt)

    def _drop(self, owner: str, request_id: str, attempt: int) -> None:
        """Nobody waits for this attempt: free what engines, send queues and relays have of it, however that came
        about.
        """
        for stage in self.stages.values():
            stage.input.abort(owner, request_id, attempt)
        self.process.send_queues.abort(owner, request_id, attempt)
        key = attempt_key(owner, request_id, attempt)
        self.process.relays.cleanup(key)
        if self.process.mutation_check is not None:
            self.process.mutation_check.forget(key)

    def _forward_abort(self, sender: str, message: ForwardAbort) -> None:
        """One coordinator is asked to abort what another one owns: we know them all."""
        owners = forwarding.owners(message.asker, self.registration.coordinators)
        for owner in owners:
            self.process.send(owner, message)
        if not owners:
            self.process.send(sender, ForwardAbortReply(message.request_id, message.asker, False))

    def _forward_abort_reply(self, sender: str, message: ForwardAbortReply) -> None:
        owners = len(forwarding.owners(message.asker, self.registration.coordinators))
        self.process.send(message.asker, ForwardAbortReply(message.request_id, message.asker, message.aborted, owners))

    def _ended(self, sender: str, message: Ended) -> None:
        for request_id, attempt in message.requests:
            self._drop(sender, request_id, attempt)

    def _drop_owner(self, owner: str) -> int:
        """A coordinator is gone. What others still send of its requests is dropped as it comes (`_orphan`)."""
        self._lost_owners[owner] = None
        if len(self._lost_owners) > LOST_OWNERS_KEPT:
            self._lost_owners.popitem(last=False)
        works = [work for stage in self.stages.values() for work in stage.input.works() if work.owner == owner]
        orphans = {(work.request_id, work.attempt) for work in works}
        orphans |= self.process.send_queues.waiting_of(owner)
        for request_id, attempt in orphans:
            self._drop(owner, request_id, attempt)
        self._fetching.drop(attempt_key(owner, "", 0).partition("#")[0])
        return len(orphans)

    def _orphan(self, header: Header, sender: str, body: Body | None) -> bool:
        """Whether the request's coordinator is gone: nobody would ever end it."""
        if header.owner not in self._lost_owners:
            return False
        self.process.counters["orphaned_requests"] += 1
        if body is not None and body.transfer:
            with contextlib.suppress(TransferError):
                self.process.relays.decline(body.transfer, peer=sender)
        return True

    def _release(self, sender: str, message: Release) -> None:
        self.process.send_queues.released(sender, message.transfers)

    def _consumed(self, sender: str, message: Consumed) -> None:
        stage_input = self.process.sibling(message.source)
        if stage_input is not None:
            stage_input.consumed(message)

    # --- members ------------------------------------------------------------------------------------------------

    def _welcome(self, sender: str, message: Welcome) -> None:
        self._lost_owners.pop(sender, None)
        self.registration.welcomed_again(sender, message)
        self.process.relays.open(sender, message.coordinator.relays)
        self._meet(message.members)
        if self._leaving is not None:
            self.process.send(sender, Deregister(self._leaving))
        elif self._ready:
            self.process.send(sender, Ready())

    def _members(self, sender: str, message: Members) -> None:
        self._meet(message.joined)
        for peer in message.gone:
            if self.members.pop(peer, None) is not None:
                self.process.channels.drop(peer)
                self._forget(peer)

    def _meet(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.incarnation == self.process.incarnation or not self._neighbours.intersection(member.stages):
                continue
            self.members[member.incarnation] = member
            self.process.channels.connect(member.incarnation, member.endpoint)
            self.process.relays.open(member.incarnation, member.relays)

    def _meet_again(self, peer: str) -> None:
        member = self.members.get(peer)
        if member is not None and self.process.channels.link(peer) is None:
            self._forget(peer)
            self._meet([member])

    def _forget(self, peer: str) -> None:
        self.process.send_queues.forget(peer)

    # --- inside -------------------------------------------------------------------------------------------------

    def _target(self, name: str) -> StageInput | None:
        stage_input = self.process.sibling(name)
        if stage_input is None:
            self.process.counters["misdirected"] += 1
            log.warning("message for stage %r, which is not in this process", name)
        return stage_input

    def ranks(self, leader: Leader) -> RankPlane:
        """What this process, as rank 0 of a TP stage, has towards its followers."""
        stage = next(iter(self.stages))
        self._ranks = RankPlane(
            leader,
            stage=stage,
            on_ready=self._check_loaded,
            on_failed=self._rank_failed,
            on_lost=lambda error: self._stage_crashed(stage, error),
        )
        return self._ranks

    def _one_loaded(self, name: str, error: BaseException | None) -> None:
        if error is not None:
            self._on_failed(name, error)
            return
        self._loading -= 1
        self._check_loaded()

    def _check_loaded(self) -> None:
        if self._loading == 0 and (self._leader is None or self._leader.complete()):
            self._loading = -1
            self._on_loaded()

    def _rank_failed(self, message: RankFailed) -> None:
        """Computing failed on one rank. On all of them: rank 0 says so itself. On that one alone: they are apart."""

        def look() -> None:
            for name, stage in self.stages.items():
                work = stage.input.find(message.owner, message.request_id, message.attempt)
                if work is not None and not work.over:
                    error = RuntimeError(f"rank {message.rank} failed alone, the ranks are apart: {message.error}")
                    self._on_failed(name, error)

        self._loop.call_later(RANKS_AGREE_S, look)

    def _stage_crashed(self, name: str, error: BaseException) -> None:
        self._administration.crashed(name, error)
        self._loop.call_soon_threadsafe(self._on_failed, name, error)

    def _send_releases(self) -> None:
        releases, self._releases = self._releases, {}
        for peer, transfers in releases.items():
            self.process.send(peer, Release(tuple(transfers)))
