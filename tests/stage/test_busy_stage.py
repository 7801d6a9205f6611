"""A busy stage lets go of an ended request's data at once, wherever it waits, not when the stage is free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import stage_runtime as omni
from omnipipeline_spec.types.plan import RelayPlan, StagePlan
from stage_runtime.engines import events
from stage_runtime.errors import RequestError
from stage_runtime.wire.messages import Ended
from tests.stage.stage_kit import OWNER, PATIENCE_S, World, plan, world

LARGE = 256 << 10
COUNT = 12
MANY = RelayPlan(credits=64)  # with few, receivers copy out, and slots say nothing of what waits


class Hold:
    """Keeps the request called ``busy`` at a stage until it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()
        self.block, self.blocked = threading.Event(), threading.Event()

    async def stand_still(self, request_id: str) -> None:
        """Block the loop, once the others are taken."""
        self.begun.append(request_id)
        while request_id == "busy" and not self.block.is_set():
            await asyncio.sleep(0.001)
        self.blocked.set()
        assert self.go.wait(PATIENCE_S)

    def __call__(self, request_id: str) -> None:
        self.begun.append(request_id)
        if request_id == "busy":
            assert self.go.wait(PATIENCE_S)

    async def waiting(self, request_id: str) -> None:
        self.begun.append(request_id)
        while request_id == "busy" and not self.go.is_set():
            await asyncio.sleep(0.001)


def sync(hold: Hold) -> Any:
    def run(payload: omni.StagePayload) -> int:
        hold(payload.request.id)
        return 0

    return run


def batched(hold: Hold) -> Any:
    def run(payloads: list[omni.StagePayload]) -> list[int]:
        for payload in payloads:
            hold(payload.request.id)
        return [0] * len(payloads)

    return omni.Batched(run, max_batch=1, max_wait_s=0)


Wait = Callable[[Hold, str], Awaitable[None]]


def _async(wait: Wait) -> Callable[[Hold], Any]:
    def make(hold: Hold) -> Any:
        async def run(payload: omni.StagePayload) -> int:
            await wait(hold, payload.request.id)
            return 0

        return omni.Simple(run, concurrency=1)

    return make


def _streaming(wait: Wait) -> Callable[[Hold], Any]:
    def make(hold: Hold) -> Any:
        async def run(session: omni.Session) -> AsyncIterator[Any]:
            payload = await session.payload()
            await wait(hold, payload.request.id)
            yield omni.Result(0)

        return omni.Streaming(run, concurrency=1)

    return make


coroutine, stream = _async(Hold.waiting), _streaming(Hold.waiting)
#: Their event loop is blocked, with requests that it has taken and not begun.
blocked, blocked_stream = _async(Hold.stand_still), _streaming(Hold.stand_still)


def engine(hold: Hold) -> Any:
    class Engine:
        def run(self, inbox: Any, outbox: Any, stop: threading.Event) -> None:
            for event in inbox:
                if isinstance(event, events.Start):
                    hold(event.request_id)
                    outbox.put(events.Done(event.request_id, 0))
                    del event  # a loop that keeps what it has computed holds its sender's slot
                else:
                    hold.begun.append(f"abort of {event.request_id}")

    return Engine()


NAMES = ("sync", "batched", "async", "blocked", "streaming", "blocked streaming", "engine")
KINDS: tuple[Callable[[Hold], Any], ...] = (sync, batched, coroutine, blocked, stream, blocked_stream, engine)


def give(payload: omni.StagePayload) -> Any:
    return np.zeros(LARGE, np.uint8)


def front(**fields: Any) -> StagePlan:
    return plan("give", entry=True, next=("take",), relay=MANY, **fields)


async def occupied(made: World, hold: Hold) -> None:
    made.submit("busy", "give")
    await made.until(lambda: "busy" in hold.begun)


def put_back(made: World) -> Callable[[], bool]:
    """Whether the stage holds nothing but what it is busy with."""
    return lambda: made.outstanding <= 1 and sum(host.process.send_queues.queued for host in made.hosts.values()) == 0


