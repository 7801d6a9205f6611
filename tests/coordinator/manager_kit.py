"""A coordinator whose processes are played by the test: real request manager, membership, rules and send queues; links
in memory.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from omnipipeline_spec.types.plan import CoordinatorPlan, PipelineRevision
from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.coordinator.answering.unread_answers import DEFAULT_LIMITS, AnswerLimits
from stage_runtime.coordinator.coordinator import Coordinator
from stage_runtime.coordinator.events import ChunkEvent, RequestRecord, ResultEvent
from stage_runtime.coordinator.membership import DEFAULT_TIMES, MembershipTimes
from stage_runtime.errors import LimitReached, RequestError
from stage_runtime.payloads import encoding
from stage_runtime.rules.graph import edges
from stage_runtime.transfers.receiving import Fetched
from stage_runtime.wire import codec
from stage_runtime.wire.frames import PROTOCOL, Frame
from stage_runtime.wire.messages import Abort, Complete, Hello, Message, Ready, Rejected, Stream, Submit
from stage_runtime.wire.parts import Body, Failure, Member, Timing
from stage_runtime.wire.values import OmniRequest
from tests.coordinator.set_clock import SetClock
from tests.patience import patience
from tests.transfers.memory_relays import MemoryRelays

ME = "cc"
PATIENCE_S = patience(60.0)


class MemoryChannels:
    """Keeps what is sent, by peer; every message can be written and read."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.other_protocol_at = -math.inf
        self.linked: set[str] = set()
        self.full = False  #: No room for another link.
        self.interrupted: set[str] = set()
        self.sent: dict[str, list[Message]] = defaultdict(list)
        self.published: list[Message] = []
        self.may_wait: Callable[[], bool]

    def send(self, peer: str, message: Message) -> bool:
        if peer not in self.linked:
            return False
        self.sent[peer].append(codec.decode(codec.encode(Frame(PROTOCOL, ME, peer, 1, 1, 1, 0, message))).message)
        return True

    def hint(self, peer: str, message: Message) -> None:
        self.send(peer, message)

    def allow_paced_reads(self, allowed: Callable[[], bool]) -> None:
        self.may_wait = allowed

    def publish(self, message: Message) -> None:
        self.published.append(message)

    def connect(self, peer: str, endpoint: str) -> None:
        if self.full:
            raise LimitReached("no descriptors")
        self.linked.add(peer)

    def link(self, peer: str) -> Any:
        return peer if peer in self.linked else None

    def dismiss(self, peer: str, endpoint: str, message: Message) -> None:
        self.sent[peer].append(message)

    def drop(self, peer: str) -> None:
        self.linked.discard(peer)


REVISION = PipelineRevision(
    revision="rev1",
    units={"front": "f1", "voice": "v1"},
    groups={"front": "front", "voice": "voice"},
    stages={"split": "front", "shout": "voice", "write": "voice"},
    entry="split",
    terminals=("shout", "write"),
    edges=(("split", "shout", "normal"), ("split", "write", "stream")),
)
SCHEMAS = edges.of_revision(REVISION)
GROUP_STAGES = {"front": ("split",), "voice": ("shout", "write")}


