"""Wrong outputs of authors for clients are refused at the stage that gave them, with its name and in its log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stage_runtime as omni
from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.payloads import encoding
from stage_runtime.wire import outputs
from stage_runtime.wire.messages import Submit
from stage_runtime.wire.parts import Body, Failure
from stage_runtime.wire.values import OmniRequest, RawTensor
from tests.stage.stage_kit import OWNER, World, plan, world

TONE = np.zeros(10, np.float32)
loose: Any = omni  # outputs as an author without a type checker writes them
WRONG: dict[str, tuple[Any, str]] = {
    "text of a number": (loose.Text(5), "omni.Text: text is int 5: use a str"),
    "text of bytes": (loose.Text(b"x"), "omni.Text: text is bytes b'x': use a str"),
    "text of nothing": (loose.Text(None), "omni.Text: text is NoneType None: use a str"),
    "usage of a str": (loose.Usage("3", 1), "omni.Usage: prompt_tokens is str '3': use an int, 0 or more"),
    "usage of a float": (loose.Usage(1, 2.5), "omni.Usage: completion_tokens is float 2.5: use an int, 0 or more"),
    "usage of a str in a cache": (
        loose.Usage(1, 1, "3"),
        "omni.Usage: cached_tokens is str '3': use an int, 0 or more",
    ),
    "usage of truth": (loose.Usage(True), "omni.Usage: prompt_tokens is bool True: use an int, 0 or more"),
    "usage below none": (loose.Usage(-1), "omni.Usage: prompt_tokens is int -1: use an int, 0 or more"),
    "usage beyond": (loose.Usage(2**80), "omni.Usage: prompt_tokens is int 1208925819614629174706176: use an int"),
    "finish of none": (loose.Finish(None), "omni.Finish: reason is NoneType None: use one of stop, length"),
    "finish of its own": (loose.Finish("tired"), "omni.Finish: reason is str 'tired': use one of stop, length"),
    "note of no name": (loose.Note("", 1), "omni.Note: name is str '': use a str of at most 64 characters"),
    "note of a number": (loose.Note(3, 1), "omni.Note: name is int 3: use a str"),
    "note of controls": (loose.Note("a\0", 1), "omni.Note: name is str 'a\\x00': use a str"),
    "note of a tuple": (loose.Note("a", (1, 2)), "tuple: use a list"),
    "a rate that is a float": (loose.Audio(TONE, 16000.0), "omni.Audio: sample_rate is float 16000.0: use an int"),
    "a rate of nothing": (loose.Audio(TONE, 0), "omni.Audio: sample_rate is int 0: use an int from 1000 to 192000"),
    "samples in a list": (loose.Audio([0.0], 16000), "omni.Audio: samples are list: use a float32 tensor or array"),
    "samples of text": (loose.Audio("abc", 16000), "omni.Audio: samples are str: use a float32 tensor or array"),
    "complex samples": (
        loose.Audio(TONE.astype(np.complex64), 16000),
        "omni.Audio: samples of complex64: use float32",
    ),
    "a cube": (
        loose.Audio(np.zeros((2, 2, 2), np.float32), 16000),
        "omni.Audio: samples of shape [2, 2, 2]: use [n]",
    ),
    "ninety channels": (loose.Audio(torch.zeros(2, 90), 16000), "omni.Audio: samples of shape [2, 90]: use [n]"),
    "one number": (loose.Audio(torch.tensor(0.5), 16000), "omni.Audio: samples of shape []: use [n]"),
}
SOUND: list[Any] = [
    omni.Text(""),
    omni.Usage(),
    omni.Usage(2**53, 0),
    omni.Finish("content_filter"),
    omni.Note("segments", [{"a": 1}]),
    omni.Audio(TONE, 16000),
    omni.Audio(torch.zeros(3, 2, dtype=torch.bfloat16), 192_000),
    omni.Audio(np.zeros(0, np.int16), 1000),
    omni.Audio(RawTensor("float16", (1,), b"ab"), 8000),
]


@pytest.mark.parametrize("value", SOUND, ids=repr)
def test_what_a_client_can_have_is_not_refused(value: Any) -> None:
    assert outputs.problem(value) is None
    assert outputs.unshown(value) is None and outputs.shows([value])
    encoding.extract(value)


@pytest.mark.proves("invalid-output")
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("apart", [True, False], ids=["between processes", "in one process"])
async def test_a_wrong_output_is_refused_at_its_sender_with_the_reason(
    name: str, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    value, problem = WRONG[name]

    def function(payload: omni.StagePayload) -> Any:
        return [value] if payload.request.id == "bad" else payload.data

    functions = {"a": function, "b": lambda payload: payload.data}
    plans = [plan("a", next=("b",)), plan("b", terminal=True, inputs_from=("a",))]
    failure = await refused(plans, functions, apart=apart)
    assert problem in failure.message
    assert f"request bad failed in a.result: {failure.message}" in caplog.text


async def refused(plans: list[StagePlan], functions: dict[str, Any], *, apart: bool) -> Failure:
    """How the request ``bad`` failed, beside ``good``, which is served. apart: each stage has a process of its own."""
    async with world() as made:
        for group in [[one] for one in plans] if apart else [plans]:
            made.process(f"p{group[0].name}", group, functions)
        made.submit("bad", "a", "x")
        made.submit("good", "a", "y")
        await made.until(lambda: "bad" in made.failed() and "good" in made.results())
        failure = made.failed()["bad"]
    assert (failure.code, failure.stage) == ("stage_failed", "a")
    return failure


CHUNKS: dict[str, tuple[Any, str]] = {
    "modality": (lambda: loose.Chunk(1, modality=7), "chunk.modality: int 7: use a str of at most 64 characters"),
    "a long modality": (lambda: loose.Chunk(1, modality="m" * 65), "chunk.modality: str 'mmmm"),
    "metadata": (lambda: loose.Chunk(1, metadata=["a"]), "chunk.metadata: list: use a dict"),
    "metadata's keys": (lambda: loose.Chunk(1, metadata={1: 2}), "chunk.metadata: int key 1: use str keys"),
    "metadata's values": (lambda: loose.Chunk(1, metadata={"a": {1}}), "chunk.metadata['a']: set: use a list"),
    "a target": (lambda: loose.Chunk(1, to=5), "is 5; expected one or more of ['b']"),
    "targets": (lambda: loose.Chunk(1, to=[["b"]]), "is [['b']]; expected one or more of ['b']"),
    "no target": (lambda: loose.Chunk(1, to=[]), "is []; expected one or more of ['b']"),
    "data": (lambda: loose.Chunk(loose.Text(5)), "chunk.data: omni.Text: text is int 5: use a str"),
}


@pytest.mark.proves("invalid-output")
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("apart", [True, False], ids=["between processes", "in one process"])
async def test_a_wrong_chunk_is_refused_at_its_sender_with_its_field(name: str, apart: bool) -> None:
    make, problem = CHUNKS[name]

    def function(payload: omni.StagePayload) -> Iterator[Any]:
        yield make() if payload.request.id == "bad" else omni.Chunk(1)
        yield omni.Result(payload.data)

    async def after(session: omni.Session) -> Any:
        yield omni.Result((await session.payload()).data)

    functions = {"a": function, "b": omni.Streaming(after)}
    plans = [
        plan("a", next=("b",), stream_to=("b",)),
        plan("b", terminal=True, inputs_from=("a",), stream_from=("a",)),
    ]
    failure = await refused(plans, functions, apart=apart)
    assert problem in failure.message


class OddMeta(type):
    def __repr__(cls) -> str:
        raise ValueError("no words")


class Odd(metaclass=OddMeta):
    """Neither it nor its type can be printed."""

    def __repr__(self) -> str:
        raise SystemExit(1)


@pytest.mark.parametrize(
    "value",
    [
        loose.Text(Odd()),
        loose.Usage(Odd()),
        loose.Finish(Odd()),
        loose.Note(Odd(), 1),
        loose.Audio(Odd(), Odd()),
    ],
)
def test_an_output_that_cannot_be_printed_is_refused_all_the_same(value: Any) -> None:
    assert "omni." in str(outputs.problem(value))


def ask(made: World, request_id: str, kind: Any, data: Any) -> None:
    request = OmniRequest(id=request_id, kind=kind, inputs=data)
    extracted = encoding.extract({"request": request}, where="request", as_fields=True)
    body = Body(extracted.value_bytes, tuple(extracted.refs), extracted.flat())
    made.send(OWNER, made.stage_of["a"], Submit(made.header(request_id), "a", body))


def as_asked(payload: omni.StagePayload) -> Iterator[Any]:
    """The inputs' chunks and their result, by name."""
    for name in payload.data[:-1]:
        yield omni.Chunk(GIVEN[name])
    if payload.data[-1] != "nothing":
        yield omni.Result(GIVEN[payload.data[-1]])


