"""The debug mode for values names who wrote into what it shares: the giver or the receiver, wherever they stand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.stage.inputs.mutation_check import MutationCheck
from stage_runtime.wire.messages import Complete
from tests.stage.stage_kit import plan, world

SIZES = [8, 120_000]  # in the message, by relay
MODULE_BUFFER = np.zeros(40_000, np.float32)


def gives(payload: omni.StagePayload) -> Any:
    size = payload.data
    return {"tensor": torch.zeros(size), "array": np.zeros(size, np.float32), "twice": [torch.ones(size)]}


def reads(payload: omni.StagePayload) -> Any:
    payload.data["mine"] = payload.data["tensor"] + 1
    del payload.data["array"]
    return payload.data["mine"].sum().item()


def writes_into_what_it_got(payload: omni.StagePayload) -> Any:
    payload.data["twice"][0].add_(1)
    return 1


def writes_into_a_copy(payload: omni.StagePayload) -> Any:
    payload.detach().data["tensor"].add_(1)
    return 1


def forwards_and_writes(payload: omni.StagePayload) -> Iterator[Any]:
    yield omni.Chunk(payload.data["tensor"])
    payload.data["tensor"].add_(1)


def uses_its_buffer_again(payload: omni.StagePayload) -> Iterator[Any]:
    buffer = torch.empty(payload.data)
    for number in range(4):
        buffer.fill_(number)
        yield omni.Chunk({"t": buffer})


def uses_two_buffers_in_turn(payload: omni.StagePayload) -> Iterator[Any]:
    buffers = [np.empty(payload.data, np.int32) for _ in range(2)]
    for number in range(5):
        buffers[number % 2][:] = number
        yield omni.Chunk(number, metadata={"a": buffers[number % 2]})


def makes_a_new_buffer(payload: omni.StagePayload) -> Iterator[Any]:
    for number in range(4):
        yield omni.Chunk({"t": torch.full((payload.data,), number)})


def gives_the_module_s(payload: omni.StagePayload) -> Any:
    MODULE_BUFFER[: payload.data] += 1
    return {"part": MODULE_BUFFER[: payload.data]}


async def takes(session: omni.Session) -> AsyncIterator[Any]:
    async for _ in session.chunks():
        pass
    yield omni.Result(1)


async def writes_into_a_chunk(session: omni.Session) -> AsyncIterator[Any]:
    async for chunk in session.chunks():
        if chunk.index == 1:
            chunk.data["t"].zero_()
    yield omni.Result(1)


class Engine:
    """One of its own that writes into what it has given, and hears of it with the next request."""

    def run(self, inbox: Any, outbox: Any, stop: Any) -> None:
        given: Any = np.zeros(40_000, np.float32)
        for event in inbox:
            if isinstance(event, events.Start):
                given[0] += 1
                outbox.put(events.Done(event.request_id, given))


#: The values that a gives to b, by result or by stream -> the writers that must be named, with the path.
CASES: dict[str, tuple[Any, Any, set[tuple[str, str]]]] = {
    "nobody writes": (gives, reads, set()),
    "the receiver writes": (gives, writes_into_what_it_got, {("b", "payload.data['twice'][0]")}),
    "the receiver writes into its own copy": (gives, writes_into_a_copy, set()),
    "a new buffer each time": (makes_a_new_buffer, omni.Streaming(takes), set()),
    "one buffer for all chunks": (uses_its_buffer_again, omni.Streaming(takes), {("a", "chunk.data['t']")}),
    "two buffers in turn": (uses_two_buffers_in_turn, omni.Streaming(takes), {("a", "chunk.metadata['a']")}),
    "the receiver of a chunk writes": (
        makes_a_new_buffer,
        omni.Streaming(writes_into_a_chunk),
        {("b", "chunk.data['t']")},
    ),
    "a buffer of the module": (gives_the_module_s, lambda payload: 1, {("a", "payload.data['part']")}),
    "an engine of its own": (Engine(), lambda payload: 1, {("a", "payload.data")}),
}


@pytest.mark.proves("written-input")
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
async def test_the_writer_is_named_in_one_process_and_across_processes(case: str, size: int, apart: bool) -> None:
    giver, receiver, named = CASES[case]
    stream = {"stream_to": ("b",)} if isinstance(receiver, omni.Streaming) else {}
    streamed = {"stream_from": ("a",)} if stream else {}
    plans = [plan("a", next=("b",), **stream), plan("b", terminal=True, inputs_from=("a",), **streamed)]
    watches = [MutationCheck(), MutationCheck()]
    async with world() as made:
        functions = {"a": giver, "b": receiver}
        if apart:
            for one, mutation_check in zip(plans, watches, strict=True):
                made.process(f"p{one.name}", [one], functions, mutation_check=mutation_check)
        else:
            made.process("p", plans, functions, mutation_check=watches[0])
        for number in range(3):
            made.submit(f"r{number}", "a", size)
            await made.until(
                partial(lambda count: sum(isinstance(one, Complete) for one in made.received) == count, number + 1)
            )
        assert made.failed() == {}
        await made.until(lambda: made.outstanding == 0)
    assert {(one.stage, one.path) for mutation_check in watches for one in mutation_check.violations} == named


async def test_what_a_stage_forwards_and_then_writes_into_is_named_once_for_each_rule() -> None:
    mutation_check = MutationCheck()
    plans = [
        plan("a", next=("b",)),
        plan("b", next=("c",), stream_to=("c",), inputs_from=("a",)),
        plan("c", terminal=True, inputs_from=("b",), stream_from=("b",)),
    ]
    async with world() as made:
        made.process(
            "p",
            plans,
            {"a": gives, "b": forwards_and_writes, "c": omni.Streaming(takes)},
            mutation_check=mutation_check,
        )
        made.submit("r", "a", 120_000)
        await made.until(lambda: any(isinstance(one, Complete) for one in made.received))
    assert {(one.stage, one.path, one.source) for one in mutation_check.violations} == {
        ("b", "payload.data['tensor']", "a"),
        ("b", "chunk.data", None),
    }


# --- run_stage --------------------------------------------------------------------------------------------------


@pytest.mark.proves("written-input")
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("nobody writes", "an engine of its own")])
def test_run_stage_fails_the_request_of_a_stage_that_writes(case: str) -> None:
    giver, receiver, named = CASES[case]
    is_giver = not named or named.copy().pop()[0] == "a"
    function: Callable[..., Any] = lambda: giver if is_giver else receiver  # noqa: E731
    given = gives(omni.StagePayload(request=omni.OmniRequest(id="x"), data=8))
    chunks = [omni.Chunk({"t": torch.ones(8)}) for _ in range(3)]
    if isinstance(receiver, omni.Streaming) and not is_giver:
        made = omni.testing.run_stage(function, [8], chunks)
    else:
        made = omni.testing.run_stage(function, [8, 8] if is_giver else [given, given])
    if not named:
        assert [one.error for one in made] == [None] * len(made)
        return
    with pytest.raises(omni.testing.WroteShared, match="wrote into"):
        made[0].result  # noqa: B018
    assert torch.equal(given["twice"][0], torch.ones(8)), "the test's own values are the test's"
    assert all(torch.equal(chunk.data["t"], torch.ones(8)) for chunk in chunks)


def test_run_stage_keeps_what_was_given_as_it_was_given() -> None:
    [one] = omni.testing.run_stage(lambda: uses_its_buffer_again, [8])
    assert [chunk.data["t"][0].item() for chunk in one.chunks] == [0, 1, 2, 3]
    assert "wrote into chunk.data['t'], after it sent it" in str(one.error)
