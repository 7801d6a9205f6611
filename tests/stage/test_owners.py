"""Two coordinators carry requests of one id at the same time: nothing that happens to one request touches the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.wire.messages import Complete, Deregister, Rejected, Stream, Welcome
from stage_runtime.wire.parts import Failure, Member
from tests.stage.stage_kit import OWNER, PATIENCE_S, plan, world

OTHER = "dd"


class Held:
    """Functions of every kind that hold their requests until they are let go."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.go = threading.Event()

    def simple(self) -> Any:
        def run(payload: omni.StagePayload) -> Any:
            self.begun.append(payload.data)
            self.go.wait(PATIENCE_S)
            return f"answer to {payload.data}"

        return omni.Simple(run, concurrency=2)

    def generator(self) -> Any:
        def run(payload: omni.StagePayload) -> Iterator[Any]:
            self.begun.append(payload.data)
            self.go.wait(PATIENCE_S)
            yield omni.Result(f"answer to {payload.data}")

        return omni.Simple(run, concurrency=2)

    def coroutine(self) -> Any:
        async def run(payload: omni.StagePayload) -> Any:
            self.begun.append(payload.data)
            while not self.go.is_set():
                await asyncio.sleep(0.001)
            return f"answer to {payload.data}"

        return omni.Simple(run, concurrency=2)

    def batched(self) -> Any:
        def run(payloads: list[omni.StagePayload]) -> list[Any]:
            self.begun += [payload.data for payload in payloads]
            self.go.wait(PATIENCE_S)
            return [f"answer to {payload.data}" for payload in payloads]

        return omni.Batched(run, max_batch=2, max_wait_s=10)

    def streaming(self) -> Any:
        async def run(session: omni.Session) -> AsyncIterator[Any]:
            data = (await session.payload()).data
            self.begun.append(data)
            while not self.go.is_set():
                await asyncio.sleep(0.001)
            yield omni.Result(f"answer to {data}")

        return omni.Streaming(run)

    def engine(self) -> Any:
        held = self

        class Engine:
            def run(self, inbox: Any, outbox: Any, stop: threading.Event) -> None:
                requests: dict[str, Any] = {}
                while not stop.is_set():
                    match inbox.get(timeout=0.001):
                        case events.Start() as event:
                            requests[event.request_id] = event.payload.data
                            held.begun.append(event.payload.data)
                        case events.Abort() as event:
                            requests.pop(event.request_id, None)  # it may be answered already
                    if held.go.is_set():
                        for request_id, data in requests.items():
                            outbox.put(events.Done(request_id, f"answer to {data}"))
                        requests.clear()

        return Engine()


KINDS: tuple[Callable[[Held], Any], ...] = (
    Held.simple,
    Held.generator,
    Held.coroutine,
    Held.batched,
    Held.streaming,
    Held.engine,
)


@pytest.mark.proves("same-request-id")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("aborted", [None, OWNER, OTHER], ids=["none", "first", "second"])
async def test_two_coordinators_requests_of_one_id_are_answered_and_aborted_apart(
    kind: Callable[[Held], Any], aborted: str | None
) -> None:
    held = Held()
    async with world() as made:
        made.coordinator(OTHER)
        made.process("p", [plan("s", entry=True, terminal=True)], {"s": kind(held)})
        made.submit("r", "s", "ours", owner=OWNER)
        await made.until(lambda: bool(held.begun) or made.hosts["p"].stages["s"].waiting == 1)
        made.submit("r", "s", "theirs", owner=OTHER)
        await made.until(lambda: len(held.begun) == 2)
        if aborted is not None:
            made.abort("r", owner=aborted)
            await made.settle()
        held.go.set()
        wanted = {OWNER: "answer to ours", OTHER: "answer to theirs"}
        wanted.pop(aborted or "", None)

        def answers() -> dict[str, Any]:
            return {
                owner: made.opened(one.body, "s")
                for owner, one in made.received_by
                if isinstance(one, Complete) and one.body is not None
            }

        await made.until(lambda: len(answers()) >= len(wanted))
        await made.settle()
        assert answers() == wanted


