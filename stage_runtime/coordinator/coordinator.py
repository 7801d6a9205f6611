"""Dispatches control messages to membership and the request manager.

`sockets.frames.receiving.Handler`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence, Set
from typing import Any

from omnipipeline_spec.types.errors import clipped
from omnipipeline_spec.types.plan import CanaryShare, CoordinatorPlan, PipelineRevision
from stage_runtime.coordinator.answering.unread_answers import DEFAULT_LIMITS, AnswerLimits
from stage_runtime.coordinator.membership import (
    DEFAULT_TIMES,
    BoundRequests,
    CoordinatorIdentity,
    Membership,
    MembershipTimes,
)
from stage_runtime.coordinator.plane_ends import PlaneEnds
from stage_runtime.coordinator.questions.adapters import AdapterChanges
from stage_runtime.coordinator.questions.clocks import Clocks
from stage_runtime.coordinator.questions.profile_runs import PipelineProfiling
from stage_runtime.coordinator.questions.stage_operations import Operations
from stage_runtime.coordinator.reporting.tracing import RequestTracer
from stage_runtime.coordinator.request_manager import RequestManager
from stage_runtime.profiler.recording.session import ProfileSession
from stage_runtime.relays.dispatch import Relays
from stage_runtime.rules.binding.instances import Instance
from stage_runtime.sockets.channels import Channels
from stage_runtime.transfers.releases import Releases
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import (
    AdminReply,
    Beat,
    Complete,
    Deregister,
    Detour,
    ForwardAbort,
    ForwardAbortReply,
    HandBack,
    Hello,
    InputComplete,
    Members,
    Message,
    PeerUnreachable,
    ProfilerReply,
    Ready,
    RelayFailure,
    Release,
    Stream,
    StreamStalled,
)
from stage_runtime.wire.parts import Member
from stage_runtime.wire.values import OmniRequest

log = logging.getLogger(__name__)


class Coordinator:
    """One coordinator without its sockets: `wire` brings them. This runs on the I/O thread."""

    membership: Membership
    manager: RequestManager
    profiling: PipelineProfiling
    operations: Operations
    adapters: AdapterChanges

    def __init__(
        self,
        plan: CoordinatorPlan,
        *,
        incarnation: str,
        loop: asyncio.AbstractEventLoop,
        answer_limits: AnswerLimits = DEFAULT_LIMITS,
    ) -> None:
        self.incarnation = incarnation
        self._plan = plan
        self._answer_limits = answer_limits
        self._loop = loop
        self._releases = Releases(loop, lambda peer, message: self._channels.send(peer, message))
        self._preparing: dict[str, Instance] = {}  #: They are given adapters before they take requests.
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: Channels
        self._relays: Relays
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            Stream: lambda sender, message: self.manager.live.answers.stream(sender, message),
            Complete: lambda sender, message: self.manager.live.answers.complete(sender, message),
            HandBack: lambda sender, message: self.manager.live.hand_back(sender, message),
            InputComplete: lambda _, message: self.manager.live.input_complete(message),
            StreamStalled: lambda sender, message: self.manager.live.readers.stalled(
                sender, message.source, message.stalled
            ),
            ForwardAbort: self._forward_abort,
            ForwardAbortReply: lambda sender, message: self.manager.live.abort_forwarding.answered(sender, message),
            RelayFailure: self._relay_failed,
            Release: lambda sender, message: self.manager.live.send_queues.released(sender, message.transfers),
            Beat: lambda sender, message: self.membership.beat(sender, message),
            Ready: self._ready,
            PeerUnreachable: self._peer_unreachable,
            Members: lambda sender, message: self.membership.neighbours.adopt(sender, message),
            Deregister: self._deregister,
            Detour: lambda sender, message: self._channels.hint(message.receiver, message),
            Hello: self._hello_again,
            ProfilerReply: lambda sender, message: self.profiling.replied(sender, message),
            AdminReply: lambda sender, message: self.operations.replied(sender, message),
        }

    def wire(
        self,
        channels: Channels,
        relays: Relays,
        *,
        endpoint: str,
        publisher: str,
        revisions: Sequence[PipelineRevision],
        profiles: ProfileSession | None = None,
        terminal_stages: Callable[[OmniRequest], Any] | None = None,
        tracing: RequestTracer | None = None,
        times: MembershipTimes = DEFAULT_TIMES,
    ) -> None:
        """Set the sockets and relays. Called once, before the first message is sent.

        endpoint, publisher: as the others must know them. profiles: of this process; None: it takes none.
        terminal_stages: the pipeline's terminalStagesFn. tracing: None: requests are not traced.
        """
        ends = PlaneEnds(channels, relays, self._loop)
        self._channels = channels
        self._relays = relays
        self.membership = Membership(
            CoordinatorIdentity(self._plan.pipeline, self.incarnation, endpoint, publisher),
            revisions,
            ends,
            requests=BoundRequests(
                bound_to=lambda incarnation: self.manager.live.bindings.count(incarnation),
                last_attempt=lambda: self.manager.live.last_attempt,
            ),
            hold_s=self._plan.hold_s,
            dead_after_s=self._plan.dead_after_s,
            times=times,
        )
        clocks = Clocks()
        self.manager = RequestManager(
            self._plan,
            self.membership,
            ends,
            terminal_stages=terminal_stages,
            clocks_us=clocks.offsets_us,
            tracing=tracing,
            answer_limits=self._answer_limits,
        )

        channels.allow_paced_reads(lambda: not self.manager.in_flight)

        def members() -> dict[str, Member]:
            return {name: one.member for name, one in self.membership.state.instances.items()}

        def stages() -> list[str]:
            return sorted({stage for one in self.membership.state.revisions for stage in one.stages})

        self.profiling = PipelineProfiling(profiles, members, channels.send, self._loop, clocks)
        self.operations = Operations(members, stages, channels.send, self._loop)
        self.adapters = AdapterChanges(self.operations)

    # --- sockets.frames.receiving.Handler ----------------------------------------------------------------------

    def introduced(self, sender: str, message: Message) -> bool:
        if not isinstance(message, Hello):
            self.membership.unknown_peer(sender)
            return False
        return self._hello(sender, message)

    def received(self, sender: str, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(sender, message)

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None:
        if request is not None:
            self.manager.live.unreadable(sender, request, problem)

    def lost(self, peer: str) -> None:
        if self.membership.fence(peer):
            self._instance_lost(peer)

    # --- what the process does with it --------------------------------------------------------------------------

    def relay_failed(self, peer: str, relay: str, reason: str) -> None:
        """Called by the relays, in any thread."""
        self._channels.send(peer, RelayFailure(relay, clipped(reason)))

    def _relay_failed(self, sender: str, message: RelayFailure) -> None:
        self._relays.fail(sender, message.relay, message.reason, notify=False)

    def release(self, peer: str, transfer: int) -> None:
        """The last view of a stage's transfer is gone: release it."""
        self._releases.add(peer, transfer)

    def update_revisions(self, revisions: Sequence[PipelineRevision]) -> None:
        """The list of revisions has changed: new requests may go to other instances."""
        self.membership.update(revisions)
        self.manager.live.waiting.instances_changed()

    def set_aside(self, hosts: Sequence[str]) -> None:
        """Bind no new request to instances at these addresses."""
        self.membership.set_aside(hosts)
        self.manager.live.waiting.instances_changed()

    def share_requests(self, canary: CanaryShare | None) -> None:
        """One revision is tried with a share of the requests; None: none is."""
        self.membership.state.share(canary)
        self.manager.live.outcomes.share(canary)

    def start_on_demand(self, groups: Sequence[str]) -> None:
        """Requests for these groups wait for an instance, even if there has been none for long."""
        self.membership.start_on_demand(groups)

    # --- inside -------------------------------------------------------------------------------------------------

    def _hello(self, sender: str, message: Hello) -> bool:
        joined = self.membership.hello(sender, message)
        if joined is None:
            return False
        for replaced in joined.replaced:
            self._instance_lost(replaced)
        if joined.new:
            self.manager.live.suspects.lives(sender)
            self.profiling.joined(sender)
        return True

    def _instance_lost(self, instance: str) -> None:
        self.manager.live.instance_lost(instance)
        self.profiling.lost(instance)
        self.operations.lost(instance)
        self.adapters.lost(instance)

    def _hello_again(self, sender: str, message: Hello) -> None:
        self._hello(sender, message)

    def _forward_abort(self, sender: str, message: ForwardAbort) -> None:
        """Another coordinator received the abort; an instance forwards it to us."""
        aborted = self.manager.abort(message.request_id, message.reason)
        self._channels.send(sender, ForwardAbortReply(message.request_id, message.asker, aborted))

    def _ready(self, sender: str, message: Ready) -> None:
        instance = self.membership.state.instances.get(sender)
        if instance is not None:
            self._share_adapters(sender, self.adapters.learn(sender, instance.member.stages, message.adapters))
        if instance is not None and not instance.ready and self.adapters.due(instance.member.stages):
            if self._preparing.get(sender) is not instance:
                self._preparing[sender] = instance
                self._do(self._prepare(sender, instance))
            return
        self._takes_requests(sender)

    def _share_adapters(self, sender: str, stages: Set[str]) -> None:
        """Give ready instances of these stages what ``sender`` has."""
        for name, one in self.membership.state.instances.items():
            shared = [stage for stage in one.member.stages if stage in stages]
            if name != sender and one.ready and shared:
                self._do(self.adapters.give(name, shared))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, sender: str, instance: Instance) -> None:
        """Give an instance the adapters that others have: it takes requests afterwards."""
        try:
            await self.adapters.give(sender, instance.member.stages)
        finally:
            if self._preparing.get(sender) is instance:
                del self._preparing[sender]
        if self.membership.state.instances.get(sender) is instance:  # else it says Ready again, or is gone
            self._takes_requests(sender)

    def _takes_requests(self, sender: str) -> None:
        if self.membership.ready_now(sender):
            self.manager.live.waiting.instances_changed()

    def _deregister(self, sender: str, message: Deregister) -> None:
        self.manager.live.draining(sender)
        self.membership.deregister(sender, message)

    def _peer_unreachable(self, sender: str, message: PeerUnreachable) -> None:
        self.membership.neighbours.peer_unreachable(sender, message.peer)
        self.manager.live.broken_connections.peer_unreachable(sender, message.peer)
