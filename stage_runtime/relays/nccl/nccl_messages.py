"""The messages of two nccl relays: facts in Hello, metadata in control messages, orders on a connection per world.

The receiver connects to the sender, and the world lives as long as the connection.
"""

from __future__ import annotations

import socket
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from stage_runtime.relays.moving.pace import LEAST_NBYTES

MOST_MESSAGE_NBYTES: Final = 4096  # an order has less than 200
MOST_NBYTES: Final = 16 << 20  # of a piece
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]


class NcclFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a peer must know to receive from us.

    orders, store: where we listen for the connections of receivers, and where the worlds' TCPStore is.
    gpu: the device that NCCL is used with, no other process's; empty: gloo, on the CPU.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    orders: Port
    store: Port
    token: Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
    gpu: Annotated[str, msgspec.Meta(max_length=255)] = ""


class NcclMetadata(msgspec.Struct, frozen=True, array_like=True):
    """A transfer."""

    transfer: int
    nbytes: Count


class Join(msgspec.Struct, frozen=True, array_like=True, tag=6):  # 1 was not answered
    """Receiver to sender, first: be rank 1 of the world of that name. token: the sender's, as announced in Hello."""

    token: str
    receiver: str
    world: Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
    backend: Literal["gloo", "nccl"]


class Joining(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Sender to receiver: you are known here, and I join that world now."""


class NcclGrant(msgspec.Struct, frozen=True, array_like=True, tag=5):  # 2 had no size of pieces
    """Receiver to sender: I have memory for that transfer. They are sent in the order of the grants, in such pieces."""

    transfer: int
    nbytes: Count
    piece_nbytes: Annotated[int, msgspec.Meta(ge=LEAST_NBYTES, le=MOST_NBYTES)]


class Next(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Sender to receiver: that transfer is the next in the world."""

    transfer: int


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Sender to receiver: that transfer does not come."""

    transfer: int
    reason: str


WorldOrder: TypeAlias = Join | NcclGrant
Answer: TypeAlias = Joining | Next | Withdrawn

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(WorldOrder).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def send(connection: socket.socket, message: Any) -> None:
    """Raises: OSError: the other end is gone, or takes nothing."""
    body = encode(message)
    connection.sendall(len(body).to_bytes(4, "big") + body)


def receive(connection: socket.socket) -> bytes:
    """Wait for a message.

    Raises: OSError: the other end is gone, nothing came in time, or what came is not a message.
    """
    nbytes = int.from_bytes(_exactly(connection, 4), "big")
    if nbytes > MOST_MESSAGE_NBYTES:
        raise OSError(f"a message of {nbytes} bytes")
    return _exactly(connection, nbytes)


def keep_alive(connection: socket.socket) -> None:
    """Notice within 4 s that the machine at the other end does not answer, also while nothing is sent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        piece = connection.recv(nbytes - len(found))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        found += piece
    return found
