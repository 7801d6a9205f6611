"""The process of a TP stage's rank 1..: no coordinator, no neighbours, only rank 0.

A `sockets.frames.receiving.Handler`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.base import Engine
from stage_runtime.engines.custom import EngineCrashed
from stage_runtime.engines.threads import stage_threads
from stage_runtime.errors import ProtocolError
from stage_runtime.metrics import planes
from stage_runtime.payloads import devices
from stage_runtime.profiler.recording.recorder import set_active_stage
from stage_runtime.profiler.recording.session import ProfileSession
from stage_runtime.relays.dispatch import Relays
from stage_runtime.sockets.channels import Channels
from stage_runtime.stage.control import administration
from stage_runtime.stage.control.process_profiling import ProcessProfiling
from stage_runtime.stage.ranks.rank_following import Follower, FollowerInbox, FollowerOutput
from stage_runtime.stage.ranks.tensor_parallel import WorkKey, couple
from stage_runtime.transfers.receiving import Fetching
from stage_runtime.transfers.releases import Releases
from stage_runtime.transfers.sending import attempt_key
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import (
    AdminReply,
    Beat,
    Message,
    ProfilerReply,
    RankAnswer,
    RankFailed,
    RankHello,
    RankQuestion,
    RankWork,
)

log = logging.getLogger(__name__)


class FollowerHost:
    """One follower rank: its engine, and the link to its leader."""

    def __init__(
        self,
        plan: StagePlan,
        *,
        rank: int,
        loop: asyncio.AbstractEventLoop,
        on_loaded: Callable[[], None],
        on_failed: Callable[[str, BaseException], None],
        on_lost: Callable[[str], None],
        profiles: Callable[[Callable[[], str]], ProfileSession],
    ) -> None:
        """profiles: makes this process's, of what returns its name."""
        self.counters: Counter[str] = Counter()
        self._plan = plan
        self._rank = rank
        self._loop = loop
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._on_lost = on_lost
        self._stop = Event()
        self._inbox = FollowerInbox()
        self._follower = Follower(self._inbox, devices.of_stage(plan, rank), reply=self._answer_operation)
        self._leader: str | None = None
        self._via = ""
        self._loaded = False
        self._releases = Releases(loop, lambda peer, message: self._channels.send(peer, message))
        self._endpoint = ""
        self._thread: Thread | None = None
        self._name = ""  #: The name that the coordinators use.
        self.profiles = profiles(lambda: self._name)
        # The engine learns of a profile in its place among rank 0's steps, as of every operation.
        self._profiling = ProcessProfiling(self.profiles, self._answer_coordinator, loop, notify=lambda _: None)
        self._channels: Channels
        self._relays: Relays
        self._fetching: Fetching

    def wire(self, channels: Channels, relays: Relays, *, endpoint: str) -> None:
        self._channels = channels
        self._relays = relays
        self._fetching = Fetching(relays, self._loop)
        self._endpoint = endpoint

    def load(self, make: Callable[[StagePlan], Engine]) -> None:
        self._thread = stage_threads.start(self._plan.name, self._run, make, crashed=self._crashed)

    def close(self, timeout_s: float = 0.0) -> None:
        """End the engine: its requests are aborted, so that `finally` blocks run, within ``timeout_s``."""
        self._stop.set()
        self._follower.abort_all()
        self._inbox.close()
        self._fetching.close()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # --- sockets.frames.receiving.Handler ----------------------------------------------------------------------

    def introduced(self, sender: str, message: Message) -> bool:
        if not isinstance(message, RankHello) or self._leader not in (None, sender):
            return False
        self._leader = sender
        self._via = message.via
        self._channels.connect(sender, message.endpoint)
        self._relays.open(sender, message.relays)
        self._answer()
        return True

    def received(self, sender: str, message: Message) -> None:
        if isinstance(message, RankWork):
            if message.body is None:
                self._follower.work(message, None)
            else:
                self._fetching.fetch(
                    sender,
                    message.body,
                    attempt_key(message.owner, message.request_id, message.attempt),
                    lambda fetched: self._follower.work(message, fetched),
                    lambda error: self._on_failed(self._plan.name, error),
                    holder=self._plan.name,
                )
        elif isinstance(message, RankHello):
            self._answer()
        elif isinstance(message, RankQuestion):
            self._name = message.incarnation
            self._profiling.handlers[type(message.question)](message.asker, message.question)

    def beat(self) -> dict[str, float]:
        """Send the numbers of this process's planes to rank 0. Returns: them."""
        self._profiling.beat()
        gauges = planes.gauges(
            relays=self._relays.stats(),
            transfers_in_flight=0,  # a follower sends nothing by relay
            sends_queued=0,
            events=self._channels.counters + self.counters,
            engines={self._plan.name: self._inbox.gauges},
        )
        if self._leader is not None:
            self._channels.hint(self._leader, Beat({}, {}, {}, gauges))
        return gauges

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None:
        """A step is missing and no later one can be taken: the ranks have diverged."""
        self._on_failed(self._plan.name, ProtocolError(f"a step of rank 0 could not be read: {problem}"))

    def lost(self, peer: str) -> None:
        self._on_lost(f"rank 0 ({peer}) is gone")

    # --- inside -------------------------------------------------------------------------------------------------

    def release(self, peer: str, transfer: int) -> None:
        self._releases.add(peer, transfer)

    def _answer(self) -> None:
        if self._leader is not None:
            message = RankHello(self._rank, self._endpoint, self._relays.facts(), self._via, self._loaded)
            self._channels.send(self._leader, message)

    def _answer_operation(self, asker: str, call_id: str, value: Any) -> None:
        """Send what this rank's engine answers to the coordinator that asked. Any thread may call this."""
        if asker:
            reply = AdminReply(call_id, self._plan.name, self._rank, value)
            administration.answer(lambda reply: self._answer_coordinator(asker, reply), reply)

    def _answer_coordinator(self, coordinator: str, reply: Message) -> bool:
        assert isinstance(reply, ProfilerReply | AdminReply)
        return self._leader is not None and self._channels.send(self._leader, RankAnswer(coordinator, reply))

    def _run(self, make: Callable[[StagePlan], Engine]) -> None:
        set_active_stage(self._plan.name)
        engine = make(self._plan)
        couple(engine, self._plan.name)
        self._loop.call_soon_threadsafe(self._now_loaded)
        silence = FollowerOutput(self._plan.name, failed=self._send_failed, crashed=self._crashed)
        engine.run(self._inbox, silence, self._stop)
        if not self._stop.is_set() and not self._inbox.closed:
            raise EngineCrashed("the engine's loop ended before it was asked to stop")

    def _crashed(self, error: BaseException) -> None:
        """The rank's thread has ended by an error. A thread of the stage calls it."""
        self._loop.call_soon_threadsafe(self._on_failed, self._plan.name, error)

    def _now_loaded(self) -> None:
        self._loaded = True
        self._answer()
        self._on_loaded()

    def _send_failed(self, key: WorkKey, error: str) -> None:
        if self._leader is not None:
            self._channels.send(self._leader, RankFailed(self._rank, key.request_id, key.owner, key.attempt, error))
