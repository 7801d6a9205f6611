"""One process of a process group: its stages, and everything that is said to them. `sockets.channels.Handler`.

Holds no thread of its own: the I/O thread calls `heard`, the stages' threads call what `outbox.Surroundings` lists.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from omnipipeline_spec.plan import StagePlan
from stage_runtime.engines.base import Engine
from stage_runtime.relays import payloads
from stage_runtime.relays.choosing import Relays
from stage_runtime.relays.fetching import Fetched, Fetching
from stage_runtime.relays.lanes import Lanes, attempt_key
from stage_runtime.rules import forwarding
from stage_runtime.sockets.channels import Channels
from stage_runtime.stage.administration import Administration
from stage_runtime.stage.intake import Intake
from stage_runtime.stage.outbox import tell_consumed
from stage_runtime.stage.registration import Registration
from stage_runtime.stage.resting import Rest
from stage_runtime.stage.stage import Stage
from stage_runtime.stage.tensor_parallel import Leader
from stage_runtime.stage.watching import Watch
from stage_runtime.wire.messages import (
    Abort,
    AbortPassed,
    Admin,
    Beat,
    Consumed,
    DataReady,
    Ended,
    Goodbye,
    HandBack,
    Member,
    Members,
    Message,
    PassAbort,
    ProfilerStart,
    ProfilerStop,
    RankFailed,
    RankHello,
    Ready,
    Refused,
    Release,
    Severed,
    Shutdown,
    Submit,
    Unbound,
    Welcome,
)

log = logging.getLogger(__name__)

MEET_AGAIN_S: Final = 1.5  # after a connection broke; by then the coordinator has given up what was under way
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
        on_buried: Callable[[], None],
        watch: Watch | None = None,
        leader: Leader | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.counters: Counter[str] = Counter()
        self.members: dict[str, Member] = {}
        self.channels: Channels
        self.registration: Registration
        self.relays: Relays
        self.lanes: Lanes
        self._fetching: Fetching
        self._loop = loop
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._on_shutdown = on_shutdown
        self._on_unbound = on_unbound
        self._on_buried = on_buried
        self._watch = watch
        self._leader = leader
        self._ready = False
        self._loading = len(plans)
        self._releases: dict[str, list[int]] = {}
        self.stages = {plan.name: Stage(plan, self, crashed=self._stage_crashed, leader=leader) for plan in plans}
        self._rest = Rest(self.stages.values())
        self._administration = Administration(self.stages, self.say)
        self._neighbours = {
            name for plan in plans for name in (*plan.next, *plan.stream_to, *plan.stream_from, *plan.inputs_from)
        } - set(self.stages)
        self._handle: dict[type, Callable[[str, Any], None]] = {
            Submit: self._submit,
            DataReady: self._data_ready,
            Abort: self._abort,
            PassAbort: self._pass_abort,
            AbortPassed: self._abort_passed,
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
            Refused: self._refused,
            RankHello: self._rank_hello,
            RankFailed: self._rank_failed,
        }

    def wire(self, channels: Channels, registration: Registration, relays: Relays) -> None:
        """Take the process's ends of the planes; before anything is said."""
        self.channels = channels
        self.registration = registration
        self.relays = relays
        self.lanes = Lanes(relays, channels.send)
        self._fetching = Fetching(relays, self._loop)
        if self._leader is not None:
            self._leader.wire(channels, self.lanes, next(iter(self.stages)))

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
            return self.registration.welcomed(sender, message)
        if isinstance(message, RankHello) and self._leader is not None and self._leader.introduced(sender, message):
            self.relays.open(sender, message.relays)
            return True
        if isinstance(message, Refused):
            self._refused(sender, message)
        return False

    def heard(self, sender: str, message: Message) -> None:
        handle = self._handle.get(type(message))
        if handle is None:
            self.counters["unexpected"] += 1
            return
        handle(sender, message)

    def lost(self, peer: str) -> None:
        if peer in self.members:  # only our connection to it broke: the coordinator says when it is gone
            for coordinator in self.registration.coordinators:
                self.say(coordinator, Severed(peer))
            # Until then it may still look at what we sent: its slots must not be written again.
            self.lanes.cut(peer)
            self._loop.call_later(MEET_AGAIN_S, self._meet_again, peer)
            return
        self._forget(peer)
        if self._leader is not None and self._leader.is_follower(peer):
            self._on_failed(next(iter(self.stages)), ConnectionError(f"a follower rank ({peer}) is gone"))
        elif self.registration.lost(peer):
            orphans = sum(stage.intake.abort_owner(peer) for stage in self.stages.values())
            log.warning("coordinator %s is gone; %d of its requests aborted", peer, orphans)

    # --- stage.outbox.Surroundings ------------------------------------------------------------------------------

    def sibling(self, name: str) -> Intake | None:
        stage = self.stages.get(name)
        return stage.intake if stage is not None else None

    def say(self, peer: str, message: Message) -> bool:
        return self.channels.send(peer, message)

    def shared(self, source: str, target: str, request_id: str, value: Any, where: str) -> Any:
        isolated = payloads.isolate(value, where=where)
        if self._watch is not None:
            self._watch.handed(source, target, request_id, isolated, where)
        return isolated

    def began(self, stage: str, request_id: str) -> None:
        if self._watch is not None:
            self._watch.began(stage, request_id)

    def ended(self, stage: str, request_id: str) -> None:
        if self._watch is not None:
            self._watch.ended(stage, request_id)

    # --- what the process does with it --------------------------------------------------------------------------

    def release(self, peer: str, transfer: int) -> None:
        """The last view of what a peer put has died: tell it, all that died lately in one message."""
        if not self._releases:
            self._loop.call_soon(self._send_releases)
        self._releases.setdefault(peer, []).append(transfer)

    def beat(self) -> None:
        """Tell every coordinator how it goes."""
        self._rest.beat(self.relays)
        said = Beat(
            {name: stage.waiting for name, stage in self.stages.items()},
            {name: stage.running for name, stage in self.stages.items()},
            {name: stage.inbox.taken for name, stage in self.stages.items()},
            self.gauges(),
        )
        for coordinator in self.registration.coordinators:
            self.say(coordinator, said)

    def gauges(self) -> dict[str, float]:
        found: dict[str, float] = {f"relay_{name}": float(value) for name, value in self.relays.stats().items()}
        found["lanes_outstanding"] = float(self.lanes.outstanding)
        found["lanes_queued"] = float(self.lanes.queued)
        for name, count in (self.channels.counters + self.counters).items():
            found[f"control_{name}"] = float(count)
        return found

    def reborn(self, incarnation: str) -> None:
        """Everything that the life before was asked for is dropped; `wire` must follow."""
        for stage in self.stages.values():
            stage.intake.abort_all()
        self._fetching.close()
        self._releases.clear()
        self.members.clear()
        self.incarnation = incarnation

    def announce_ready(self) -> None:
        self._ready = True
        for coordinator in self.registration.coordinators:
            self.say(coordinator, Ready())

    def goodbye(self, reason: str) -> None:
        """Bind nothing new to us; and what has not begun here may go to another instance, if there is one."""
        for stage in self.stages.values():
            if stage.plan.entry:
                for work in stage.intake.works():
                    if work.began_at is None:
                        self.say(work.owner, HandBack(work.request_id, work.attempt, stage.plan.name))
        for coordinator in self.registration.coordinators:
            self.say(coordinator, Goodbye(reason))

    @property
    def idle(self) -> bool:
        """No request is at any stage, nothing waits to be sent, nobody holds a slot of ours."""
        busy = any(stage.waiting or stage.running for stage in self.stages.values())
        return not busy and not self.lanes.outstanding and not self.lanes.queued

    def close(self, timeout_s: float) -> bool:
        """Stop the stages' threads. False when one did not end in time."""
        ended = [stage.close(timeout_s) for stage in self.stages.values()]
        self._fetching.close()
        return all(ended)

    def _refused(self, sender: str, message: Refused) -> None:
        log.error("a coordinator refuses this process: %s", message.reason)
        self.counters["refused"] += 1
        if message.buried:
            self._on_buried()

    # --- requests -----------------------------------------------------------------------------------------------

    def _submit(self, sender: str, message: Submit) -> None:
        intake = self._target(message.target)
        if intake is not None:
            self._fetching.fetch(
                sender,
                message.body,
                attempt_key(message.header.request_id, message.header.attempt),
                lambda fetched: intake.payload(message.header, "", fetched),
                lambda error: intake.lost(message.header, error),
                holder=message.target,
            )

    def _data_ready(self, sender: str, message: DataReady) -> None:
        intake = self._target(message.target)
        if intake is None:
            return
        header, source, body = message.header, message.source, message.body
        if message.failure is not None:
            intake.broken(header, source, message.failure)
        elif message.is_done:
            intake.end(header, source, message.chunk_id or 0)
        elif body is not None:
            self._fetching.fetch(
                sender,
                body,
                attempt_key(header.request_id, header.attempt),
                lambda fetched: self._arrived(intake, message, fetched),
                lambda error: intake.lost(header, error),
                holder=message.target,
            )

    @staticmethod
    def _arrived(intake: Intake, message: DataReady, fetched: Fetched) -> None:
        if message.chunk_id is None:
            intake.payload(message.header, message.source, fetched, message.timings)
        else:
            intake.chunk(message.header, message.source, message.chunk_id, message.modality, fetched, message.weight)

    def _abort(self, sender: str, message: Abort) -> None:
        for stage in self.stages.values():
            stage.intake.abort(message.owner, message.request_id, message.attempt)
        self.lanes.drop_cancelled()
        self.relays.cleanup(attempt_key(message.request_id, message.attempt))

    def _pass_abort(self, sender: str, message: PassAbort) -> None:
        """One coordinator is asked to abort what another one owns: we know them all."""
        owners = forwarding.owners(message.asker, self.registration.coordinators)
        for owner in owners:
            self.say(owner, message)
        if not owners:
            self.say(sender, AbortPassed(message.request_id, message.asker, False))

    def _abort_passed(self, sender: str, message: AbortPassed) -> None:
        owners = len(forwarding.owners(message.asker, self.registration.coordinators))
        self.say(message.asker, AbortPassed(message.request_id, message.asker, message.aborted, owners))

    def _ended(self, sender: str, message: Ended) -> None:
        for request_id, attempt in message.requests:
            for stage in self.stages.values():
                stage.intake.abort(sender, request_id, attempt)

    def _release(self, sender: str, message: Release) -> None:
        self.lanes.released(sender, message.transfers)

    def _consumed(self, sender: str, message: Consumed) -> None:
        tell_consumed(self.sibling(message.source), message)

    # --- members ------------------------------------------------------------------------------------------------

    def _welcome(self, sender: str, message: Welcome) -> None:
        self.registration.welcomed_again(sender, message)
        self.relays.open(sender, message.coordinator.relays)
        self._meet(message.members)
        if self._ready:
            self.say(sender, Ready())

    def _members(self, sender: str, message: Members) -> None:
        self._meet(message.joined)
        for peer in message.gone:
            if self.members.pop(peer, None) is not None:
                self.channels.drop(peer)
                self._forget(peer)

    def _meet(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.incarnation == self.incarnation or not self._neighbours.intersection(member.stages):
                continue
            self.members[member.incarnation] = member
            self.channels.connect(member.incarnation, member.endpoint)
            self.relays.open(member.incarnation, member.relays)

    def _meet_again(self, peer: str) -> None:
        member = self.members.get(peer)
        if member is not None and self.channels.link(peer) is None:
            self._forget(peer)
            self._meet([member])

    def _forget(self, peer: str) -> None:
        self.lanes.forget(peer)

    # --- inside -------------------------------------------------------------------------------------------------

    def _target(self, name: str) -> Intake | None:
        intake = self.sibling(name)
        if intake is None:
            self.counters["misdirected"] += 1
            log.warning("message for stage %r, which is not in this process", name)
        return intake

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

    def _rank_hello(self, sender: str, message: RankHello) -> None:
        assert self._leader is not None
        if message.ready:
            self._leader.ready.add(sender)
            self._check_loaded()

    def _rank_failed(self, sender: str, message: RankFailed) -> None:
        """Computing failed on one rank. On all of them: rank 0 says so itself. On that one alone: they are apart."""

        def look() -> None:
            for name, stage in self.stages.items():
                if any(work.request_id == message.request_id and not work.over for work in stage.intake.works()):
                    error = RuntimeError(f"rank {message.rank} failed alone, the ranks are apart: {message.error}")
                    self._on_failed(name, error)

        self._loop.call_later(RANKS_AGREE_S, look)

    def _stage_crashed(self, name: str, error: BaseException) -> None:
        self._administration.crashed(name, error)
        self._loop.call_soon_threadsafe(self._on_failed, name, error)

    def _send_releases(self) -> None:
        releases, self._releases = self._releases, {}
        for peer, transfers in releases.items():
            self.say(peer, Release(tuple(transfers)))
