"""Stages that are hostile where a request tells them to: every place where an author's value enters the program.

A request's inputs are a case: ``where`` (a place) and ``what`` (a recipe, of which `build` makes the value). A case of
no place goes through and is answered. `HOSTILE_WITHOUT` takes one check out of this process: the positive control.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import stage_runtime as omni
from stage_runtime import errors
from stage_runtime.wire import codec, frames, outputs

# --- recipes ----------------------------------------------------------------------------------------------------


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class Odd:
    """It cannot be printed, compared or hashed."""

    def __repr__(self) -> str:
        raise SystemExit("no words")

    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")


def _cycle() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def _deep(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


MAKE: dict[str, Callable[..., Any]] = {
    "plain": lambda value: value,
    "big": lambda bits: -(2**bits),
    "float": float,
    "text": lambda piece, count: piece * count,
    "surrogate": lambda: "\udc80",
    "bytes": bytes,
    "array": lambda dtype, shape: np.zeros(shape, dtype),
    "object": Odd,
    "path": lambda: Path("a/b"),
    "mute": Mute,
    "cycle": _cycle,
    "deep": _deep,
    "parts": lambda count: [np.zeros(1, np.uint8) for _ in range(count)],
    "list": lambda *items: list(items),
    "tuple": lambda *items: items,
    "set": lambda: {1, "a"},
    "dict": lambda *items: dict(zip(items[::2], items[1::2], strict=False)),
    "ints": lambda value: {1: value},
    "function": lambda: MAKE,
    "generator": lambda: (number for number in range(3)),
    "payload": lambda request, data: omni.StagePayload(request=request, data=data),
    "request": lambda value: omni.OmniRequest(id=value),
    "routed": lambda value: omni.Routed(value),
    "chunk": lambda data, to, modality, metadata: omni.Chunk(data, to, modality, metadata),
    "result": lambda value: omni.Result(value),
    "Text": lambda value: omni.Text(value),
    "Audio": lambda samples, rate: omni.Audio(samples, rate),
    "Usage": lambda prompt, completion: omni.Usage(prompt, completion),
    "Finish": lambda value: omni.Finish(value),
    "Note": lambda name, value: omni.Note(name, value),
    "error": lambda value: ValueError(value),
    "exit": lambda value: SystemExit(value),
    "invalid": lambda message, param: omni.InvalidRequest(message, param=param),
    "failure": lambda code, message, stage, hook, param: omni.RequestError(
        code, message, stage=stage, hook=hook, param=param
    ),
    "attributes": lambda name, value: _with(omni.InvalidRequest("no"), name, value),
}


def _with(error: Exception, name: str, value: Any) -> Exception:
    setattr(error, name, value)
    return error


def build(recipe: Any) -> Any:
    """A recipe is ``[name, ingredients…]``, each a recipe of its own; of what MessagePack and JSON know, itself."""
    if not (isinstance(recipe, list) and recipe and recipe[0] in MAKE):
        return recipe
    return MAKE[recipe[0]](*(build(part) for part in recipe[1:]))


def at(place: str, case: Any) -> Any:
    """The value to be given here, or `Nothing`. Raises what is to be raised here."""
    if not isinstance(case, dict) or not str(case.get("where")).startswith(place):
        return Nothing
    made = build(case.get("what"))
    if case["where"] == f"{place} raises":
        raise made if isinstance(made, BaseException) else ValueError(made)
    return made if case["where"] == place else Nothing


class Nothing:
    """No place of this one's."""


def given(place: str, case: Any, otherwise: Any) -> Any:
    made = at(place, case)
    return otherwise if made is Nothing else made


# --- stages: enter → left, right → join → speak, which join streams to, and which streams to the client -----------


def _case(payload: omni.StagePayload) -> Any:
    """The case, whatever route it came by."""
    if payload.request.kind != "chat":
        return payload.data
    try:
        return json.loads(payload.request.last_text())
    except ValueError:
        return None