GIVEN: dict[str, Any] = {
    "str": "x",
    "none": None,
    "text": omni.Text("x"),
    "dict": {"a": 1},
    "list": [omni.Usage(1), omni.Finish("stop")],
    "mixed": [omni.Text("x"), {"a": 1}],
    "strs": ["x", "y"],
    "vectors": [omni.Vectors(np.zeros((1, 2), np.float32)), omni.Usage(1)],
    "scores": omni.Scores([0.5]),
    "image": omni.Image(b"png"),
}


@pytest.mark.proves("invalid-output")
@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (["str"], "str"),
        (["dict"], "dict"),
        (["strs"], "str"),
        (["str", "nothing"], "str"),
        (["str", "none"], "str"),
        (["none", "dict"], "dict"),
        (["text"], None),
        (["none"], None),
        (["list"], None),
        (["mixed"], None),
        (["text", "dict"], None),
        (["str", "text"], None),
        (["text", "nothing"], None),
        (["nothing"], None),
    ],
)
async def test_a_terminal_without_output_for_an_openai_route_fails_with_the_outputs_that_it_takes(
    given: list[str], refused: str | None
) -> None:
    async with world() as made:
        made.process("pa", [plan("a", terminal=True)], {"a": as_asked})
        ask(made, "pipeline", "pipeline", given)
        for kind in ("chat", "speech", "transcription"):
            ask(made, kind, kind, given)
        await made.until(lambda: len(made.ended()) == 4)
        assert set(made.failed()) == ({"chat", "speech", "transcription"} if refused else set())
        for failure in made.failed().values():
            assert (failure.code, failure.stage) == ("stage_failed", "a")
            assert failure.message.startswith(f"result: {refused}: this request's route shows omni.Text")


