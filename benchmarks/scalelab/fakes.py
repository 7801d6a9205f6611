"""A light instance: real `Channels`, registration and membership of a stage process; no engine, no relay, no threads.

It passes each request to the next stage, or completes it, as a stage process would. Many of them share one process
and one loop (`instances`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from omnipipeline_spec.types.plan import PipelineRevision, StagePlan
from stage_runtime.payloads import encoding
from stage_runtime.rules.flow import ticks
from stage_runtime.rules.graph import edges
from stage_runtime.sockets.channels import Channels, LinkTimes
from stage_runtime.stage.control.registration import Registration
from stage_runtime.stage.control.stage_membership import StageMembership
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import Beat, Complete, DataReady, Hello, Message, Rejected, Submit, Unbound, Welcome
from stage_runtime.wire.parts import Body, Failure, Header, Member, Timing

GROUPS: Final = tuple(f"stage{number}" for number in range(10))  #: One stage each, one after the other.
PIPELINE: Final = "scale"
BEAT_S: Final = 1.0
IDLE_AFTER_S: Final = 60.0  # as a stage process
FACTS: Final = {"tcp": {"endpoint": "tcp://127.0.0.1:5551", "token": "0" * 32}}  # as large as real ones


def revision_of(unit_revision: str, groups: tuple[str, ...] = GROUPS) -> PipelineRevision:
    """The pipeline revision in which all units have this revision."""
    return PipelineRevision(
        revision=unit_revision,
        units=dict.fromkeys(groups, unit_revision),
        groups={name: name for name in groups},
        stages={name: name for name in groups},
        entry=groups[0],
        terminals=(groups[-1],),
        edges=tuple((source, target, "normal") for source, target in itertools.pairwise(groups)),
    )


def plan_of(group: str, groups: tuple[str, ...] = GROUPS) -> StagePlan:
    at = groups.index(group)
    return StagePlan(
        name=group,
        group=group,
        factory="none",
        entry=at == 0,
        terminal=at == len(groups) - 1,
        next=groups[at + 1 : at + 2],
        inputs_from=groups[max(at - 1, 0) : at],
    )


class NoRelays:
    """The part of `relays.dispatch.Relays` that is used when all payloads ride in their messages."""

    def facts(self) -> dict[str, Any]:
        return FACTS

    def open(self, peer: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
        return ()

    def forget(self, peer: str) -> None: ...

    def cleanup(self, request_id: str) -> None: ...

    def settle(self) -> None: ...

    def stats(self) -> dict[str, int]:
        return {}


def _result() -> Body:
    extracted = encoding.extract("done", where="result")
    return Body(extracted.value_bytes, tuple(extracted.refs), extracted.flat())


RESULT: Final = _result()


class LightInstance:
    """One instance of one group. `sockets.frames.receiving.Handler`."""

    def __init__(
        self,
        group: str,
        unit_revision: str,
        *,
        folder: str,
        coordinators: tuple[str, ...],
        dead_after_s: float = 3.0,
        loop: asyncio.AbstractEventLoop,
        work_s: Callable[[], float] = lambda: 0.0,
        groups: tuple[str, ...] = GROUPS,
        fenced: Callable[[LightInstance], None] = lambda instance: None,
    ) -> None:
        """work_s: how long it takes for the next request; 0: none. fenced: a coordinator has declared it dead."""
        self.incarnation = secrets.token_hex(8)
        self.heard: Counter[str] = Counter()  #: Messages by type.
        self.running = 0
        self.served = 0
        self.unsent = 0  #: Results for an instance to which it has no link.
        self.dropped = (
            0  #: Times that a coordinator said to have declared it dead alone: once per message it sent there.
        )
        self.load_s = 0.0  #: Requests here, summed over time.
        self._loop = loop
        self._work_s = work_s
        self._fenced: Callable[[LightInstance], None] | None = fenced  #: None: it was called.
        self._changed_at = loop.time()
        self._owing: set[str] = set()  #: Coordinators that have not said Unbound.
        self._plan = plan_of(group, groups)
        self._process = ProcessContext(self.incarnation)
        self._membership = StageMembership([self._plan], self._process, loop)
        self.channels = Channels(
            self,
            incarnation=self.incarnation,
            loop=loop,
            times=LinkTimes(dead_after_s, idle_after_s=IDLE_AFTER_S),
        )
        endpoint = self.channels.bind(f"ipc://{folder}/{self.incarnation}")
        relays: Any = NoRelays()
        self.member = Member(self.incarnation, group, group, unit_revision, endpoint, FACTS, (group,))
        self.registration = Registration(
            self.channels, endpoints=coordinators, resolve=_as_it_is, hello=self._hello, welcomed=lambda: None
        )
        self._process.wire(self.channels, relays)
        self._membership.wire(self.registration)
        self._membership.announce_ready()
        self._tasks = [loop.create_task(self.registration.run()), loop.create_task(self._beat())]

    @property
    def links(self) -> int:
        return len(self.channels.peers)

    @property
    def members(self) -> set[str]:
        """The instances that it was introduced to."""
        return set(self._membership.members)

    @property
    def beat_s(self) -> float:
        """The shortest time between two beats that its coordinators ask for."""
        return self.registration.beat_s

    async def drain(self) -> None:
        """Leave as a stage process does: no new request, the bound ones to their end."""
        self._owing = set(self.registration.coordinators)
        self._membership.deregister("a roll")
        async with asyncio.timeout(60):
            while self._owing or self.running:
                await asyncio.sleep(0.05)
        await self.channels.settled(5.0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._membership.reset()  # its timers connect to nobody any more
        self.channels.close()

    def account(self) -> float:
        """Requests here, summed over time until now."""
        now = self._loop.time()
        self.load_s += self.running * (now - self._changed_at)
        self._changed_at = now
        return self.load_s

    def send(self, peer: str, message: Message) -> bool:
        return self._process.send(peer, message)

    # --- sockets.frames.receiving.Handler ----------------------------------------------------------------------

    def introduced(self, sender: str, message: Message) -> bool:
        self.heard[type(message).__name__] += 1
        if isinstance(message, DataReady):
            return self._membership.introduced(sender, message.header.members, by=message.header.owner)
        if isinstance(message, Rejected):
            self._rejected(sender, message)
        return isinstance(message, Welcome) and self.registration.welcomed(sender, message)

    def received(self, sender: str, message: Message) -> None:
        self.heard[type(message).__name__] += 1
        match message:
            case Submit() | DataReady():
                self._membership.meet(message.header.members, by=message.header.owner)
                self.work(message)
            case Welcome():
                self._membership.welcome(sender, message)
            case Unbound():
                self._owing.discard(sender)
            case Rejected():
                self._rejected(sender, message)
            case _:
                handler = self._membership.handlers.get(type(message))
                if handler is not None:
                    handler(sender, message)

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None:
        raise AssertionError(problem)

    def lost(self, peer: str) -> None:
        self._owing.discard(peer)
        self._membership.lost(peer)

    def _rejected(self, sender: str, message: Rejected) -> None:
        """Does what `stage.host` does with this message."""
        if not message.fenced:
            self.registration.refused(message.via)
        elif not self._membership.must_be_renewed(sender, message):
            self.dropped += 1
            if sender in self.registration.coordinators:
                self.channels.drop(sender)
                self.lost(sender)
        elif message.incarnation == self.incarnation:
            fenced, self._fenced = self._fenced, None
            if fenced is not None:
                fenced(self)

    # --- inside -------------------------------------------------------------------------------------------------

    def _hello(self, via: str) -> Hello:
        return Hello(self.member, edges.of_process([self._plan]), PIPELINE, via)

    def work(self, message: Submit | DataReady) -> None:
        """Serve a request."""
        header = message.header
        self.account()
        self.running += 1
        takes_s = self._work_s()
        if takes_s:
            self._loop.call_later(takes_s, self._done, header)
        else:
            self._done(header)

    def _done(self, header: Header) -> None:
        self.account()
        self.running -= 1
        self.served += 1
        stage = self._plan.name
        if self._plan.terminal:
            complete = Complete(header.request_id, header.attempt, stage, RESULT, timings=(Timing(stage, 1, 1),))
            self._process.send(header.owner, complete)
            return
        (target,) = self._plan.next
        if not self._process.send(header.bindings[target], DataReady(header, stage, target, RESULT)):
            self.unsent += 1  # as `stage.outputs.stage_output` does
            failure = Failure("transport_failed", f"no connection to the instance of {target}", stage, "relay")
            self._process.send(header.owner, Complete(header.request_id, header.attempt, stage, failure=failure))

    def beat(self) -> None:
        """Report the load now."""
        stage = self._plan.name
        self._membership.hint(Beat({stage: 0}, {stage: self.running}, {stage: self.served}))

    async def _beat(self) -> None:
        while True:
            beat_s = max(BEAT_S, self.beat_s)
            least_s = beat_s * random.uniform(0.1, 1.9)
            await asyncio.sleep(ticks.delay_s(time.time(), least_s, beat_s / ticks.BEAT_TICKS))
            self.beat()


async def _as_it_is(endpoint: str) -> list[str]:
    return [endpoint]
