"""A frame: a message in its envelope, as a link carries it. Encoded by `codec`, numbered by `rules.flow.links`."""

from __future__ import annotations

from typing import Final

import msgspec

from stage_runtime.wire.messages import Message
from stage_runtime.wire.parts import Count, Name

PROTOCOL: Final = 8  #: Raised with every change that an older process would misread.
FRAME_LIMIT: Final = 1 << 20  # a valid frame is never larger: the value of a large payload goes by relay too


class RequestRef(msgspec.Struct, frozen=True, array_like=True):
    """The request that a message belongs to; bounded by its message, which is checked before it is sent."""

    request_id: str
    attempt: int
    owner: str = ""  #: Empty: the receiver's own.


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One frame on the wire: sender, receiver, sequence number, acknowledgement, and the encoded message.

    The message is encoded separately, so that a message that cannot be decoded does not lose its sequence number.
    """

    protocol: int
    sender: Name
    receiver: Name  #: Empty in a Hello, when the other end's incarnation is not known yet.
    session: Count  #: The sender's number for this link; a later link has a higher one. 0 in a Hello.
    ack_session: Count  #: The receiver's session that ``ack`` refers to; 0: no frame was received on this link yet.
    seq: Count  #: 1.. per session; 0: outside the order, may be lost.
    ack: Count  #: All frames of the receiver up to this one were received.
    request: RequestRef | None  #: The request that fails when the message cannot be decoded.
    message: memoryview  #: MessagePack of a `Message`; where it came from a socket, it lies in the frame's bytes.


class Frame(msgspec.Struct, frozen=True):
    """An `Envelope` with its decoded message."""

    protocol: int
    sender: str
    receiver: str
    session: int
    ack_session: int
    seq: int
    ack: int
    message: Message