def enter() -> Any:
    return omni.Simple(lambda payload: given("enter", _case(payload), _case(payload)), concurrency=2)


def left() -> Any:
    async def run(payload: omni.StagePayload) -> Any:
        return given("left", payload.data, payload.data)

    return run


def right() -> Any:
    def run(payloads: list[omni.StagePayload]) -> Any:
        made = [at("batch", payload.data) for payload in payloads]
        for one in made:
            if one is not Nothing and len(payloads) == 1:
                return one  # not even a list
        return [_right(payload.data) for payload in payloads]

    return omni.Batched(run, max_wait_s=0.0)


def _right(case: Any) -> Any:
    try:
        return given("right", case, case)
    except BaseException as error:
        return error


def join() -> Any:
    def run(payload: omni.StagePayload) -> Iterator[Any]:
        case = payload.data
        yield given("yield", case, omni.Chunk("first"))
        yield omni.Chunk(
            given("chunk.data", case, "second"),
            given("chunk.to", case, None),
            given("chunk.modality", case, None),
            given("chunk.metadata", case, None),
        )
        yield omni.Result(given("join", case, case))

    return run


def speak() -> Any:
    async def run(session: omni.Session) -> AsyncIterator[Any]:
        async for _ in session.chunks():
            pass
        case = (await session.payload()).data
        yield omni.Chunk(
            given("shown.data", case, omni.Text("shown")),
            modality=given("shown.modality", case, None),
            metadata=given("shown.metadata", case, None),
        )
        if at("shown result", case) is not Nothing:
            yield omni.Result(at("shown result", case))
        else:
            yield omni.Result(omni.Note("through", True))

    return omni.Streaming(run)


# --- hooks ------------------------------------------------------------------------------------------------------


def route_fn(request_id: str, output: Any) -> Any:
    return given("route_fn", output, ["left", "right"])


def project(payload: omni.StagePayload) -> Any:
    return given("project", payload.data, payload)


def wait_for_fn(request_id: str, source: str, payload: omni.StagePayload) -> Any:
    return given("wait_for_fn", payload.data, ["left", "right"])


def merge_fn(inputs: dict[str, omni.StagePayload]) -> Any:
    first = inputs["left"]
    return given("merge_fn", first.data, first)


def stream_done_to_fn(request_id: str, output: Any) -> Any:
    return given("stream_done_to_fn", output, ["speak"])


def terminal_stages_fn(request: omni.OmniRequest) -> Any:
    return given("terminal_stages_fn", request.inputs, ["speak"])


#: The places where an author's value enters, whether given or raised.
PLACES = (
    *("enter", "left", "right", "batch", "join", "yield", "shown result"),
    *("chunk.data", "chunk.to", "chunk.modality", "chunk.metadata", "shown.data", "shown.modality", "shown.metadata"),
    *("route_fn", "project", "wait_for_fn", "merge_fn", "stream_done_to_fn", "terminal_stages_fn"),
)


# --- the positive control ---------------------------------------------------------------------------------------


def _encode_unchecked(frame: frames.Frame) -> bytes:
    """`codec.encode` without its check of fields."""
    numbers = (frame.session, frame.ack_session, frame.seq, frame.ack)
    encoded = codec._encoder.encode(frame.message)
    request = codec.REQUEST_OF[type(frame.message)](frame.message)
    data = codec._encoder.encode(
        frames.Envelope(frame.protocol, frame.sender, frame.receiver, *numbers, request, memoryview(encoded))
    )
    if len(data) > frames.FRAME_LIMIT:
        raise errors.ValueRefused("message", "over the limit")
    return data


def _print_unguarded(value: object, *, limit: int = 0, how: Callable[[object], str] = str) -> str:
    return how(value)


match os.environ.get("HOSTILE_WITHOUT"):
    case "the check of messages":
        codec.encode = _encode_unchecked
        outputs.check_chunk = lambda chunk: None  # the one that stands before it
    case "the guard of texts":
        errors.safe_str = _print_unguarded
