"""Translating as a pure room: properties over any bodies and any events."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stage_runtime.coordinator.events import AnswerEvent, ChunkEvent, ResultEvent
from stage_runtime.errors import InvalidRequest
from stage_runtime.web import serving
from stage_runtime.web.reading import multipart
from stage_runtime.web.sound.codecs import encoding, samples
from stage_runtime.web.translating import jsonable, pipelines
from stage_runtime.web.translating.audio import speaking
from stage_runtime.web.translating.generation import chat
from stage_runtime.web.translating.generation.completions import Completion, CompletionChunks
from stage_runtime.wire.outputs import USAGE_SO_FAR
from stage_runtime.wire.values import Audio, Finish, RawTensor, Text, Usage
from tests.thoroughness import examples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
OUTPUTS = st.one_of(
    st.builds(Text, st.text(max_size=6)),
    st.builds(Usage, st.integers(0, 9), st.integers(0, 9)),
    st.builds(Finish, st.sampled_from(["stop", "length"])),
    st.integers(0, 300).map(lambda length: Audio(np.full(length, 0.25, np.float32), 24_000)),
)


@st.composite
def event_lists(draw: st.DrawFn) -> list[AnswerEvent]:
    """A request's events: chunks of some stages in any order, then each stage's result."""
    data = OUTPUTS | st.lists(OUTPUTS, max_size=3)
    stages = draw(st.lists(st.sampled_from(["think", "voice"]), max_size=8))
    chunks = [ChunkEvent(stage=stage, index=index, data=draw(data)) for index, stage in enumerate(stages)]
    results = [ResultEvent(stage=stage, data=draw(st.none() | data)) for stage in ("think", "voice")]
    return [*chunks, *results]


@settings(max_examples=examples(150), deadline=None)
@given(events=event_lists(), modalities=st.sampled_from([["text"], ["audio"], ["text", "audio"]]))
def test_a_stream_says_what_the_whole_answer_says(events: list[AnswerEvent], modalities: list[str]) -> None:
    head = {"messages": [{"role": "user", "content": "x"}], "modalities": modalities}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    whole_call = chat.call(chat.decode(msgspec.json.encode({**head, "audio": {"format": "pcm"}})))
    stream_call = chat.call(chat.decode(msgspec.json.encode({**head, **options})))
    facts: dict[str, Any] = {"request_id": "r", "model": "m", "created": 1}
    whole, chunks = Completion(call=whole_call, **facts), CompletionChunks(call=stream_call, **facts)
    file, made = encoding.Whole("pcm"), encoding.encoder("pcm")
    payloads: list[dict[str, Any]] = []
    for event in events:
        whole.add(event)
        for shown in chunks.add(event):
            payloads += chunks.sound(made.write(samples.flat(shown))) if isinstance(shown, Audio) else [shown]
    payloads += chunks.finish(made.close())
    for _, sound in whole.audio:
        file.write(samples.flat(sound))
    answer = whole.finish(file.close() if whole.audio else None)

    *pieces, last = payloads
    choices = [piece["choices"][0] for piece in pieces]
    message, deltas = answer["choices"][0]["message"], [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant"
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == answer["choices"][0]["finish_reason"]
    assert last["usage"] == answer["usage"]
    # the whole answer keeps two terminals' words apart, a stream has them as they come
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    assert sorted(streamed) == sorted(message["content"] or "")
    heard = b"".join(base64.b64decode(delta["audio"].get("data", "")) for delta in deltas if "audio" in delta)
    assert len(heard) == len(base64.b64decode(message["audio"]["data"] if "audio" in message else ""))
    assert ("audio" in modalities) or not heard


TEXTS = st.builds(
    Text,
    st.text(st.characters(codec="utf-8") | st.sampled_from('"\\\u0085\u2028'), max_size=6),
    choice=st.integers(0, 1),
    logprobs=st.none() | st.just([{"token": "a"}]),
)
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.just(2),
        "logprobs": st.just(True),
        "return_token_ids": st.just(True),
        "modalities": st.just(["text", "audio"]),
        "stream_options": st.sampled_from([{"include_usage": True}, CONTINUOUS]),
    },
)


@settings(max_examples=examples(200), deadline=None)
@given(
    outputs=st.lists(TEXTS | st.lists(TEXTS | OUTPUTS, max_size=2), max_size=6),
    counted=st.booleans(),
    options=OPTIONS,
    model=st.text(max_size=3) | st.just('"content":""'),
)
@example(outputs=[Text("a")] * 3, counted=True, options={"stream_options": CONTINUOUS}, model="m")
@example(outputs=[Text("a", logprobs=[{"token": "a"}])] * 3, counted=False, options={"logprobs": True}, model="m")
def test_a_frame_of_text_alone_has_the_bytes_of_the_whole_chunk(
    outputs: list[Any], counted: bool, options: dict[str, Any], model: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "audio": {"format": "pcm"}, **options}
    call = chat.call(chat.decode(msgspec.json.encode(body)), frozenset(options))
    one, other = (CompletionChunks(call=call, request_id="r", model=model, created=1) for _ in range(2))
    frames: dict[int, serving.TextFrame] = {}
    for index, data in enumerate(outputs):
        metadata = {USAGE_SO_FAR: [3, index, 1]} if counted else None
        event = ChunkEvent(stage="think", index=index, data=data, metadata=metadata)
        whole = [serving.data_frame(shown) for shown in one.add(event) if not isinstance(shown, Audio)]
        if (text := other.plain_text(event)) is not None:
            if text.choice not in frames:
                frames[text.choice] = serving.TextFrame(other.with_text(text.choice), "content")
            assert [frames[text.choice].of(text.text)] == whole
        else:
            found = [serving.data_frame(shown) for shown in other.add(event) if not isinstance(shown, Audio)]
            assert found == whole
    end = ResultEvent(stage="think", data=[Text("ab"), Usage(5, 4)])
    assert [*one.add(end), *one.finish()] == [*other.add(end), *other.finish()]
    assert one.check() == other.check()


@settings(max_examples=examples(150), deadline=None)
@given(
    body=JSON | st.fixed_dictionaries({"messages": JSON, "inputs": JSON, "input": JSON}), extra=st.binary(max_size=3)
)
def test_any_body_is_read_or_refused_as_the_clients_fault(body: Any, extra: bytes) -> None:
    raw = msgspec.json.encode(body) + extra
    for decode in (chat.decode, pipelines.decode, speaking.decode):
        try:
            decode(raw)
        except InvalidRequest as refused:
            assert refused.message
            # msgspec's own way of naming a place, unless the client has chosen such a key
            assert "$." not in (refused.param or "") and not (refused.param or "").startswith("$[")


PARTS = st.lists(
    st.tuples(
        st.text("abcdefgh_", min_size=1, max_size=8),
        st.none() | st.text("abc .wav", min_size=1, max_size=8),
        st.binary(max_size=40) | st.just(b"\r\n--") | st.just(b"\r\n"),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(100), deadline=None)
@given(parts=PARTS)
def test_a_form_is_read_back_as_it_was_sent(parts: list[tuple[str, str | None, bytes]]) -> None:
    files = [(name, (filename, data, "x/y")) for name, filename, data in parts]
    request = httpx.Request("POST", "http://h", files=files)
    read = multipart.parse(request.read(), request.headers["content-type"])
    assert [(part.name, part.filename, part.data) for part in read] == parts
    assert {part.content_type for part in read} == {"x/y"}


@settings(max_examples=examples(100), deadline=None)
@given(data=st.binary(max_size=60), cut=st.integers(1, 30))
def test_a_torn_form_is_refused(data: bytes, cut: int) -> None:
    request = httpx.Request("POST", "http://h", files=[("a", ("f", data))])
    with pytest.raises(InvalidRequest, match="not multipart/form-data"):
        multipart.parse(request.read()[: -cut - 2], request.headers["content-type"])


def test_a_form_is_bounded_in_parts_and_headers() -> None:
    many = httpx.Request("POST", "http://h", files=[("a", ("f", b"x"))] * 257)
    with pytest.raises(InvalidRequest, match="more than 256 parts"):
        multipart.parse(many.read(), many.headers["content-type"])
    long = b"--b\r\ncontent-disposition: form-data; name=" + b"a" * 9000 + b"\r\n\r\nx\r\n--b--\r\n"
    with pytest.raises(InvalidRequest, match="Maximum header size exceeded"):
        multipart.parse(long, "multipart/form-data; boundary=b")


@pytest.mark.parametrize("name", [b"a\tb", b"a\x01", b"\x7f", b"n" * 257], ids=["tab", "start", "delete", "long"])
def test_a_part_name_that_is_no_name_is_refused(name: bytes) -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="' + name + b'"; filename="f"\r\n\r\nx\r\n--b--\r\n'
    with pytest.raises(InvalidRequest, match="part 0: a name has at most 256 bytes, no control characters"):
        multipart.parse(body, "multipart/form-data; boundary=b")


VALUES = st.recursive(
    JSON
    | st.binary(max_size=9)
    | st.builds(lambda data: RawTensor("uint8", (len(data),), data), st.binary(max_size=9)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(100), deadline=None)
@given(value=VALUES)
def test_any_value_of_the_wire_can_be_said_in_json(value: Any) -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(jsonable.plain(value)))
    assert type(decoded) is type(jsonable.plain(value)) or isinstance(value, float | int)


def test_fields_that_clients_of_other_servers_send_inside_messages_are_skipped() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}], "weight": 1}
    body = chat.decode(msgspec.json.encode({"messages": [message]}))
    assert chat.request(body, "r", {}).last_text() == "x"
