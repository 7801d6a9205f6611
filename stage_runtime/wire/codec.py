"""Frames to bytes and back. Bytes from a socket are not trusted: whatever is wrong with them is a ProtocolError."""

from __future__ import annotations

import msgspec

from stage_runtime.errors import OtherProtocol, ProtocolError, ValueRefused
from stage_runtime.wire.messages import FRAME_LIMIT, PROTOCOL, Frame

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_loose = msgspec.msgpack.Decoder(list[msgspec.Raw])


def encode(frame: Frame) -> bytes:
    """Write one frame.

    Raises: ValueRefused: something in it is no MessagePack, or it is so large that the receiver would close the
        connection on it, and again each time that it is said.
    """
    try:
        data = _encoder.encode(frame)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueRefused(type(frame.message).__name__, str(error)) from error
    if len(data) > FRAME_LIMIT:
        raise ValueRefused(
            type(frame.message).__name__,
            f"a control message of {len(data)} bytes, over {FRAME_LIMIT}: too many tensors, or too long a text",
        )
    return data


def decode(data: bytes | memoryview) -> Frame:
    """Read one frame.

    Raises: OtherProtocol; ProtocolError: garbage, too large, or a field out of bounds.
    """
    if len(data) > FRAME_LIMIT:
        raise ProtocolError(f"frame of {len(data)} bytes, over {FRAME_LIMIT}")
    try:
        frame = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _misread(data, error) from error
    if frame.protocol != PROTOCOL:
        raise OtherProtocol(f"protocol {frame.protocol}, not {PROTOCOL}")
    return frame


def _misread(data: bytes | memoryview, error: Exception) -> ProtocolError:
    """The version first: fields that do not fit usually mean another protocol."""
    try:
        version = msgspec.msgpack.decode(_loose.decode(data)[0], type=int)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, IndexError):
        return ProtocolError(f"not a frame: {error}")
    if version == PROTOCOL:
        return ProtocolError(f"not a frame: {error}")
    return OtherProtocol(f"protocol {version}, not {PROTOCOL}")
