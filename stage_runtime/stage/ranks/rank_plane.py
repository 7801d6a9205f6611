"""Rank 0's connections to the followers of a TP stage: separate links and relays, for the life of the process.

A coordinator may declare rank 0 dead, which then takes a new incarnation and opens its other planes anew. The followers
must not notice: their engines are in the same steps, and a step that is lost between two lives would leave them apart.
So this plane has an incarnation that no coordinator knows. All ranks are replaced together where it breaks. It
implements `sockets.frames.receiving.Handler`. Called by
`processes.stages.stage_process`, which opens it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stage_runtime.errors import ProtocolError
from stage_runtime.relays.dispatch import Relays
from stage_runtime.rules.flow.watched_time import LATE_S
from stage_runtime.sockets.channels import Channels
from stage_runtime.stage.ranks.tensor_parallel import Leader
from stage_runtime.stage.stage import Stage
from stage_runtime.transfers.sending import SendQueues
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import (
    Beat,
    Message,
    ProfilerReply,
    RankAnswer,
    RankFailed,
    RankHello,
    RankQuestion,
    Release,
)

GREET_EVERY_S: Final = 0.1
RANKS_AGREE_S: Final = 5.0  # within which all ranks have raised what one has raised


class RankPlane:
    """The links to all followers. They run on the I/O thread."""

    def __init__(
        self,
        leader: Leader,
        stage: Stage,
        *,
        loop: asyncio.AbstractEventLoop,
        on_ready: Callable[[], None],
        on_apart: Callable[[BaseException], None],
        on_lost: Callable[[BaseException], None],
        answer: Callable[[str, Message], object],
    ) -> None:
        """on_ready: a follower has loaded its engine. on_apart: computing failed on one rank alone. on_lost, in any
        thread: a follower is gone or cannot follow. answer: sends to a coordinator.
        """
        self._leader = leader
        self._stage = stage
        self._loop = loop
        self._on_ready = on_ready
        self._on_apart = on_apart
        self._on_lost = on_lost
        self._answer = answer
        self.gauges: dict[int, Mapping[str, float]] = {}  #: rank -> the numbers of its planes, as of its last beat.
        self._unasked: list[RankQuestion] = []  #: Questions for followers that have not answered yet.
        self._endpoint = ""
        self._channels: Channels
        self._relays: Relays
        self._send_queues: SendQueues

    def wire(self, channels: Channels, relays: Relays, *, endpoint: str) -> None:
        self._channels = channels
        self._relays = relays
        self._endpoint = endpoint
        self._send_queues = SendQueues(relays, channels.send)
        self._leader.wire(channels, self._send_queues, self._stage.plan.name, self._on_lost)

    async def greet(self) -> None:
        """Find the followers."""
        while not self._leader.complete():
            self._leader.greet(lambda via: RankHello(0, self._endpoint, self._relays.facts(), via))
            await asyncio.sleep(GREET_EVERY_S)

    @property
    def idle(self) -> bool:
        """Whether every follower has received all steps."""
        return not self._send_queues.outstanding and not self._send_queues.queued

    def ask(self, coordinator: str, message: RankQuestion) -> None:
        """Pass a coordinator's question on to a follower, as soon as it has answered rank 0's first message."""
        self._unasked.append(msgspec.structs.replace(message, asker=coordinator))
        self._ask_who_is_here()

    def _ask_who_is_here(self) -> None:
        waiting, self._unasked = self._unasked, []
        for message in waiting:
            follower = self._leader.follower(message.rank)
            if follower is not None:
                self._channels.send(follower, message)
            elif 0 < message.rank <= len(self._leader.endpoints):
                self._unasked.append(message)
            else:
                now = time.time_ns()
                problem = f"this stage has no rank {message.rank}"
                self._answer(message.asker, ProfilerReply(message.question.call_id, now, now, error=problem))

    # --- sockets.frames.receiving.Handler ----------------------------------------------------------------------

    def introduced(self, sender: str, message: Message) -> bool:
        if not isinstance(message, RankHello) or not self._leader.introduced(sender, message):
            return False
        self._relays.open(sender, message.relays)
        self._loop.call_soon(self._ask_who_is_here)  # once it has its link
        return True

    def received(self, sender: str, message: Message) -> None:
        match message:
            case RankHello(ready=True):
                self._leader.ready.add(sender)
                self._on_ready()
            case RankFailed():
                self._check_later(message)
            case RankAnswer():
                self._answer(message.asker, message.answer)
            case Beat():
                self.gauges[self._leader.rank_of(sender)] = message.gauges
            case Release():
                self._send_queues.released(sender, message.transfers)

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None:
        self._on_lost(ProtocolError(f"a message of a follower rank ({sender}) could not be read: {problem}"))

    def lost(self, peer: str) -> None:
        self._send_queues.forget(peer)
        if self._leader.is_follower(peer):
            self._on_lost(ConnectionError(f"a follower rank ({peer}) is gone"))

    def release(self, peer: str, transfer: int) -> None:
        """Followers send nothing by relay."""

    def _check_later(self, message: RankFailed, again: bool = True) -> None:
        due = self._loop.time() + RANKS_AGREE_S
        self._loop.call_at(due, self._check_agreement, message, due, again)

    def _check_agreement(self, message: RankFailed, due: float, again: bool) -> None:
        """Computing failed on one rank.

        If all ranks failed, rank 0 reports it; if only this one, the ranks have diverged. again: this process was
        stopped meanwhile, and rank 0 with it, so it waits once more.
        """
        if again and self._loop.time() > due + LATE_S:
            self._check_later(message, again=False)
            return
        work = self._stage.input.find(message.owner, message.request_id, message.attempt)
        if work is not None and not work.over:
            self._on_apart(
                RuntimeError(f"rank {message.rank} failed alone, so the ranks have diverged: {message.error}")
            )
