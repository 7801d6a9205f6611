"""An author's terminalStagesFn on threads of its own: late, blocked, raising, writing into what it was given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from stage_runtime.coordinator.admitting.terminal_stages import AT_ONCE, TerminalStagesCaller
from stage_runtime.errors import RequestError
from stage_runtime.wire.values import OmniRequest

PATIENCE_S = 60.0
STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start


def new_request(inputs: object = "hello") -> OmniRequest:
    return OmniRequest(id="r", inputs=inputs)


async def test_one_that_blocks_fails_its_own_request_and_the_loop_goes_on() -> None:
    gate = threading.Event()
    caller = TerminalStagesCaller(lambda request: gate.wait() if request.inputs == "block" else ["write"])
    blocked = asyncio.create_task(caller.call(new_request("block"), 0.3))
    assert (await caller.call(new_request(), 5.0)).value() == ["write"]
    with pytest.raises(RequestError) as failed:
        await blocked
    assert (failed.value.code, failed.value.hook) == ("deadline", "terminalStagesFn")
    gate.set()


@pytest.mark.proves("blocked-hook")
async def test_hooks_that_do_not_return_are_bounded_and_free_their_places_when_they_do() -> None:
    gate, began = threading.Event(), threading.Semaphore(0)

    def hook(request: OmniRequest) -> None:
        began.release()
        gate.wait()

    caller = TerminalStagesCaller(hook)
    stuck = [asyncio.create_task(caller.call(new_request(), 0.2)) for _ in range(AT_ONCE + 8)]
    outcomes = await asyncio.gather(*stuck, return_exceptions=True)
    assert all(isinstance(one, RequestError) and one.code == "deadline" for one in outcomes)
    assert sum(began.acquire(blocking=False) for _ in stuck) == AT_ONCE
    gate.set()
    assert (await caller.call(new_request(), 5.0)).value() is None


async def test_a_thread_that_cannot_start_refuses_its_request_and_keeps_no_place() -> None:
    caller = TerminalStagesCaller(lambda request: ["write"])
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        for _ in range(AT_ONCE):
            with pytest.raises(RequestError, match="terminalStagesFn: RuntimeError: can't start new thread") as refused:
                await caller.call(new_request(), 5.0)
            assert (refused.value.code, refused.value.hook) == ("unavailable", "terminalStagesFn")
    finally:
        threading.stack_size(before)
    assert (await caller.call(new_request(), 5.0)).value() == ["write"]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
async def test_what_it_raises_is_its_answer(error: BaseException) -> None:
    def hook(request: OmniRequest) -> None:
        raise error

    found = await TerminalStagesCaller(hook).call(new_request(), 5.0)
    with pytest.raises(type(error)):
        found.value()


async def test_what_it_writes_into_a_request_reaches_nobody() -> None:
    def hook(request: OmniRequest) -> None:
        request.inputs["words"].append("more")

    request = new_request({"words": ["one"]})
    await TerminalStagesCaller(hook).call(request, 5.0)
    assert request.inputs == {"words": ["one"]}


async def test_a_value_that_cannot_travel_is_left_for_admission_to_refuse() -> None:
    assert (await TerminalStagesCaller(lambda request: ["write"]).call(new_request({1, 2}), 5.0)).value() is None


class Watched:
    """A client that may disconnect."""

    def __init__(self) -> None:
        self.gone: Callable[[], object] = lambda: None

    def watch(self, gone: Callable[[], object]) -> None:
        self.gone = gone


async def test_a_call_whose_client_disconnects_is_not_waited_for() -> None:
    gate, began, client = threading.Event(), threading.Event(), Watched()

    def hook(request: OmniRequest) -> None:
        began.set()
        gate.wait()

    call = asyncio.create_task(TerminalStagesCaller(hook).call(new_request(), 3600.0, client.watch))
    await asyncio.to_thread(began.wait)
    client.gone()
    with pytest.raises(RequestError) as failed:
        await asyncio.wait_for(call, PATIENCE_S)
    assert (failed.value.code, failed.value.message) == ("cancelled", "the client disconnected")
    client.gone()  # once more: it is over
    gate.set()


async def test_giving_up_ends_the_calls_that_wait_for_the_hook_and_those_that_wait_for_a_place() -> None:
    gate = threading.Event()
    caller = TerminalStagesCaller(lambda request: gate.wait())
    calls = [asyncio.create_task(caller.call(new_request(), 3600.0)) for _ in range(AT_ONCE + 1)]
    await asyncio.sleep(0)
    caller.give_up(lambda: RequestError("unavailable", "the coordinator is draining"))
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE_S)
    assert [one.code for one in outcomes if isinstance(one, RequestError)] == ["unavailable"] * len(calls)
    gate.set()
