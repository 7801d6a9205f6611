"""Wherever stages stand, a pipeline says the same: what authors write into what they got, in any order and size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.payloads import encoding, isolating
from stage_runtime.wire.messages import Complete, Submit
from stage_runtime.wire.parts import Body
from stage_runtime.wire.values import OmniRequest
from tests.stage.stage_kit import OWNER, World, plan, world
from tests.thoroughness import examples

#: Stage -> its process. A value that crosses from one process to another is written and read; the rest is passed on.
PLACEMENTS = [
    dict.fromkeys("abcd", "one"),
    {name: name for name in "abcd"},
    {"a": "one", "b": "one", "c": "two", "d": "two"},
    {"a": "one", "b": "two", "c": "two", "d": "one"},
]
BULK = 100_000  # more than rides in a message


def described(value: Any) -> Any:
    """All that code can ask of ``value``, as plain text and lists."""
    match value:
        case torch.Tensor():
            bits = value.requires_grad, value.is_contiguous(), value.is_inference()
            return [type(value).__name__, str(value.dtype), list(value.shape), bits, value.flatten().tolist()]
        case np.ndarray():
            flags = value.flags.c_contiguous, value.flags.writeable
            return [type(value).__name__, str(value.dtype), list(value.shape), flags, value.ravel().tolist()]
        case dict():
            return ["dict", [[key, described(item)] for key, item in value.items()]]
        case list():
            return ["list", [described(item) for item in value]]
        case omni.Note():
            return ["Note", value.name, described(value.value)]
    return [type(value).__name__, repr(value)]


# --- what an author may do with a payload -----------------------------------------------------------------------

Act = Callable[[omni.StagePayload], Any]


def writes(payload: omni.StagePayload) -> Any:
    if isinstance(payload.data, dict):
        payload.data["caption"] = "seen"
        payload.data.setdefault("list", []).append(len(payload.data))
    return payload.data


def drops_and_sets_again(payload: omni.StagePayload) -> Any:
    if isinstance(payload.data, dict):
        for key in list(payload.data)[:1]:
            payload.data[key] = payload.data.pop(key)
    return payload.data


def writes_into_the_request(payload: omni.StagePayload) -> Any:
    if isinstance(payload.request.inputs, dict):
        payload.request.inputs["mine"] = 1
    payload.request.params["mine"] = [1]
    payload.request.metadata["mine"] = {}
    return payload.data


def gives_the_inputs(payload: omni.StagePayload) -> Any:
    return payload.request.inputs


def gives_both(payload: omni.StagePayload) -> Any:
    return {"data": payload.data, "again": payload.data, "inputs": payload.request.inputs}


def adds_bulk(payload: omni.StagePayload) -> Any:
    return {"was": payload.data, "bulk": b"x" * BULK, "array": np.arange(9.0)[::2], "text": "é" * 9}


def adds_tensors(payload: omni.StagePayload) -> Any:
    with torch.inference_mode():
        inferred = torch.ones(2, 3).T
    weight = torch.nn.Parameter(torch.ones(2))
    return {"was": payload.data, "t": [inferred, weight, torch.tensor(3), torch.zeros(0)], "n": omni.Note("n", [1.5])}


def passes(payload: omni.StagePayload) -> Any:
    return payload.data


def shape_shifts(payload: omni.StagePayload) -> Any:
    return [payload.data, float("nan"), -0.0, 1, True, 2**63, "", b""]


ACTS: list[Act] = [
    writes,
    drops_and_sets_again,
    writes_into_the_request,
    gives_the_inputs,
    gives_both,
    adds_bulk,
    adds_tensors,
    passes,
    shape_shifts,
]
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
inputs = (
    words
    | st.none()
    | st.lists(st.integers(0, 9) | words, max_size=3)
    | st.dictionaries(
        words,
        st.floats() | words | st.lists(words, max_size=2) | st.just(b"y" * BULK) | st.just("z" * BULK),
        max_size=4,
    )
)


def submit(made: World, request: OmniRequest, target: str) -> None:
    """Submit as a coordinator does: the request alone, whose inputs are the entry stage's data."""
    extracted = encoding.extract({"request": request}, where="submitted", as_fields=True)
    if extracted.is_inline:
        body = Body(extracted.value_bytes, tuple(extracted.refs), extracted.flat())
    else:
        put = made.relays[OWNER].put(extracted, request_id=request.id, peer=made.stage_of[target])
        assert put is not None
        body = Body(extracted.value_bytes, tuple(extracted.refs), transfer=put.metadata)
    made.send(OWNER, made.stage_of[target], Submit(made.header(request.id), target, body))