class CoordinatorHarness:
    """The coordinator and everybody around it."""

    def __init__(
        self,
        plan: CoordinatorPlan,
        terminal_stages: Callable[[OmniRequest], Any] | None,
        revisions: tuple[PipelineRevision, ...],
        answer_limits: AnswerLimits,
        incarnation: str,
        times: MembershipTimes,
        clock: SetClock | None,
    ) -> None:
        loop: Any = clock or asyncio.get_running_loop()
        self.channels = MemoryChannels()
        self.relays = MemoryRelays()
        self.coordinator = Coordinator(plan, incarnation=incarnation, loop=loop, answer_limits=answer_limits)
        self.coordinator.wire(
            self.channels,  # type: ignore[arg-type]
            self.relays,  # type: ignore[arg-type]
            endpoint="ipc:///cc",
            publisher="ipc:///pub",
            revisions=revisions,
            terminal_stages=terminal_stages,
            times=times,
        )
        self.manager = self.coordinator.manager
        self.membership = self.coordinator.membership

    # --- processes ----------------------------------------------------------------------------------------------

    def record(self, request_id: str) -> RequestRecord:
        """The request manager's record of a request that it has admitted."""
        found = self.manager.record(request_id)
        assert found is not None
        return found

    def hello(
        self,
        incarnation: str,
        group: str,
        *,
        endpoint: str = "",
        revision: str = "",
        ready: bool = False,
        **fields: Any,
    ) -> bool:
        revision = revision or REVISION.units.get(group, "p1")
        endpoint = endpoint or f"ipc:///{incarnation}"
        member = Member(incarnation, group, group, revision, endpoint, {}, GROUP_STAGES.get(group, ()), ready)
        message = Hello(member, SCHEMAS.get(group, ""), "hello", "ipc:///cc")
        for name, value in fields.items():
            message = codec_replace(message, name, value)
        return self.coordinator.introduced(incarnation, message)

    def join(self, incarnation: str, group: str, **fields: Any) -> None:
        assert self.hello(incarnation, group, **fields)
        self.coordinator.received(incarnation, Ready())

    def submitted(self, incarnation: str) -> list[Submit]:
        return [one for one in self.channels.sent[incarnation] if isinstance(one, Submit)]

    def aborted(self, incarnation: str) -> list[tuple[str, int]]:
        return [(one.request_id, one.attempt) for one in self.channels.sent[incarnation] if isinstance(one, Abort)]

    def refused(self, incarnation: str) -> list[Rejected]:
        return [one for one in self.channels.sent[incarnation] if isinstance(one, Rejected)]

    # --- what stages send ---------------------------------------------------------------------------------------

    def chunk(self, sent: Submit, source: str, index: int, data: Any, *, attempt: int | None = None) -> None:
        header = sent.header
        message = Stream(header.request_id, attempt or header.attempt, source, index, body({"data": data}))
        self.coordinator.received(header.bindings.get(source, "v1"), message)

    def complete(self, sent: Submit, source: str, data: Any = None, *, chunks: int = 0, has_data: bool = True) -> None:
        header = sent.header
        timings = (Timing(source, 1000, 2000),)
        message = Complete(
            header.request_id, header.attempt, source, body(data) if has_data else None, chunks, timings=timings
        )
        self.coordinator.received(header.bindings.get(source, "v1"), message)

    def fail(self, sent: Submit, source: str, code: str = "stage_failed", message: str = "no", **facts: Any) -> None:
        header = sent.header
        complete = Complete(header.request_id, header.attempt, source, failure=Failure(code, message, source, **facts))
        self.coordinator.received(header.bindings.get(source, "v1"), complete)


def codec_replace(message: Hello, name: str, value: Any) -> Hello:
    fields = {field: getattr(message, field) for field in message.__struct_fields__}
    return Hello(**{**fields, name: value})


def body(value: Any) -> Body:
    extracted = encoding.extract(value, where="result")
    return Body(extracted.value_bytes, tuple(extracted.refs), extracted.flat())


def request_of(sent: Submit) -> OmniRequest:
    fields: dict[str, Any] = Fetched(sent.body, None).open()
    request: OmniRequest = fields["request"]
    return request


@asynccontextmanager
async def coordinator_harness(
    *,
    terminal_stages: Callable[[OmniRequest], Any] | None = None,
    revisions: tuple[PipelineRevision, ...] = (REVISION,),
    joined: bool = True,
    answer_limits: AnswerLimits = DEFAULT_LIMITS,
    incarnation: str = ME,
    times: MembershipTimes = DEFAULT_TIMES,
    clock: SetClock | None = None,
    **plan: Any,
) -> AsyncIterator[CoordinatorHarness]:
    """clock: None: the time of the running loop."""
    coordinator_plan = CoordinatorPlan(pipeline="hello", model="hello", **plan)
    made = CoordinatorHarness(coordinator_plan, terminal_stages, revisions, answer_limits, incarnation, times, clock)
    if joined:
        made.join("f1", "front")
        made.join("v1", "voice")
    try:
        yield made
    finally:
        made.manager.close()


async def came(look: Callable[[], Any]) -> Any:
    """The result of ``look``, as soon as it is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := look()):
            await asyncio.sleep(0.01)
    return found


async def read(handle: RequestHandle) -> list[ChunkEvent | ResultEvent]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in handle.events()]


async def error_of(handle: RequestHandle) -> RequestError:
    try:
        await read(handle)
    except RequestError as error:
        return error
    raise AssertionError("the request did not fail")


def new_request(request_id: str = "r1", *, stream: bool = False, inputs: Any = "hello") -> OmniRequest:
    return OmniRequest(id=request_id, inputs=inputs, stream=stream)


def events_of(handle: RequestHandle) -> AsyncGenerator[ChunkEvent | ResultEvent]:
    """Its events, for a reader that may close them early."""
    events = handle.events()
    assert isinstance(events, AsyncGenerator)
    return events