@pytest.mark.proves("ended-while-busy")
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("end", ["abort", "coordinator lost", "ended"])
async def test_requests_that_end_at_a_busy_stage_free_their_slots_at_once(
    kind: Callable[[Hold], Any], end: str
) -> None:
    hold = Hold()
    async with world() as made:
        made.coordinator("dd")
        made.process("front", [front()], {"give": omni.Simple(give, concurrency=4)})
        made.process("back", [plan("take", terminal=True, inputs_from=("give",))], {"take": kind(hold)})
        await occupied(made, hold)
        for number in range(COUNT):
            made.submit(f"r{number}", "give", owner="dd")
        stage = made.hosts["back"].stages["take"]
        await made.until(lambda: stage.waiting == COUNT)
        if kind in (blocked, blocked_stream):
            await made.until(lambda: len(stage.inbox) == 0)
            hold.block.set()
            await made.until(hold.blocked.is_set)
        assert not put_back(made)(), "they hold something"
        match end:
            case "abort":
                for number in range(COUNT):
                    made.abort(f"r{number}", owner="dd")
            case "coordinator lost":
                for host in made.hosts.values():
                    host.membership.registration.coordinators["dd"] = None  # type: ignore[assignment]
                    host.lost("dd")
            case "ended":
                for name in made.hosts:
                    made.send("dd", name, Ended(tuple((f"r{number}", 1) for number in range(COUNT))))
        await made.until(put_back(made))
        assert stage.waiting == 0 and "busy" in hold.begun and not hold.go.is_set()
        hold.go.set()
        await made.until(lambda: "busy" in made.results())
        await made.settle()
        assert not [one for one in hold.begun if one.startswith("abort")], (
            "an engine hears of no request that it never saw"
        )
        assert hold.begun == ["busy"]


@pytest.mark.proves("ended-while-busy")
async def test_inputs_that_wait_at_a_busy_fan_in_are_freed_with_their_request() -> None:
    """Inputs wait in the hooks' queue, and gathered for requests whose other half has not come."""
    import stage_functions

    stage_functions.merging.clear()
    stage_functions.merge_on.clear()
    plans = [
        plan("give", entry=True, next=("other", "take"), route_fn="stage_functions:routes_as_requested", relay=MANY),
        plan("other", inputs_from=("give",), next=("take",)),
        plan(
            "take",
            wait_for=("give", "other"),
            inputs_from=("give", "other"),
            merge_fn="stage_functions:held_merge",
            terminal=True,
        ),
    ]

    def load(payload: omni.StagePayload) -> Any:
        return {"to": payload.data, "id": payload.request.id, "pad": np.zeros(LARGE, np.uint8)}

    hold = Hold()

    def other(payload: omni.StagePayload) -> Any:
        if payload.request.id.startswith("half"):
            assert hold.go.wait(PATIENCE_S)
        return {"id": payload.request.id}

    async with world() as made:
        functions = {"give": omni.Simple(load, concurrency=4), "other": omni.Simple(other, concurrency=8)}
        made.process("front", plans[:2], functions)
        made.process("back", plans[2:], {"take": lambda payload: 0})
        for number in range(4):
            made.submit(f"half{number}", "give", ["other", "take"])
        stage_input = made.hosts["back"].stages["take"].input
        await made.until(lambda: len(list(stage_input.works())) == 4 and made.outstanding == 0)  # copied out: they wait
        halves = list(stage_input.works())
        made.submit("busy", "give", ["other", "take"])
        await made.until(stage_functions.merging.is_set)
        held = made.outstanding
        for number in range(COUNT):
            made.submit(f"r{number}", "give", ["other", "take"])
        await made.until(lambda: len(list(stage_input.works())) == 5 + COUNT)
        await made.settle()
        assert made.outstanding > held
        for number in range(COUNT):
            made.abort(f"r{number}")
        for number in range(4):
            made.abort(f"half{number}")
        await made.until(lambda: made.outstanding <= held)
        assert [work.gathering for work in halves] == [None] * 4
        hold.go.set()
        stage_functions.merge_on.set()
        await made.until(lambda: bool(made.results()))
        assert list(made.results()) == ["busy"]


