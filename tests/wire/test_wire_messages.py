"""The wire as others see it: every message read back, and read by an independent decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgpack
import pytest

from stage_runtime.wire import codec
from stage_runtime.wire.frames import PROTOCOL, Frame
from stage_runtime.wire.messages import BaseMessage, DataReady, Message, Ready
from stage_runtime.wire.parts import INLINE_LIMIT, Body
from tests.wire.wire_samples import HEADER, SAMPLES


def framed(message: Message) -> Frame:
    return Frame(PROTOCOL, "sender", "receiver", 11, 10, 9, 8, message)


#: tag -> the request of a message, as its envelope has it. Every other message belongs to none.
REQUESTS: dict[int, Callable[[list[Any]], list[Any]]] = {
    1: lambda plain: plain[1][:3],
    2: lambda plain: plain[1][:3],
    3: lambda plain: [*plain[1:3], ""],
    4: lambda plain: [*plain[1:3], ""],
    5: lambda plain: plain[1:4],
    7: lambda plain: plain[1:4],
    8: lambda plain: [*plain[1:3], ""],
    12: lambda plain: plain[1][:3],
    15: lambda plain: [*plain[1:3], ""],
    71: lambda plain: [plain[3], plain[5], plain[4]],
    72: lambda plain: [plain[2], plain[4], plain[3]],
}


def request_of(plain: list[Any]) -> list[Any] | None:
    found = REQUESTS.get(plain[0])
    return found(plain) if found is not None else None


def name(sample: object) -> str:
    return type(sample).__name__ if isinstance(sample, BaseMessage) else ""


@pytest.mark.parametrize(("message", "_plain"), SAMPLES, ids=name)
def test_every_message_comes_back_as_it_was_said(message: Message, _plain: list[Any]) -> None:
    frame = framed(message)
    assert codec.decode(codec.encode(frame)) == frame


@pytest.mark.parametrize(("message", "plain"), SAMPLES, ids=name)
def test_msgpack_reads_every_message_field_by_field(message: Message, plain: list[Any]) -> None:
    *head, body = msgpack.unpackb(codec.encode(framed(message)))
    assert head == [PROTOCOL, "sender", "receiver", 11, 10, 9, 8, request_of(plain)]
    assert msgpack.unpackb(body) == plain


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 65_535, 65_536, INLINE_LIMIT])
def test_the_bytes_of_a_payload_lie_in_the_frame_that_brought_them(nbytes: int) -> None:
    """And so does whatever has been sent: a sender may write into its buffer again."""
    buffer = bytearray(b"x" * nbytes)
    frame = codec.encode(framed(DataReady(HEADER, "a", "b", Body(inline=memoryview(buffer)))))
    buffer[:] = bytes(nbytes)
    message = codec.read(codec.opened(frame))
    assert isinstance(message, DataReady) and message.body is not None
    assert message.body.inline == b"x" * nbytes
    assert message.body.inline.obj is frame


@pytest.mark.parametrize(("message", "plain"), SAMPLES, ids=name)
def test_what_msgpack_writes_is_understood(message: Message, plain: list[Any]) -> None:
    encoded = msgpack.packb([PROTOCOL, "sender", "receiver", 11, 10, 9, 8, request_of(plain), msgpack.packb(plain)])
    assert codec.decode(encoded) == framed(message)
    assert codec.read(codec.opened(encoded)) == message


def test_the_table_has_every_message_there_is_once() -> None:
    assert sorted(type(message).__name__ for message, _ in SAMPLES) == sorted(
        kind.__name__ for kind in get_args(Message)
    )


def test_every_sample_says_every_field_of_its_type() -> None:
    for message, plain in SAMPLES:
        assert len(plain) == 1 + len(message.__struct_fields__), type(message).__name__


def test_no_two_messages_share_a_tag() -> None:
    tags = [plain[0] for _, plain in SAMPLES]
    assert len(set(tags)) == len(tags)


def test_trailing_fields_that_a_peer_leaves_out_have_their_defaults() -> None:
    encoded = msgpack.packb([PROTOCOL, "sender", "receiver", 11, 10, 9, 8, None, msgpack.packb([60])])
    assert codec.decode(encoded).message.gap is False  # type: ignore[union-attr]
    assert codec.decode(msgpack.packb([PROTOCOL, "a", "", 1, 0, 0, 0, None, msgpack.packb([24])])) == Frame(
        PROTOCOL, "a", "", 1, 0, 0, 0, Ready()
    )
