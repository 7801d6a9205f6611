"""Slow clients: clients that read slower than a terminal stage streams, while other requests wait for that stage.

A full window blocks a worker until its client reads. When all workers of a stage are blocked so and other requests are
queued there, the stage sends `StreamStalled`, and the coordinator, as consumer of the streams, counts chunks as taken
early, up to a limit. The request whose client read least recently ends beyond the
limit. `rules.flow.turns` does the same between stages. Pure: the coordinator passes
the state in and carries the steps out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from stage_runtime.rules.flow.streams import STREAM_WINDOW

Request = TypeVar("Request")

EACH: Final = 8 * STREAM_WINDOW  # taken early of one request: 2,048 small chunks, or 128 MiB of large ones
ROOM: Final = 16 * STREAM_WINDOW  # taken early of all requests of a coordinator: at most 256 MiB
PATIENCE_S: Final = 1.0  # a client that has read so lately is not ended: it reads, though slower than the stage gives


class Reader(msgspec.Struct, Generic[Request], frozen=True):
    """One request whose client has chunks to read."""

    request: Request
    fresh: int  #: Weight of unread chunks that fill the stalled stage's window; 0: no worker waits for this client.
    early: int  #: Weight of unread chunks of any stage that are counted as taken.
    read_at: float  #: When its client took something last, or had nothing to take.


class TakeUnread(msgspec.Struct, Generic[Request], frozen=True):
    """Count the stalled stage's chunks as taken, though the client has not read them."""

    request: Request


class EndRequest(msgspec.Struct, Generic[Request], frozen=True):
    """End the request: its client does not read, and others need the worker or the room."""

    request: Request


Step: TypeAlias = TakeUnread[Request] | EndRequest[Request]


class Holder(msgspec.Struct, Generic[Request], frozen=True):
    """One request with an unread part of its answer."""

    request: Request
    nbytes: int
    streamed: bool  #: Its client gets what is here as it comes; else all of it, at the end.
    read_at: float  #: When its client took something last, or had nothing to take.


def decide(readers: Sequence[Reader[Request]], *, now: float) -> list[Step[Request]]:
    """The next steps for one stage all of whose workers wait for clients while other requests wait for it.

    Empty: no client holds a worker up, or all that do read. More than `ROOM` is taken early by one window at most.
    """
    room = ROOM - sum(reader.early for reader in readers)
    full = room <= 0
    steps: list[Step[Request]] = []
    for reader in readers:
        if reader.fresh and reader.early < EACH and room > 0:
            steps.append(TakeUnread(reader.request))
            room -= reader.fresh
    if steps or not any(reader.fresh for reader in readers):
        return steps
    # Only its own end helps where one client's bound is reached; where the sum's is, anybody's who takes room.
    ending = [
        reader for reader in readers if (reader.fresh or (full and reader.early)) and now - reader.read_at >= PATIENCE_S
    ]
    return [EndRequest(min(ending, key=lambda reader: reader.read_at).request)] if ending else []


def first_to_end(holders: Sequence[Holder[Request]], *, now: float) -> Holder[Request]:
    """The request to end where all unread answers take more room than there is, whether or not a stage is stalled.

    That of the client that has not read for longest; where all clients read, the one whose answer takes most room.
    """
    idle = [holder for holder in holders if holder.streamed and now - holder.read_at >= PATIENCE_S]
    if idle:
        return min(idle, key=lambda holder: holder.read_at)
    return max(holders, key=lambda holder: holder.nbytes)
