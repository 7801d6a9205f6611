"""One process of a process group: its stages, and who handles what is received. `sockets.frames.receiving.Handler`.

Holds no thread of its own and no state of a request: messages of requests go to `stage_requests`, of members and
coordinators to `stage_membership`, operations to `administration`. Called by the I/O thread and by
`processes.stages.stage_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from omnipipeline_spec.types.errors import clipped
from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.base import Engine
from stage_runtime.errors import TransferError, ValueRefused
from stage_runtime.metrics import planes
from stage_runtime.profiler.recording.session import ProfileSession
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.memory import pages
from stage_runtime.sockets.channels import Channels
from stage_runtime.stage.control.administration import Administration
from stage_runtime.stage.control.process_profiling import ProcessProfiling
from stage_runtime.stage.control.registration import Registration
from stage_runtime.stage.control.stage_membership import StageMembership
from stage_runtime.stage.control.stage_requests import Requests
from stage_runtime.stage.control.startup import EngineLoader
from stage_runtime.stage.inputs.mutation_check import MutationCheck
from stage_runtime.stage.kv.transport import StageKVTransport
from stage_runtime.stage.observing.idle_trimming import IdleTrimming
from stage_runtime.stage.outputs import edge_transports
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.stage.ranks.rank_plane import RankPlane
from stage_runtime.stage.ranks.tensor_parallel import Leader
from stage_runtime.stage.stage import Stage
from stage_runtime.transfers.releases import Releases
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import (
    AdminCall,
    Beat,
    Complete,
    DataReady,
    KVAsk,
    KVBeat,
    KVClose,
    KVPiece,
    Message,
    RankQuestion,
    Rejected,
    RelayFailure,
    Release,
    Skip,
    Submit,
    Unbound,
    Welcome,
)
from stage_runtime.wire.parts import Failure

log = logging.getLogger(__name__)


class Lifecycle(Protocol):
    """The process's reactions to events of its life. It runs on the I/O thread."""

    def loaded(self) -> None:
        """All engines are loaded, of all ranks."""

    def failed(self, stage: str, error: BaseException) -> None:
        """A stage cannot be loaded, or its engine has crashed."""

    def unbound(self, coordinator: str) -> None:
        """No request of this coordinator is bound to the process any more."""

    def fenced(self) -> None:
        """All coordinators have declared the process dead: it must continue under a new incarnation."""


