"""Parts that several messages have: a request's header, a payload's body, a failure, a timing, a member.

Array-like structs, as `messages`. A field at the end with a default needs no new protocol.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NewType, TypeAlias

import msgspec

from stage_runtime.wire.tensorrefs import TensorRef

#: A payload up to this rides in its message: one slot and one release saved. A tensor of 64 KiB and a value around it.
INLINE_LIMIT: Final = 72 << 10
NAME_LIMIT: Final = 64
ID_LIMIT: Final = 128
PATH_LIMIT: Final = 4096
ADAPTER_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"  # of a LoRA adapter, as a regular expression

Incarnation = NewType("Incarnation", str)  #: 16 hex digits, fresh for every start of a process.
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
RequestId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_LIMIT)]
FilePath: TypeAlias = Annotated[str, msgspec.Meta(max_length=PATH_LIMIT)]
AdapterName: TypeAlias = Annotated[str, msgspec.Meta(pattern=rf"^{ADAPTER_NAME}\Z")]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One process as the others must know it."""

    incarnation: Name
    group: Name
    unit: Name
    revision: str  #: The revision of its unit.
    endpoint: str
    relays: dict[str, Any]
    stages: tuple[str, ...]
    ready: bool = False
    ranks: Count = 1  #: The number of a TP stage's ranks: the processes of which this one is rank 0.
    #: The number in a coordinator's Welcome: its attempts up to this one are over at the process that it welcomes.
    attempts_over: Count = 0


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The fields that every message of a request carries."""

    request_id: RequestId
    attempt: Count
    owner: Name  #: The incarnation of the coordinator that admitted the request.
    bindings: dict[str, str]  #: stage -> incarnation of the instance that serves it for this request.
    remaining_ms: int | None = None  #: Milliseconds until the deadline, at sending. Never a wall-clock time.
    traceparent: str | None = None
    members: tuple[Member, ...] = ()  #: Bound instances that have been introduced to each other just now.
    #: Stages that a route may lead to and that had no ready instance (`rules.graph.partial_binding`).
    away: tuple[str, ...] = ()
    streamed: bool = False  #: Its client reads what is computed at once, so it is not sent again: see `InputComplete`.


class Room(msgspec.Struct, frozen=True, array_like=True):
    """One try to prefill one request elsewhere. Two tries never have the same room."""

    owner: Name  #: The incarnation of the coordinator that admitted the request.
    request_id: RequestId
    attempt: Count  #: The number of the request's attempt.
    generation: Count  #: A number that decode raises with each ask.


class Body(msgspec.Struct, frozen=True, array_like=True):
    """A payload's or chunk's data: a tensor-free value, and where its tensors are.

    Either everything rides ``inline``, or ``transfer`` is the relay's metadata of one flat buffer.
    """

    value: bytes = b""  #: MessagePack; empty when the value itself is the last part of the buffer.
    refs: tuple[TensorRef, ...] = ()
    inline: memoryview = memoryview(b"")  #: It lies in the frame's bytes where it came from a socket.
    transfer: bytes = b""
    copy_now: bool = False  #: The sender's last credit of this edge: copy it out and release at once.


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ends badly."""

    code: str
    message: str
    stage: str | None = None
    hook: str | None = None
    param: str | None = None
    unreachable: Name | None = None  #: The instance to which the stage has no connection, of ``transport_failed``.
    away: Name | None = None  #: The stage of `Header.away` that the request's route has led to, of ``unavailable``.


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """One stage's share of a request's time, in microseconds."""

    stage: str
    queue_us: int
    run_us: int
    #: Microseconds since the epoch, by the process's own clock; 0: of a process that does not report it.
    ended_us: int = 0
    #: (source, by stream, µs after the first input). Empty where the stage has one input.
    received: tuple[tuple[str, bool, int], ...] = ()
    streamed: tuple[tuple[str, int], ...] = ()  #: (target, µs from the first chunk sent to ``ended_us``).
