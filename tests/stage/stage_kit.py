"""Processes of stages in one test: real hosts, engines and send queues; links and relays in memory.

Messages are written and read by the codec as on a wire. The test decides which link delivers next. Payloads go
through a relay whose slots are free when the last view of them dies, as with shared memory.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import numpy as np

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.making.loading import as_engine
from stage_runtime.errors import LimitReached, TransferError
from stage_runtime.payloads import encoding
from stage_runtime.stage.host import Host
from stage_runtime.stage.inputs.mutation_check import MutationCheck
from stage_runtime.transfers.receiving import Fetched
from stage_runtime.wire import codec
from stage_runtime.wire.frames import PROTOCOL, Frame
from stage_runtime.wire.messages import Abort, Complete, Message, Stream, Submit
from stage_runtime.wire.parts import Body, Failure, Header
from stage_runtime.wire.values import OmniRequest
from tests.patience import patience
from tests.transfers.memory_relays import MemoryRelays

OWNER = "cc"
PATIENCE_S = patience(60.0)


class Got:
    """`relays.base.RelayOperation` of the receiver: here at once."""

    def __init__(self, view: memoryview) -> None:
        self._view: memoryview | None = view

    def done(self) -> bool:
        return True

    def take(self) -> memoryview:
        view, self._view = self._view, None
        assert view is not None
        return view

    def take_device(self) -> None:
        return None


class WorldRelays(MemoryRelays):
    """Those of one process of a world: it reads what the others hold for it."""

    def __init__(self, world: World, me: str, slots: int) -> None:
        super().__init__(slots)
        self._world = world
        self._me = me
        self.breaks: set[str] = set()  #: Requests whose payloads cannot be fetched here.
        self.fetched: list[str] = []  #: Names of fetched payloads, as given to `get`.

    def get(self, metadata: bytes, *, request_id: str, peer: str, holder: str = "") -> Got:
        self.fetched.append(request_id)
        if request_id.partition("/")[2].partition("#")[0] in self.breaks:
            raise TransferError("the slot is gone")
        transfer = int.from_bytes(metadata, "big")
        data = self._world.relays[peer].held[self._me, transfer].data
        slot = np.ndarray((len(data),), np.uint8, bytearray(data))
        weakref.finalize(slot, self._world.died, self._me, peer, transfer)
        return Got(slot.data)

    def decline(self, metadata: bytes, *, peer: str) -> None:
        self._world.died(self._me, peer, int.from_bytes(metadata, "big"))


class MemoryChannels:
    """The methods of `sockets.channels.Channels` that hosts and coordinators call."""

    def __init__(self, world: World, me: str) -> None:
        self._world = world
        self._me = me
        self.counters: Counter[str] = Counter()
        self.gone: set[str] = set()
        self.published: list[Message] = []
        self.full = ""  #: Why a link is refused.

    def send(self, peer: str, message: Message) -> bool:
        if peer in self.gone or peer not in self._world.known:
            return False
        self._world.send(self._me, peer, message)
        return True

    def send_now(self, peer: str, message: Message) -> bool:
        return self.send(peer, message)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hint(self, peer: str, message: Message) -> None:
        self.send(peer, message)

    def publish(self, message: Message) -> None:
        self.published.append(message)

    def connect(self, peer: str, endpoint: str, *, asleep: bool = False) -> Any:
        if self.full:
            raise LimitReached(self.full)
        self.gone.discard(peer)
        return self.link(peer)

    def link(self, peer: str) -> Any:
        return None

    def drop(self, peer: str) -> None:
        self.gone.add(peer)


class Uneventful:
    """`stage.host.Lifecycle` of a process that goes on whatever happens."""

    def __init__(self, name: str, failures: list[tuple[str, BaseException]], fenced: list[str]) -> None:
        self._name = name
        self._failures = failures
        self._fenced = fenced

    def loaded(self) -> None: ...

    def failed(self, stage: str, error: BaseException) -> None:
        self._failures.append((stage, error))

    def unbound(self, coordinator: str) -> None: ...

    def fenced(self) -> None:
        self._fenced.append(self._name)


class Registered:
    """`stage.control.registration.Registration`, done."""

    def __init__(self) -> None:
        self.coordinators = {OWNER: None}

    def lost(self, peer: str) -> bool:
        return self.coordinators.pop(peer, self) is None

    def ask_beats(self, coordinator: str, beat_s: float) -> None: ...

    def welcomed_again(self, sender: str, message: Message) -> None:
        self.coordinators[sender] = None


class World:
    """All processes, and what is under way between them."""

    def __init__(self, seed: int = 0) -> None:
        self.known: set[str] = {OWNER}
        self.hosts: dict[str, Host] = {}
        self.relays: dict[str, WorldRelays] = {}
        self.links: dict[tuple[str, str], deque[bytes]] = {}
        self.received: list[Message] = []  #: Messages received by coordinators, in order.
        self.received_by: list[tuple[str, Message]] = []  #: The same, with the coordinator's incarnation.
        self.stage_of: dict[str, str] = {}  #: stage -> incarnation
        self.away: tuple[str, ...] = ()  #: Stages that requests have no instance of.
        self.streams = False  #: Clients of requests read what is computed at once.
        self.failures: list[tuple[str, BaseException]] = []
        self.fenced: list[str] = []  #: Processes that must take a new incarnation.
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self.relays[OWNER] = WorldRelays(self, OWNER, 1000)

    def process(
        self,
        name: str,
        plans: Sequence[StagePlan],
        functions: Mapping[str, Any],
        *,
        slots: int = 1000,
        mutation_check: MutationCheck | None = None,
        **options: Any,
    ) -> Host:
        """options: others of `Host`."""
        host = Host(
            plans,
            Uneventful(name, self.failures, self.fenced),
            incarnation=name,
            loop=self._loop,
            mutation_check=mutation_check,
            **options,
        )
        self.known.add(name)
        self.relays[name] = WorldRelays(self, name, slots)
        host.wire(MemoryChannels(self, name), Registered(), self.relays[name])  # type: ignore[arg-type]
        self.hosts[name] = host
        self.stage_of |= {plan.name: name for plan in plans}
        host.load(lambda plan: as_engine(functions[plan.name], sources=plan.stream_from))
        return host

    def coordinator(self, name: str) -> None:
        """Another one beside `OWNER`, as in a roll."""
        self.known.add(name)
        self.relays[name] = WorldRelays(self, name, 1000)

    def died(self, holder: str, peer: str, transfer: int) -> None:
        """The last view of a slot is gone; in any thread, as with the real relays."""
        host = self.hosts.get(holder)
        if host is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(host.release, peer, transfer)

    # --- what coordinators send ------------------------------------------------------------------------------

    def header(self, request_id: str, attempt: int = 1, owner: str = OWNER) -> Header:
        return Header(request_id, attempt, owner, dict(self.stage_of), 60_000, away=self.away, streamed=self.streams)

    def submit(self, request_id: str, target: str, data: Any = None, *, attempt: int = 1, owner: str = OWNER) -> None:
        fields = {"request": OmniRequest(id=request_id, inputs=data), "data": data}
        extracted = encoding.extract(fields, where="request", as_fields=True)
        assert extracted.is_inline
        body = Body(extracted.value_bytes, tuple(extracted.refs), extracted.flat())
        self.send(owner, self.stage_of[target], Submit(self.header(request_id, attempt, owner), target, body))

    def abort(self, request_id: str, attempt: int = 1, owner: str = OWNER) -> None:
        for name in self.hosts:
            self.send(owner, name, Abort(request_id, attempt, owner, "cancelled"))

    def send(self, sender: str, receiver: str, message: Message) -> None:
        frame = codec.encode(Frame(PROTOCOL, sender, receiver, 1, 1, 1, 0, message))
        self.links.setdefault((sender, receiver), deque()).append(
            frame
        )  # one step: several threads say their first word

    # --- delivering ---------------------------------------------------------------------------------------------

    def deliver_one(self) -> bool:
        """One message of any link that has some. False: nothing is under way."""
        ready = [link for link, frames in list(self.links.items()) if frames]
        if not ready:
            return False
        sender, receiver = self._random.choice(ready)
        message = codec.decode(self.links[sender, receiver].popleft()).message
        if receiver in self.hosts:
            self.hosts[receiver].received(sender, message)
        else:
            self.received.append(message)
            self.received_by.append((receiver, message))
        return True

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                if not self.deliver_one():
                    await asyncio.sleep(0.001)
                elif self._random.random() < 0.2:
                    await asyncio.sleep(0)

    async def settle(self) -> None:
        """Wait until nothing has been under way for a while, and for the results of threads that still compute."""
        quiet = 0
        while quiet < 20:
            quiet = 0 if self.deliver_one() else quiet + 1
            await asyncio.sleep(0 if quiet == 0 else 0.002)

    # --- what coordinators have received --------------------------------------------------------------------------

    def results(self) -> dict[str, Any]:
        """request -> what its terminal gave."""
        return {
            one.request_id: self.opened(one.body, one.source)
            for one in self.received
            if isinstance(one, Complete) and one.body is not None
        }

    def failed(self) -> dict[str, Failure]:
        return {
            one.request_id: one.failure
            for one in self.received
            if isinstance(one, Complete) and one.failure is not None
        }

    def ended(self) -> set[str]:
        """Requests of which a terminal is through, or that failed."""
        return {one.request_id for one in self.received if isinstance(one, Complete)}

    def streamed(self, request_id: str) -> list[Stream]:
        return [one for one in self.received if isinstance(one, Stream) and one.request_id == request_id]

    def opened(self, body: Body, source: str) -> Any:
        if body.transfer:
            sender = self.stage_of[source]
            data = self.relays[sender].held[OWNER, int.from_bytes(body.transfer, "big")].data
            return Fetched(body, bytearray(data)).open()
        return Fetched(body, None).open()

    @property
    def outstanding(self) -> int:
        """Transfers that a stage has not released."""
        return sum(key[0] != OWNER for relays in self.relays.values() for key in relays.held)


@asynccontextmanager
async def world(seed: int = 0) -> AsyncIterator[World]:
    made = World(seed)
    try:
        yield made
    finally:
        for host in made.hosts.values():
            assert host.close(PATIENCE_S), "a stage does not end"


def plan(name: str, **fields: Any) -> StagePlan:
    return StagePlan(name=name, group=name, factory="x:y", **fields)
