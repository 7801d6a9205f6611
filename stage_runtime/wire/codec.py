"""Encodes and decodes frames. Bytes from a socket are not trusted: malformed ones raise ProtocolError.

A frame is decoded in two steps: its envelope (`opened`), then its message (`read`). So a message that cannot be decoded
keeps its sequence number, and later messages are not lost. A sender decodes its own message before it is sent, so that
it never sends one that a receiver of this version rejects.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from stage_runtime.errors import UNDECODABLE, OtherProtocol, ProtocolError, ValueRefused
from stage_runtime.wire.frames import FRAME_LIMIT, PROTOCOL, Envelope, Frame, RequestRef
from stage_runtime.wire.messages import Message
from stage_runtime.wire.parts import NAME_LIMIT

_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_loose = msgspec.msgpack.Decoder(list[msgspec.Raw])
_NAME = "n" * NAME_LIMIT
_ENVELOPE_HEAD = 0x90 + len(Envelope.__struct_fields__)  # MessagePack: an array of so many
_BIN = b"\xc6\0\0\0\0"  # MessagePack: bytes, whose number follows in four
_LENGTH = struct.Struct(">I")
_FIELD = re.compile(r" - at `[^$]*\$\[(\d+)\]")


def encode(frame: Frame) -> bytes:
    """Write one frame: an `Envelope`, and its message straight into it, for that may have tens of KiB.

    Raises: ValueRefused: a field is invalid for the receiver, or the frame is over its size limit: the receiver would
        close the connection at every retransmission.
    """
    message = frame.message
    try:
        request = REQUEST_OF[type(message)](message)
        numbers = (frame.session, frame.ack_session, frame.seq, frame.ack)
        data = bytearray(_encoder.encode((frame.protocol, frame.sender, frame.receiver, *numbers, request)))
        data[0] = _ENVELOPE_HEAD
        data += _BIN
        start = len(data)
        _encoder.encode_into(message, data, start)
        _LENGTH.pack_into(data, start - 4, len(data) - start)
        _messages.decode(memoryview(data)[start:])
    except (*UNDECODABLE, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _refused(message, error) from error
    if len(data) > FRAME_LIMIT:
        raise ValueRefused(
            type(message).__name__,
            f"a control message of {len(data)} bytes, over {FRAME_LIMIT}: too many tensors, or too long a text",
        )
    return data  # type: ignore[return-value]  # to make bytes of the bytearray would copy it


def check(message: Message) -> None:
    """Refuse now what `encode` would refuse later. Raises: ValueRefused."""
    encode(Frame(PROTOCOL, _NAME, _NAME, 1 << 62, 1 << 62, 1 << 62, 1 << 62, message))


def opened(data: bytes | memoryview) -> Envelope:
    """Decode the envelope of a frame.

    Raises: OtherProtocol; ProtocolError: garbage, too large, or a field out of bounds.
    """
    if len(data) > FRAME_LIMIT:
        raise ProtocolError(f"frame of {len(data)} bytes, over {FRAME_LIMIT}")
    try:
        envelope = _envelopes.decode(data)
    except UNDECODABLE as error:
        raise _misread(data, error) from error
    if envelope.protocol != PROTOCOL:
        raise OtherProtocol(f"protocol {envelope.protocol}, not {PROTOCOL}")
    return envelope


def read(envelope: Envelope) -> Message:
    """Read the message. Raises: ProtocolError: it is not a message, or a field is out of bounds."""
    try:
        return _messages.decode(envelope.message)
    except UNDECODABLE as error:
        raise ProtocolError(f"no message: {error}") from error


def decode(data: bytes | memoryview) -> Frame:
    """Read one frame, both steps at once. Raises: as they do."""
    envelope = opened(data)
    numbers = (envelope.session, envelope.ack_session, envelope.seq, envelope.ack)
    return Frame(envelope.protocol, envelope.sender, envelope.receiver, *numbers, read(envelope))


def _of_header(message: Any) -> RequestRef:
    header = message.header
    return RequestRef(header.request_id, header.attempt, header.owner)


def _no_request(message: Any) -> None:
    return None


def _where_request(kind: type[msgspec.Struct]) -> Callable[[Any], RequestRef | None]:
    """How to find the request of a message of this kind."""
    fields = kind.__struct_fields__
    if "header" in fields:
        return _of_header
    if "request_id" not in fields or "attempt" not in fields:
        return _no_request
    if "owner" in fields:
        return lambda message: RequestRef(message.request_id, message.attempt, message.owner)
    return lambda message: RequestRef(message.request_id, message.attempt)


#: The function for each type of message that finds the request that fails when the receiver cannot decode it.
REQUEST_OF: dict[type, Callable[[Any], RequestRef | None]] = {kind: _where_request(kind) for kind in get_args(Message)}


def _refused(message: Any, error: Exception) -> ValueRefused:
    """Names the field: ``DataReady.modality``."""
    path = type(message).__name__
    found = _FIELD.search(str(error))
    if found is not None and int(found[1]) > 0:
        path += f".{message.__struct_fields__[int(found[1]) - 1]}"
    return ValueRefused(path, str(error).partition(" - at `")[0])


def _misread(data: bytes | memoryview, error: Exception) -> ProtocolError:
    """The version first: fields that do not fit usually mean another protocol."""
    try:
        version = msgspec.msgpack.decode(_loose.decode(data)[0], type=int)
    except (*UNDECODABLE, IndexError):
        return ProtocolError(f"not a frame: {error}")
    if version == PROTOCOL:
        return ProtocolError(f"not a frame: {error}")
    return OtherProtocol(f"protocol {version}, not {PROTOCOL}")