@pytest.mark.proves("same-request-id")
async def test_an_abort_frees_the_transfers_of_its_own_coordinator_s_request_alone() -> None:
    held = Held()

    def make(payload: omni.StagePayload) -> Any:
        return np.full(256 << 10, payload.data, np.uint8)

    def total(payload: omni.StagePayload) -> int:
        held.begun.append(payload.request.id)
        held.go.wait(PATIENCE_S)
        return int(payload.data.sum())

    async with world() as made:
        made.coordinator(OTHER)
        made.process("front", [plan("make", entry=True, next=("total",))], {"make": make})
        functions = {"total": omni.Simple(total, concurrency=2)}
        made.process("back", [plan("total", terminal=True, inputs_from=("make",))], functions)
        for owner, value in ((OWNER, 1), (OTHER, 2)):
            made.submit("r", "make", value, owner=owner)
        await made.until(lambda: len(held.begun) == 2)
        fetched = made.relays["back"].fetched
        assert len(set(fetched)) == 2, f"one name for transfers of two requests: {fetched}"
        made.abort("r", owner=OWNER)
        await made.settle()
        cleaned = {name for relays in made.relays.values() for name in relays.cleaned}
        assert len(cleaned & set(fetched)) == 1, "an abort cleans up after its own request"
        held.go.set()
        await made.until(lambda: bool(made.results()))
        assert [(owner, one.failure) for owner, one in made.received_by if isinstance(one, Complete)] == [(OTHER, None)]
        assert made.results() == {"r": 2 * (256 << 10)}


async def test_streams_of_one_id_keep_their_chunks_apart_and_a_failure_ends_its_own_request_alone() -> None:
    def send(payload: omni.StagePayload) -> Iterator[Any]:
        for number in range(4):
            yield omni.Chunk([payload.data, number])
        if payload.data == "theirs":
            raise ValueError("on purpose")
        yield omni.Result(payload.data)

    async with world(seed=3) as made:
        made.coordinator(OTHER)
        made.process("p", [plan("s", entry=True, terminal=True)], {"s": omni.Simple(send, concurrency=2)})
        made.submit("r", "s", "ours", owner=OWNER)
        made.submit("r", "s", "theirs", owner=OTHER)
        await made.until(lambda: sum(isinstance(one, Complete) for one in made.received) == 2)
        for owner, value in ((OWNER, "ours"), (OTHER, "theirs")):
            streamed = [one for to, one in made.received_by if to == owner and isinstance(one, Stream)]
            assert [made.opened(one.body, "s")["data"] for one in streamed] == [[value, n] for n in range(4)]
        ends = {to: one.failure for to, one in made.received_by if isinstance(one, Complete)}
        assert ends[OWNER] is None
        assert ends[OTHER] == Failure("stage_failed", "ValueError: on purpose", "s", "run")


@pytest.mark.proves("next-incarnation")
@pytest.mark.parametrize("reborn", [False, True])
async def test_a_draining_process_is_ready_for_no_coordinator_whenever_it_comes(reborn: bool) -> None:
    """One that starts meanwhile, or knows the process under its next incarnation only, would bind requests to it."""
    async with world() as made:
        made.coordinator(OTHER)
        host = made.process("p", [plan("s", entry=True, terminal=True)], {"s": lambda payload: payload.data})
        host.announce_ready()
        host.deregister("SIGTERM")
        if reborn:
            host.reborn("p2")
            host.announce_ready()
        host.received(OTHER, Welcome("ipc:///pub", Member(OTHER, "coordinator", "", "", "", {}, ()), "via"))
        await made.settle()
        assert [one for to, one in made.received_by if to == OTHER] == [Deregister("SIGTERM")]


@pytest.mark.proves("frozen-coordinator")
@pytest.mark.parametrize("fenced_by", [(OWNER,), (OWNER, OTHER)], ids=["one", "all"])
async def test_who_is_declared_dead_by_one_coordinator_goes_on_for_the_other(fenced_by: tuple[str, ...]) -> None:
    held = Held()
    async with world() as made:
        made.coordinator(OTHER)
        host = made.process("p", [plan("s", entry=True, terminal=True)], {"s": held.simple()})
        host.received(OTHER, Welcome("ipc:///pub", Member(OTHER, "coordinator", "", "", "", {}, ()), "via"))
        made.submit("r", "s", "ours", owner=OWNER)
        made.submit("q", "s", "theirs", owner=OTHER)
        await made.until(lambda: len(held.begun) == 2)
        for owner in fenced_by:
            host.received(owner, Rejected("p", "this incarnation was declared dead", fenced=True))
        assert made.fenced == (["p"] if len(fenced_by) > 1 else [])
        held.go.set()
        if len(fenced_by) == 1:
            await made.until(lambda: bool(made.received_by))
            await made.settle()
            ends = [(to, one.request_id) for to, one in made.received_by if isinstance(one, Complete)]
            assert ends == [(OTHER, "q")]


async def test_whose_place_another_process_has_taken_is_renewed_whoever_holds_it() -> None:
    async with world() as made:
        made.coordinator(OTHER)
        host = made.process("p", [plan("s", entry=True, terminal=True)], {"s": lambda payload: payload.data})
        host.introduced(OTHER, Rejected("p", "this incarnation was declared dead", fenced=True, via="ipc:///cc"))
        assert made.fenced == ["p"]
