"""The messages between the coordinator and a codec process, and their framing. Pure.

One connection is one session: an encoder from its first sample to its end, or one look at a file. A frame is its
length (4 bytes, little-endian) and a MessagePack value; nothing is unpickled. The coordinator
checks the type of a reply and relies on nothing else in it.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

LENGTH: Final = struct.Struct("<I")
MAX_NBYTES: Final = 1 << 30  # of one frame: a whole file that a chat answers with is one
BLOCK_NBYTES: Final = 4 << 20  # of samples in one `Write`: what one call costs is bounded, however long the sound is
CALL_S: Final = 10.0  # for one call, processor and wall time; a block of mp3 takes about 0.5 s


class CodecRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of what the coordinator asks for; each but `Open` has one reply."""


class Open(CodecRequest, frozen=True, tag=True, array_like=True):
    """Begin a file of ``format``; empty: none, one is looked at. whole: nothing is given before `Close`."""

    format: str
    whole: bool


class Write(CodecRequest, frozen=True, tag=True, array_like=True):
    """More of the sound: the fields of `samples.Flat`."""

    dtype: str
    frames: int
    channels: int
    sample_rate: int
    data: memoryview


class Close(CodecRequest, frozen=True, tag=True, array_like=True):
    """The sound is over."""


class Measure(CodecRequest, frozen=True, tag=True, array_like=True):
    """How long is this file?"""

    data: memoryview


class CodecReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of what a codec process answers."""


class EncodedBytes(CodecReply, frozen=True, tag=True, array_like=True):
    """Bytes of the file that have become known."""

    data: bytes


class Measured(CodecReply, frozen=True, tag=True, array_like=True):
    """A file's length; None: libsndfile cannot read it."""

    seconds: float | None


class Unencodable(CodecReply, frozen=True, tag=True, array_like=True):
    """The library refuses this sound; the process lives on."""

    problem: str


CodecRequests = Open | Write | Close | Measure
CodecReplies = EncodedBytes | Measured | Unencodable
REQUESTS: Final = msgspec.msgpack.Decoder(CodecRequests)
REPLIES: Final = msgspec.msgpack.Decoder(CodecReplies)


def frame(message: CodecRequest | CodecReply) -> list[bytes]:
    """A message as what goes over the socket."""
    body = msgspec.msgpack.encode(message)
    return [LENGTH.pack(len(body)), body]