async def what_stages_see(
    placement: dict[str, str], request: OmniRequest, acts: list[Act], projected: bool
) -> dict[str, Any]:
    """a → b → d and a → c, each with its act: what each stage has got, and still has when its act is through."""
    seen: dict[str, Any] = {}

    def stage(name: str, act: Act) -> Act:
        def run(payload: omni.StagePayload) -> Any:
            before = described([payload.data, payload.request.inputs, payload.request.params])
            given = act(payload)
            after = described([payload.data, payload.request.inputs, payload.request.params, payload.request.metadata])
            seen[name] = [before, after]
            return given

        return run

    hook = {"project_payload": {"b": "stage_functions:written_into"}} if projected else {}
    plans = [
        plan("a", next=("b", "c"), **hook),
        plan("b", next=("d",), inputs_from=("a",)),
        plan("c", terminal=True, inputs_from=("a",)),
        plan("d", terminal=True, inputs_from=("b",)),
    ]
    functions = {name: stage(name, act) for name, act in zip("abcd", acts, strict=True)}
    async with world() as made:
        for process in dict.fromkeys(placement.values()):
            made.process(process, [one for one in plans if placement[one.name] == process], functions)
        submit(made, request, "a")
        await made.until(lambda: len([one for one in made.received if isinstance(one, Complete)]) == 2)
        ends = {one.source: one for one in made.received if isinstance(one, Complete)}
        seen["results"] = {
            name: described(made.opened(end.body, name)) if end.body is not None else end.failure
            for name, end in sorted(ends.items())
        }
    return seen


@pytest.mark.proves("placement")
@settings(max_examples=examples(30), deadline=None)
@given(inputs, st.lists(st.sampled_from(ACTS), min_size=4, max_size=4), st.booleans())
def test_inputs_of_stages_do_not_depend_on_their_placement(data: Any, acts: list[Act], projected: bool) -> None:
    def request() -> OmniRequest:
        return OmniRequest(id="r", inputs=isolating.isolate(data), params={"p": [1]}, metadata={"m": "x"})

    together, *others = (
        asyncio.run(what_stages_see(placement, request(), acts, projected)) for placement in PLACEMENTS
    )
    for placement, seen in zip(PLACEMENTS[1:], others, strict=True):
        assert seen == together, f"together, and as {placement}"


@pytest.mark.parametrize("nbytes", [10, BULK])
@pytest.mark.parametrize("placement", PLACEMENTS[:2], ids=["together", "apart"])
async def test_what_a_stage_writes_into_its_payload_goes_on_and_the_request_stays_the_client_s(
    placement: dict[str, str], nbytes: int
) -> None:
    def request() -> OmniRequest:
        return OmniRequest(id="r", inputs={"text": "x" * nbytes, "raw": b"y" * nbytes}, params={"p": [1]})

    seen = await what_stages_see(placement, request(), [writes, writes_into_the_request, passes, passes], False)
    before, _ = seen["d"]
    got, inputs, params = before[1]
    assert [key for key, _ in got[1]] == ["text", "raw", "caption", "list"]
    assert [key for key, _ in inputs[1]] == ["text", "raw"] and [key for key, _ in params[1]] == ["p"]


@pytest.mark.parametrize("apart", [True, False])
async def test_a_request_knows_that_it_was_cancelled_whatever_brought_it(apart: bool) -> None:
    """The first chunk brings one, the payload another: both must know."""
    brought: list[OmniRequest] = []

    class Both:
        def run(self, inbox: Any, outbox: Any, stop: Any) -> None:
            for event in inbox:
                if isinstance(event, events.ChunkIn):
                    assert event.chunk.request is not None
                    brought.append(event.chunk.request)
                elif isinstance(event, events.Start):
                    brought.append(event.payload.request)

    def speak(payload: omni.StagePayload) -> Iterator[Any]:
        yield omni.Chunk("one")
        yield omni.Chunk("two")
        yield omni.Result("all")

    plans = [plan("a", next=("b",), stream_to=("b",)), plan("b", terminal=True, inputs_from=("a",), stream_from=("a",))]
    async with world() as made:
        functions = {"a": speak, "b": Both()}
        if apart:
            for one in plans:
                made.process(f"p{one.name}", [one], functions)
        else:
            made.process("p", plans, functions)
        made.submit("r", "a")
        await made.until(lambda: len(brought) == 3)
        assert [request.id for request in brought] == ["r"] * 3
        assert [request.cancelled() for request in brought] == [False] * 3
        made.abort("r")
        await made.until(lambda: all(request.cancelled() for request in brought))
