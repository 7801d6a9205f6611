"""Resolves a deadlock between a streaming producer and a consumer with few concurrent requests.

A producer that works on one request at a time may be blocked by the full window of request 2, which has not begun at
the consumer; the consumer is occupied by request 1, which waits for the same producer. So a producer sends
`StreamStalled` when all its workers are blocked, and the consumer counts chunks of request 2 as taken early, up to a
limit for the whole stage. The newest request is rejected beyond the limit, one that has not begun first, which frees
the producer. A consumer that computes, or that waits for a working producer, applies back-pressure as usual. Pure: the
engine passes the state in and carries the steps out.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from stage_runtime.rules.flow.streams import STREAM_WINDOW

Request = TypeVar("Request")
Source: TypeAlias = tuple[str, str]  #: A stage, and the incarnation of its instance.

ROOM: Final = 16 * STREAM_WINDOW  # weight that may be taken early at one stage: 4,096 small chunks, or 256 MiB of large


class Turn(msgspec.Struct, Generic[Request], frozen=True):
    """One request at the consumer."""

    request: Request
    begun: bool  #: It has a place: its function runs.
    waits: bool  #: Its function waits for input now.
    open: frozenset[Source]  #: Sources that may still send.
    held: frozenset[Source]  #: Sources of chunks that are here and count against their window.


class TakeEarly(msgspec.Struct, Generic[Request], frozen=True):
    """Count this source's chunks as taken, though they were not read."""

    request: Request
    source: Source


class TurnAway(msgspec.Struct, Generic[Request], frozen=True):
    """Fail a request: its producers are needed for others, and nothing more of it can be kept."""

    request: Request


def decide(
    turns: Sequence[Turn[Request]], stalled: AbstractSet[Source], *, places: int, room: int
) -> list[TakeEarly[Request] | TurnAway[Request]]:
    """The next steps. Empty: no request is locked out, or nothing that is here would help.

    turns:   all requests, the oldest first.
    stalled: sources all of whose workers wait for a window, one of this stage's among them.
    places:  requests that may have begun at once. room: weight that may still be taken early.
    """
    begun = [turn for turn in turns if turn.begun]
    # A function may read one source to its end while another one's window is full, and the one may need the other.
    steps = [TakeEarly(turn.request, source) for turn in begun if turn.waits for source in sorted(turn.held & stalled)]
    locked = len(begun) >= places and all(turn.waits and turn.open & stalled for turn in begun)
    needed = stalled & frozenset[Source]().union(*(turn.open for turn in begun))
    waiting = [turn for turn in turns if not turn.begun and turn.held & needed] if locked else []
    steps += [TakeEarly(turn.request, source) for turn in waiting for source in sorted(turn.held & needed)]
    if room > 0 or not locked:
        return list(steps) if room > 0 else []
    in_the_way = waiting or [turn for turn in begun if turn.held & stalled]
    return [TurnAway(in_the_way[-1].request)] if in_the_way else []