TOLD = "omni.Text, omni.Audio, omni.Usage, omni.Finish and omni.Note"


@pytest.mark.parametrize(
    ("kind", "given", "refused"),
    [
        ("chat", ["vectors"], ("Vectors", TOLD)),
        ("chat", ["scores"], ("Scores", TOLD)),
        ("speech", ["scores", "none"], ("Scores", TOLD)),
        ("completion", ["scores"], ("Scores", TOLD)),
        ("embedding", ["vectors"], None),
        ("embedding", ["scores"], ("Scores", "omni.Vectors and omni.Usage")),
        ("embedding", ["text"], ("Text", "omni.Vectors and omni.Usage")),
        ("score", ["scores"], None),
        ("score", ["vectors"], ("Vectors", "omni.Scores and omni.Usage")),
        ("pipeline", ["scores"], None),
        ("image", ["image"], None),
        ("image", ["text"], ("Text", "omni.Image and omni.Usage")),
        ("chat", ["image"], ("Image", TOLD)),
    ],
)
async def test_a_stage_refuses_what_the_route_of_its_request_does_not_show(
    kind: str, given: list[str], refused: tuple[str, str] | None
) -> None:
    async with world() as made:
        made.process("pa", [plan("a", terminal=True)], {"a": as_asked})
        ask(made, "r", kind, given)
        await made.until(lambda: len(made.ended()) == 1)
        messages = [failure.message for failure in made.failed().values()]
    wanted = [] if refused is None else [f"result: {refused[0]}: this request's route shows {refused[1]}: wrap it"]
    assert [one[: len(wanted[0])] for one in messages] == wanted if wanted else not messages