async def test_chunks_that_wait_for_an_earlier_one_are_let_go_with_their_request() -> None:
    async def run(session: omni.Session) -> AsyncIterator[Any]:
        async for _ in session.chunks():
            pass
        yield omni.Result(0)

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        for _ in range(6):
            yield omni.Chunk(np.zeros(LARGE, np.uint8))

    async with world() as made:
        made.process("front", [plan("give", entry=True, stream_to=("take",), relay=MANY)], {"give": produce})
        made.process("back", [plan("take", terminal=True, stream_from=("give",))], {"take": omni.Streaming(run)})
        made.submit("r", "give")
        link = ("front", "back")
        await made.until(lambda: bool(made.links.get(link)))
        lost = made.links[link].popleft()  # the first chunk is late, and does not come
        await made.until(lambda: made.outstanding > 1)
        made.abort("r")
        await made.until(lambda: made.outstanding <= 1)  # but for the late one, which is drained when it comes
        made.links[link].append(lost)
        await made.until(lambda: made.outstanding == 0)


@pytest.mark.proves("ended-while-busy")
async def test_unsent_results_of_a_stage_are_freed_with_their_request() -> None:
    """The stage has forgotten the request by then: its payload waits for a credit of a receiver that is busy."""
    hold = Hold()
    async with world() as made:
        made.process("front", [front()], {"give": omni.Simple(give, concurrency=4)}, slots=3)
        made.process("back", [plan("take", terminal=True, inputs_from=("give",))], {"take": sync(hold)})
        await occupied(made, hold)
        for number in range(COUNT):
            made.submit(f"r{number}", "give")
        send_queues = made.hosts["front"].process.send_queues
        await made.until(lambda: send_queues.queued > 2 and not list(made.hosts["front"].stages["give"].input.works()))
        # the receiver hears nothing: it is far away
        made.known.discard("back")
        for number in range(COUNT):
            made.send(OWNER, "front", abort_of(f"r{number}"))
        await made.until(lambda: send_queues.queued == 0)
        made.known.add("back")
        for number in range(COUNT):
            made.send(OWNER, "back", abort_of(f"r{number}"))
        await made.until(put_back(made))
        hold.go.set()
        await made.until(lambda: "busy" in made.results())


def abort_of(request_id: str) -> Any:
    from stage_runtime.wire.messages import Abort

    return Abort(request_id, 1, OWNER, "cancelled")


async def test_a_request_that_fails_at_a_busy_stage_lets_go_of_what_waits_of_it() -> None:
    """A source fails while its chunks wait for their turn."""
    hold = Hold()

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        for _ in range(3):
            yield omni.Chunk(np.zeros(LARGE, np.uint8))
        if payload.request.id != "busy":
            raise RequestError("stage_failed", "on purpose")

    async def take(session: omni.Session) -> AsyncIterator[Any]:
        async for _ in session.chunks():
            await asyncio.sleep(0)
            hold(session.request.id)
        yield omni.Result(0)

    async with world() as made:
        made.process("front", [plan("give", entry=True, stream_to=("take",), relay=MANY)], {"give": produce})
        made.process("back", [plan("take", terminal=True, stream_from=("give",))], {"take": omni.Streaming(take)})
        await occupied(made, hold)
        for number in range(4):
            made.submit(f"r{number}", "give")
        await made.until(lambda: len(made.failed()) == 4)
        for number in range(4):
            made.abort(f"r{number}")  # as the coordinator does when it hears of a failure
        await made.until(lambda: made.outstanding <= 3)
        hold.go.set()
        await made.until(lambda: "busy" in made.results())
        await made.settle()
