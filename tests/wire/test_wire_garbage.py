"""Bytes out of a socket are a frame, or a ProtocolError, and nothing else."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.errors import OtherProtocol, ProtocolError, ValueRefused
from stage_runtime.wire import codec
from stage_runtime.wire.frames import FRAME_LIMIT, PROTOCOL, Frame
from stage_runtime.wire.messages import (
    AdminCall,
    AdminReply,
    Complete,
    DataReady,
    ForwardAbort,
    Message,
    Release,
    Stream,
)
from stage_runtime.wire.parts import ID_LIMIT, NAME_LIMIT, Failure, Header
from tests.thoroughness import examples
from tests.wire.wire_samples import SAMPLES

FRAMES = [codec.encode(Frame(PROTOCOL, "sender", "receiver", 11, 10, 9, 8, message)) for message, _ in SAMPLES]
HEAD: list[Any] = [PROTOCOL, "a", "b", 1, 0, 1, 0]  # an envelope but for its request and message
NO_HEAD = b"\x99" + bytes([PROTOCOL]) + b"\xa1a\xa1b\x01\x00\x01\x00\xc0"  # an envelope but for its message
READY = msgpack.packb([24])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=5),
    max_leaves=20,
)


def framed(message: bytes) -> bytes:
    data: bytes = msgpack.packb([*HEAD, None, message])
    return data


def decoded(data: bytes) -> Frame | None:
    """The frame, or None where the codec refuses; anything else it raises fails the test."""
    try:
        return codec.decode(data)
    except ProtocolError:
        return None


@given(st.binary(max_size=300))
def test_random_bytes_are_a_protocol_error(data: bytes) -> None:
    assert decoded(data) is None or data[:1] == b"\x99"  # an array of nine, and even then rarely


@given(PLAIN)
def test_any_other_messagepack_is_a_protocol_error(value: Any) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(msgpack.packb(value))


@given(st.lists(PLAIN, max_size=9))
def test_a_frame_of_the_wrong_things_is_a_protocol_error(fields: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(msgpack.packb([PROTOCOL, *fields]))


@given(st.sampled_from(FRAMES), st.data())
def test_a_truncated_frame_is_a_protocol_error(frame: bytes, data: st.DataObject) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(st.sampled_from(FRAMES), st.binary(min_size=1, max_size=8))
def test_bytes_after_a_frame_are_a_protocol_error(frame: bytes, more: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(frame + more)


@given(st.sampled_from(FRAMES), st.data())
def test_a_changed_byte_gives_a_frame_or_a_protocol_error(frame: bytes, data: st.DataObject) -> None:
    changed = bytearray(frame)
    changed[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decoded(bytes(changed))


@pytest.mark.parametrize("depth", [100, 10_000, 100_000])
def test_deep_nesting_is_a_protocol_error(depth: int) -> None:
    for opening in (b"\x91", b"\x81\xa1a"):
        admin = b"\x95\x2b\xa1c\xa1s\xa1o\x81\xa1a"  # AdminCall, whose arguments may hold anything
        nested = admin + opening * depth + b"\xc0"
        if depth == 100:
            assert decoded(framed(nested)) is not None  # so it is the depth that is refused below
            continue
        with pytest.raises(ProtocolError):
            codec.decode(framed(nested))
        assert codec.opened(framed(nested)).seq == 1
        with pytest.raises(ProtocolError):
            codec.opened(NO_HEAD + nested)


@pytest.mark.parametrize("key", [b"\x80", b"\x90", b"\xd4\x05\x00"], ids=["map", "array", "extension"])
def test_impossible_map_keys_are_a_protocol_error(key: bytes) -> None:
    admin = b"\x95\x2b\xa1c\xa1s\xa1o\x81\xa1a\x81" + key + b"\x01"
    decoded(framed(admin))


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match=f"over {FRAME_LIMIT}"):
        codec.decode(b"\x00" * (FRAME_LIMIT + 1))


def test_an_oversized_frame_is_not_said() -> None:
    """libzmq drops the connection that brings one, so its sender would say it for ever."""
    failure = Failure("stage_failed", "x" * FRAME_LIMIT)
    with pytest.raises(ValueRefused, match=r"Complete: a control message of .* bytes, over"):
        codec.encode(Frame(PROTOCOL, "a", "b", 1, 0, 1, 0, Complete("r", 1, "s", failure=failure)))


@pytest.mark.proves("garbage-frames")
@pytest.mark.parametrize("version", [0, PROTOCOL - 1, PROTOCOL + 1, 99, -1])
def test_another_protocol_is_named(version: int) -> None:
    same_shape = msgpack.packb([version, "a", "b", 1, 0, 1, 0, None, READY])
    other_shape = msgpack.packb([version, {"sender": "a"}])
    for encoded in (same_shape, other_shape):
        with pytest.raises(OtherProtocol, match=f"protocol {version}, not {PROTOCOL}"):
            codec.decode(encoded)


@pytest.mark.parametrize(
    "fields",
    [
        [PROTOCOL, "a" * (NAME_LIMIT + 1), "b", 1, 0, 1, 0, None, READY],
        [PROTOCOL, "a", "b", -1, 0, 1, 0, None, READY],
        [PROTOCOL, "a", "b", 1, 0, -1, 0, None, READY],
        [PROTOCOL, "a", "b", 1, 0, 1, 0, ["r", "1"], READY],
        [PROTOCOL, "a", "b", 1, 0, 1, 0, None, [24]],
        [PROTOCOL, "a", "b", 1, 0, 1, 0, None, READY, "more"],
        [True, "a", "b", 1, 0, 1, 0, None, READY],
    ],
)
def test_an_envelope_with_a_field_out_of_bounds_is_a_protocol_error(fields: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        codec.opened(msgpack.packb(fields))


UNREADABLE: list[Any] = [
    [99],
    [],
    [60, True, "more"],
    [8, "", 1, "s"],
    [8, "r" * (ID_LIMIT + 1), 1, "s"],
    [8, "r", 1.5, "s"],
    [2, ["r", 1, "o", {}], "s", "t", None, 0, False, None, 7],
    {"tag": 24},
    None,
]


@pytest.mark.parametrize("plain", [*UNREADABLE, b""], ids=repr)
def test_a_message_that_is_none_is_a_protocol_error_and_keeps_its_place_in_the_order(plain: Any) -> None:
    data = framed(b"" if plain == b"" else msgpack.packb(plain))
    assert codec.opened(data).seq == 1
    with pytest.raises(ProtocolError, match="no message"):
        codec.decode(data)


@given(st.binary(max_size=100))
def test_whatever_a_message_is_its_envelope_is_read(message: bytes) -> None:
    assert codec.opened(framed(message)).message == message


HEADER = Header("r", 1, "owner", {})
ODD: dict[str, Message] = {
    "DataReady.modality": DataReady(HEADER, "a", "b", modality=7),  # type: ignore[arg-type]
    "DataReady.header": DataReady(Header("r" * (ID_LIMIT + 1), 1, "owner", {}), "a", "b"),
    "DataReady.chunk_id": DataReady(HEADER, "a", "b", chunk_id=-1),
    "DataReady.source": DataReady(HEADER, "a" * (NAME_LIMIT + 1), "b"),
    "Complete.failure": Complete("r", 1, "a", failure=Failure("stage_failed", "no", ["a"])),  # type: ignore[arg-type]
    "ForwardAbort.request_id": ForwardAbort("r" * (ID_LIMIT + 1), "asker", "no"),
    "ForwardAbort.asker": ForwardAbort("r", 5, "no"),  # type: ignore[arg-type]
    "Release.transfers": Release((1.5,)),  # type: ignore[arg-type]
    "Stream.body": Stream("r", 1, "a", 0, None),  # type: ignore[arg-type]
    "AdminCall.arguments": AdminCall("c", "s", "o", {1: 2}),  # type: ignore[dict-item]
}


@pytest.mark.proves("invalid-message-field")
@pytest.mark.parametrize("field", ODD)
def test_what_a_receiver_refuses_is_refused_at_the_sender_with_its_field(field: str) -> None:
    with pytest.raises(ValueRefused) as refused:
        codec.encode(Frame(PROTOCOL, "a", "b", 1, 0, 1, 0, ODD[field]))
    assert refused.value.path == field
    with pytest.raises(ValueRefused):
        codec.check(ODD[field])


FIELDS = st.one_of(
    PLAIN, st.just("x" * 200), st.just("\udc80"), st.just(2**64), st.just(float("nan")), st.builds(object)
)


@pytest.mark.proves("invalid-message-field")
@settings(max_examples=examples(500))
@given(st.sampled_from([message for message, _ in SAMPLES]), st.data())
def test_any_value_of_a_field_is_refused_at_the_sender_or_read_by_the_receiver(
    message: Any, data: st.DataObject
) -> None:
    """Every field of every message, replaced by anything."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    if fields:
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(FIELDS)
    try:
        encoded = codec.encode(Frame(PROTOCOL, "a", "b", 1, 0, 1, 0, type(message)(**fields)))
    except ValueRefused:
        return
    codec.decode(encoded)


@pytest.mark.parametrize("value", [object(), "\udcff", 2**64], ids=["object", "surrogate", "too large"])
def test_what_messagepack_cannot_say_is_refused_at_the_sender(value: Any) -> None:
    with pytest.raises(ValueRefused, match="AdminReply"):
        codec.encode(Frame(PROTOCOL, "a", "b", 1, 0, 1, 0, AdminReply("c", "s", 0, value)))
