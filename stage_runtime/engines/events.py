"""The events that go into a stage's engine and come out: the types of the low-level interface.

Engines with a loop of their own (``run(inbox, outbox, stop)``) speak these directly; `simple`, `batched` and
`streaming` speak them for functions.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from stage_runtime.wire.parts import Failure
from stage_runtime.wire.values import Chunk, OmniRequest, StagePayload


class Start(msgspec.Struct, frozen=True):
    """A request's payload is here; of a fan-in, merged."""

    request_id: str
    payload: StagePayload
    work: Any = None


class ChunkIn(msgspec.Struct, frozen=True):
    """A stream's next chunk, in order per source; perhaps before the request's `Start`."""

    request_id: str
    chunk: Chunk
    work: Any = None


class StreamDone(msgspec.Struct, frozen=True):
    """``source`` streams nothing more to this request. It is the first event of an empty stream."""

    request_id: str
    source: str
    work: Any = None
    request: OmniRequest | None = None  #: The request itself, if it is known.


class NoPayload(msgspec.Struct, frozen=True):
    """No `Start` comes: every stage that could send this one the request's payload has sent it elsewhere."""

    request_id: str
    work: Any = None


class StreamFailed(msgspec.Struct, frozen=True):
    """``source`` failed; the request will end."""

    request_id: str
    source: str
    error: str
    work: Any = None
    failure: Failure | None = None


class Abort(msgspec.Struct, frozen=True):
    """The request has ended: drop it. Output for it is discarded."""

    request_id: str
    work: Any = None


class Stalled(msgspec.Struct, frozen=True):
    """All workers of an instance of ``source`` wait for full windows, one of them for this stage's; or no longer.

    Engines need it in which requests wait for a place while their chunks come (`streaming`).
    """

    source: str
    instance: str
    stalled: bool


class Admin(msgspec.Struct, frozen=True):
    """An operation of the engine's own; answer by calling ``reply(value)``."""

    call_id: str
    operation: str
    arguments: dict[str, Any]
    reply: Any = None
    asker: str = ""  #: The coordinator that asks; empty: the process itself, which waits for no answer.


Incoming: TypeAlias = Start | ChunkIn | StreamDone | StreamFailed | NoPayload | Abort | Stalled | Admin


class Emit(msgspec.Struct, frozen=True):
    """A chunk of a request's stream."""

    request_id: str
    chunk: Chunk


class Done(msgspec.Struct, frozen=True):
    """The engine has finished the request, with this result."""

    request_id: str
    data: Any = None


class Failed(msgspec.Struct, frozen=True):
    """The request failed here."""

    request_id: str
    error: BaseException | str


Outgoing: TypeAlias = Emit | Done | Failed