class Host:
    """The stages of one process."""

    def __init__(
        self,
        plans: Sequence[StagePlan],
        lifecycle: Lifecycle,
        *,
        incarnation: str,
        loop: asyncio.AbstractEventLoop,
        mutation_check: MutationCheck | None = None,
        profiles: ProfileSession | None = None,
        leader: Leader | None = None,
        give_back: Callable[[], None] = pages.give_back,
    ) -> None:
        """leader: the followers' end, of a TP stage's rank 0. give_back: see `IdleTrimming`."""
        self.process = ProcessContext(incarnation, mutation_check)
        self.stages: Mapping[str, Stage] = {
            plan.name: Stage(plan, self.process, crashed=self._stage_crashed, loop=loop, leader=leader)
            for plan in plans
        }
        self.process.inputs = {name: stage.input for name, stage in self.stages.items()}
        self.requests = Requests(
            self.stages, self.process, loop, lambda owner, members: self.membership.meet(members, by=owner)
        )
        self.membership = StageMembership(plans, self.process, loop)
        self.kv = {plan.name: self._kv_transport(plan, loop) for plan in plans if plan.kv_role}
        self.membership.on_gone = self._peer_gone
        self._lifecycle = lifecycle
        self._loop = loop
        self._startup = EngineLoader(
            self.stages, loop=loop, leader=leader, on_loaded=lifecycle.loaded, on_failed=lifecycle.failed
        )
        self._ranks: RankPlane | None = None
        self._releases = Releases(loop, self.process.send)
        self._idle_trimming = IdleTrimming(self.stages.values(), give_back)
        self._administration = Administration(
            self.stages,
            self.process.send,
            done=lambda call: loop.call_soon_threadsafe(self.membership.carried_out, call),
        )
        self._profiling = (
            ProcessProfiling(profiles, self.process.send, loop, self._administration.profile)
            if profiles is not None
            else None
        )
        self._handlers = self._handled()

    def _kv_transport(self, plan: StagePlan, loop: asyncio.AbstractEventLoop) -> StageKVTransport:
        return StageKVTransport(
            plan,
            self.process,
            loop,
            members=lambda: self.membership.members,
            named=self.stages[plan.name].input.named,
        )

    def _handled(self) -> dict[type, Callable[[str, Any], None]]:
        """The handler of each type of message; `open_ranks` adds one."""
        return {
            **self.requests.handlers,
            **self.membership.handlers,
            Welcome: self._welcome,
            Rejected: self._rejected,
            Unbound: lambda sender, _: self._lifecycle.unbound(sender),
            AdminCall: self._administration.ask,
            Release: self._released,
            **dict.fromkeys((KVAsk, KVPiece, KVClose, KVBeat), self._kv_message),
            **(self._profiling.handlers if self._profiling is not None else {}),
        }

    def wire(self, channels: Channels, registration: Registration, relays: Relays) -> None:
        """Take the process's ends of the planes; before anything is sent."""
        self.process.wire(channels, relays)
        self.requests.wire()
        self.membership.wire(registration)
        for transport in self.kv.values():
            transport.wire()

    def open_ranks(self, leader: Leader) -> RankPlane:
        """The part of this process, as rank 0 of a TP stage, towards its followers."""
        (stage,) = self.stages.values()
        self._ranks = RankPlane(
            leader,
            stage,
            loop=self._loop,
            on_ready=self._startup.check,
            on_apart=lambda error: self._lifecycle.failed(stage.plan.name, error),
            on_lost=lambda error: self._stage_crashed(stage.plan.name, error),
            answer=self.process.send,
        )
        self._handlers[RankQuestion] = self._ranks.ask
        return self._ranks

    def load(self, make: Callable[[StagePlan], Engine]) -> None:
        """Load every stage's engine."""
        self._startup.load(make)

    # --- sockets.frames.receiving.Handler ----------------------------------------------------------------------

    def introduced(self, sender: str, message: Message) -> bool:
        if isinstance(message, Welcome):
            # Its frames before this one may be received again first.
            self.requests.owner_back(sender, message.coordinator.attempts_over)
            return self.membership.registration.welcomed(sender, message)
        if isinstance(message, Submit | DataReady | Skip):
            return self.membership.introduced(sender, message.header.members, by=message.header.owner)
        if isinstance(message, KVAsk):
            return self.membership.introduced(sender, message.members, by=message.room.owner)
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
        """Fail the request at its owner, which ends it here too.

        The link counts and logs messages without a request.
        """
        if request is None:
            return
        stage = next(iter(self.stages))
        failure = Failure("stage_failed", f"a message of {sender} could not be read: {problem}", stage, "receive")
        with contextlib.suppress(ValueRefused):  # not the id of any request
            self.process.send(request.owner, Complete(request.request_id, request.attempt, stage, failure=failure))

    def lost(self, peer: str) -> None:
        if self.membership.lost(peer):
            for transport in self.kv.values():
                transport.owner_lost(peer)
            orphans = self.requests.drop_owner(peer)
            log.warning("coordinator %s is gone; %d of its requests aborted", peer, orphans)

    def _welcome(self, sender: str, message: Welcome) -> None:
        self.requests.owner_back(sender, message.coordinator.attempts_over)
        self.membership.welcome(sender, message)

    def _rejected(self, sender: str, message: Rejected) -> None:
        log.error("a coordinator refuses this process: %s", message.reason)
        self.process.counters["rejected"] += 1
        if not message.fenced:
            self.membership.registration.refused(message.via)
        elif self.membership.must_be_renewed(sender, message):
            self._lifecycle.fenced()
        elif sender in self.membership.registration.coordinators:
            self.process.channels.drop(sender)
            self.lost(sender)

    # --- what the process does with it --------------------------------------------------------------------------

    def release(self, peer: str, transfer: int) -> None:
        """The last view of a peer's transfer is gone: release it."""
        self._releases.add(peer, transfer)

    def relay_failed(self, peer: str, relay: str, reason: str) -> None:
        """Called by the relays, in any thread."""
        self.process.send(peer, RelayFailure(relay, clipped(reason)))

    def beat(self, *, loading: Mapping[str, tuple[float, float, str]] = {}) -> dict[str, float]:
        """Send load and progress to every coordinator. Returns: the gauges of this process.

        loading: how far each stage is that still loads, as `planes.loading` takes it.
        """
        self._idle_trimming.beat(self.process.relays)
        if self._profiling is not None:
            self._profiling.beat()
        busy = {name: stage.busy_share() for name, stage in self.stages.items()}
        gauges = self.gauges(busy=busy) | planes.places({name: stage.places for name, stage in self.stages.items()})
        of_ranks = {} if self._ranks is None else self._ranks.gauges
        beat = Beat(
            {name: stage.waiting for name, stage in self.stages.items()},
            {name: stage.running for name, stage in self.stages.items()},
            {name: stage.inbox.taken for name, stage in self.stages.items()},
            gauges | planes.of_ranks(of_ranks) | planes.loading(loading),
        )
        self.membership.hint(beat)
        return gauges

    def gauges(self, *, busy: Mapping[str, float] = {}) -> dict[str, float]:
        """The numbers of the process's planes, by name. busy: by stage, of the time since the last beat."""
        process = self.process
        return planes.gauges(
            relays=process.relays.stats(),
            transfers_in_flight=process.send_queues.outstanding,
            edges=process.send_queues.edges(),
            edge_transports=self._edge_transports(),
            sends_queued=process.send_queues.queued,
            events=process.channels.counters + process.counters,
            engines={name: {**stage.inbox.gauges, **self._kv_gauges(name)} for name, stage in self.stages.items()},
            busy=busy,
        )

    def _kv_gauges(self, stage: str) -> Mapping[str, float]:
        transport = self.kv.get(stage)
        return {} if transport is None else transport.gauges()

    def _edge_transports(self) -> dict[edge_transports.EdgeTransport, int]:
        """How each edge reaches the instances that this process knows."""
        plans = [stage.plan for stage in self.stages.values()]
        stages_of = {peer: member.stages for peer, member in self.membership.members.items()}
        return edge_transports.count(
            plans, stages_of, self.membership.registration.coordinators, self.process.relays.transport
        )

    def reborn(self, incarnation: str) -> None:
        """Drop all work of the earlier incarnation; `wire` must follow."""
        for transport in self.kv.values():
            transport.renewed()
        self.requests.drop_all()
        self._releases.clear()
        self.membership.reset()
        self.process.incarnation = incarnation
        for stage in self.stages.values():
            stage.output.renew()

    def announce_ready(self) -> None:
        self.membership.announce_ready()

    def deregister(self, reason: str) -> None:
        """Bind nothing new to us; and what has not begun here may go to another instance, if there is one."""
        for transport in self.kv.values():
            transport.drain()
        self.requests.hand_back()
        self.membership.deregister(reason)

    @property
    def idle(self) -> bool:
        """Whether no request is at any stage, no room is open, no payload waits to be sent, and no peer holds a slot of
        ours.
        """
        busy = any(stage.waiting or stage.running for stage in self.stages.values())
        followed = self._ranks is None or self._ranks.idle
        queues = self.process.send_queues
        if any(transport.open_rooms for transport in self.kv.values()):
            return False
        return not busy and followed and not queues.outstanding and not queues.queued

    def close(self, timeout_s: float) -> bool:
        """Stop the stages' threads. False when one did not end in time."""
        for transport in self.kv.values():
            transport.stop()
        self.requests.abort_all()
        ended = [stage.close(timeout_s) for stage in self.stages.values()]
        self.requests.close()
        return all(ended)

    def _kv_message(self, sender: str, message: KVAsk | KVPiece | KVClose | KVBeat) -> None:
        transport = self.kv.get(message.target)
        if transport is not None:
            transport.handlers[type(message)](sender, message)
            return
        self.process.counters["misdirected"] += 1
        if isinstance(message, KVAsk | KVPiece) and message.body.transfer:
            with contextlib.suppress(TransferError):
                self.process.relays.decline(message.body.transfer, peer=sender)

    def _released(self, sender: str, message: Release) -> None:
        self.requests.handlers[Release](sender, message)
        for transport in self.kv.values():
            transport.released()

    def _peer_gone(self, peer: str, reason: str) -> None:
        for transport in self.kv.values():
            transport.peer_lost(peer, reason)

    def _stage_crashed(self, name: str, error: BaseException) -> None:
        """The thread of a stage has ended by an error. Any thread may call it."""
        self._administration.crashed(name, error)
        self._loop.call_soon_threadsafe(self._lifecycle.failed, name, error)
