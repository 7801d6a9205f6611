"""All messages of the control plane, in one file however long: a tag that stands twice is seen here.

Array-like tagged structs: small, fast, and readable by any MessagePack decoder (a test reads them all with
`msgpack`). Messages hold no tensors, but may carry up to 72 KiB of a payload inline. Acknowledgement of frames is in
`rules.flow.links`; encoding is in `codec`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec

from stage_runtime.wire.parts import (
    AdapterName,
    Body,
    Count,
    Failure,
    FilePath,
    Header,
    Member,
    Name,
    RequestId,
    Room,
    Timing,
)

AdapterChanges: TypeAlias = Annotated[dict[AdapterName, FilePath | None], msgspec.Meta(max_length=256)]
KV_BEAT_ROOMS: Final = 1024  # of at most some 250 bytes each: far below the limit of a frame
Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


class BaseMessage(msgspec.Struct, frozen=True, array_like=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages."""


# --- a request on its way ---------------------------------------------------------------------------------------


class Submit(BaseMessage, frozen=True, tag=1):
    """Coordinator → entry stage: a request begins."""

    header: Header
    target: Name
    body: Body


class DataReady(BaseMessage, frozen=True, tag=2):
    """Stage → stage: a payload (``chunk_id`` None), a stream's chunk, its end, or its failure.

    ``is_done``: the stream from ``source`` is over after ``chunk_id`` chunks; of an empty one, ``body`` brings the
    request. A failure ends it badly.
    """

    header: Header
    source: Name
    target: Name
    body: Body | None = None
    chunk_id: Count | None = None
    is_done: bool = False
    failure: Failure | None = None
    modality: Name | None = None
    timings: tuple[Timing, ...] = ()
    weight: Count = (
        #: The weight of a chunk: what it takes of the stream's window (`rules.flow.streams`); `Consumed` gives it back.
        1
    )


class Stream(BaseMessage, frozen=True, tag=3):
    """Terminal stage → coordinator: a chunk for the client."""

    request_id: RequestId
    attempt: Count
    source: Name
    chunk_id: Count
    body: Body
    modality: Name | None = None
    weight: Count = 1  #: The same as of `DataReady`.


class Complete(BaseMessage, frozen=True, tag=4):
    """Stage → coordinator: a terminal stage has completed (``chunks`` were streamed), or the request failed here."""

    request_id: RequestId
    attempt: Count
    source: Name
    body: Body | None = None
    chunks: Count = 0
    failure: Failure | None = None
    timings: tuple[Timing, ...] = ()
    skipped: bool = False  #: Nothing of the request can reach this terminal stage: it gives no result.


class Abort(BaseMessage, frozen=True, tag=5):
    """Coordinator → all (published: a hint) and → every bound instance (pushed: the authority)."""

    request_id: RequestId
    attempt: Count  #: This attempt and every one before it.
    owner: Name
    reason: str


class Release(BaseMessage, frozen=True, tag=6):
    """Receiver → sender: these transfers' slots are free again, and their credits with them."""

    transfers: tuple[int, ...]


class RelayFailure(BaseMessage, frozen=True, tag=14):
    """Either end of an edge → the other: ``relay`` does not move bytes between the two. Use the next one."""

    relay: Name
    reason: str


class Consumed(BaseMessage, frozen=True, tag=7):
    """Stream consumer → producer: chunks of this weight in all have been taken; send as much again."""

    request_id: RequestId
    attempt: Count
    owner: Name
    source: Name
    target: Name
    weight: Count
    over: bool = False  #: The consumer takes nothing more of this stream: it waits for no one.


class Ended(BaseMessage, frozen=True, tag=9):
    """Coordinator → bound instances, in batches: these are complete; drop what is left of them."""

    requests: tuple[tuple[RequestId, Count], ...]  #: (id, attempt)


class HandBack(BaseMessage, frozen=True, tag=8):
    """Draining stage → coordinator: this request has not begun here; take it elsewhere. No retry is spent."""

    request_id: RequestId
    attempt: Count
    source: Name


class InputComplete(BaseMessage, frozen=True, tag=15):
    """Stage → coordinator, of a request with ``Header.streamed``: all input of it is here, streams to their ends.

    The instances that sent it may end: their part is over as far as ``source`` needs it.
    """

    request_id: RequestId
    attempt: Count
    source: Name


class ForwardAbort(BaseMessage, frozen=True, tag=10):
    """Coordinator → instances → every other coordinator: abort this request if you own it. ``asker`` does not."""

    request_id: RequestId
    asker: Name  #: The incarnation of the coordinator that got the client's abort.
    reason: str


class ForwardAbortReply(BaseMessage, frozen=True, tag=11):
    """The way back: an owner's answer to the instance, and the instance's to ``asker``."""

    request_id: RequestId
    asker: Name
    aborted: bool
    owners: Count = 0  #: How many coordinators the instance has passed it on to; one such answer comes of each.


class Skip(BaseMessage, frozen=True, tag=12):
    """Stage → stage: ``source`` sends ``target`` nothing more of this request on this edge. It begins nothing there.

    ``chunks`` None: no payload comes. Else: the stream ends after so many chunks, without the signal that it is done.
    """

    header: Header
    source: Name
    target: Name
    chunks: Count | None = None


class StreamStalled(BaseMessage, frozen=True, tag=13):
    """Stage → stage: all workers of ``source`` in this process wait for a full stream window, one of them for
    ``target``'s. ``source`` begins no other
    request until they no longer wait.

    Terminal stage → coordinator, its ``target``: they do, for clients, and other requests wait for ``source``.
    """

    source: Name
    target: Name
    stalled: bool


# --- membership -------------------------------------------------------------------------------------------------


class Hello(BaseMessage, frozen=True, tag=20):
    """Process → coordinator, unordered and repeated until Welcome: registers the process and its endpoints."""

    member: Member
    edges: str  #: Hash of the protocol and the declared edges at this member: what could not talk is refused.
    pipeline: Name
    via: str  #: The endpoint that this was sent to; Welcome repeats it.


class Welcome(BaseMessage, frozen=True, tag=21):
    """Coordinator → process: the registration is accepted. Other members are named when a request is bound to both."""

    publisher: str
    coordinator: Member
    via: str
    beat_s: float = 0.0  #: The shortest time between two beats to this coordinator; 0: that of the plan.


class Rejected(BaseMessage, frozen=True, tag=22):
    """Coordinator → process, unordered: the registration is rejected.

    ``fenced``: ``incarnation`` was declared dead, and nothing of it is bound here any more. It sends Hello again where
    another coordinator holds it; else it comes back under a new one, as it does when this answers Hello. Not
    ``fenced``: ask again in a while.
    """

    incarnation: Name
    reason: str
    fenced: bool = False
    via: str = ""  #: The same as in `Hello`, which this answers; empty: it answers another message.


class Members(BaseMessage, frozen=True, tag=23):
    """Coordinator → process: members that share requests with it, and those among them that are gone for good.

    Process → coordinator: in ``joined``, without their facts, those that it knows from a coordinator that is gone.
    Answered by those of them that are gone, now or later.
    """

    joined: tuple[Member, ...] = ()
    gone: tuple[str, ...] = ()
    beat_s: float | None = None  #: The same as in `Welcome`; None: as before.


class Ready(BaseMessage, frozen=True, tag=24):
    """Process → coordinator: models are loaded and warmed up; requests may be bound to it. Sent again when its adapters
    change.
    """

    #: stage -> adapter -> the folder from which it was loaded since the process started; None: it was dropped.
    adapters: Annotated[dict[Name, AdapterChanges], msgspec.Meta(max_length=1000)] = {}


class Beat(BaseMessage, frozen=True, tag=25):
    """Process → coordinator, about once a second, unordered: load and progress, never proof of life."""

    waiting: dict[str, int]  #: stage -> requests in its queue
    running: dict[str, int]  #: stage -> requests being computed
    progress: dict[str, int]  #: stage -> steps its loop has taken
    gauges: dict[str, float] = {}


class Deregister(BaseMessage, frozen=True, tag=26):
    """Process → coordinator: it drains. Bind no new request to it; bound requests are finished."""

    reason: str


class Unbound(BaseMessage, frozen=True, tag=27):
    """Coordinator → draining process: no request of this coordinator is bound to it any more."""


class PeerUnreachable(BaseMessage, frozen=True, tag=28):
    """Process → coordinator: its connection to ``peer`` broke. Messages in transit between the two may be lost, even if
    the coordinator still reaches both.
    """

    peer: Name  #: An incarnation.


class Detour(BaseMessage, frozen=True, tag=29):
    """Process → coordinator → ``receiver``, unordered: a frame of a link whose connection is still being made.

    The link sends it again when it is connected: it may be lost, or come twice.
    """

    receiver: Name  #: An incarnation.
    frame: bytes  #: An `Envelope`.


# --- control ----------------------------------------------------------------------------------------------------


class ProfilerStart(BaseMessage, frozen=True, tag=41):
    """Coordinator → process: record events, and a torch trace. Answered by `ProfilerReply`."""

    call_id: Name
    run_id: Name
    event_dir: FilePath
    torch_template: FilePath | None = None  #: None: no torch trace.
    config: dict[str, bool] = {}  #: Switches of the torch trace.
    max_seconds: Count = 0  #: The process ends the run then; 0: never.


class ProfilerStop(BaseMessage, frozen=True, tag=42):
    """Coordinator → process: stop the run; None stops whatever is active. Answered by `ProfilerReply`."""

    call_id: Name
    run_id: Name | None = None


class AdminCall(BaseMessage, frozen=True, tag=43):
    """Coordinator → process: an engine's own operation."""

    call_id: Name
    stage: Name
    operation: Name
    arguments: dict[str, Any] = {}


class AdminReply(BaseMessage, frozen=True, tag=44):
    """Process → coordinator: what the operation gave; one per rank. Those of ranks 1.. come by rank 0."""

    call_id: Name
    stage: Name
    rank: Count
    value: Any = None
    error: str | None = None


class Ack(BaseMessage, frozen=True, tag=60):
    """Carries only the frame's ``ack``. ``gap``: frames after it are missing; send them again."""

    gap: bool = False


class ProfilerRead(BaseMessage, frozen=True, tag=45):
    """Coordinator → process: a piece of a file of this run, or the list of its files. Answered by `ProfilerReply`."""

    call_id: Name
    run_id: Name
    path: FilePath = ""  #: The path in the list; empty: the list itself.
    offset: Count = 0  #: The offset in bytes.


class ProfilerReply(BaseMessage, frozen=True, tag=46):
    """Process → coordinator: what became of a profiler message.

    The two times are of the process's own clock, in nanoseconds since the epoch: with the coordinator's own two they
    give the distance of the clocks.
    """

    call_id: Name
    received_ns: int
    sent_ns: int
    stages: dict[str, str] = {}  #: stage -> ``started``, ``stopped``, ``not recording``, or ``failed: ...``
    files: tuple[tuple[str, int], ...] = ()  #: (path, bytes)
    data: bytes = b""  #: The bytes of a file, from the offset on; empty at its end.
    error: str | None = None


# --- between the ranks of a TP stage ----------------------------------------------------------------------------


class RankHello(BaseMessage, frozen=True, tag=70):
    """Rank 0 → follower, repeated, and the follower's answer (``ready``: its engine is loaded)."""

    rank: Count
    endpoint: str
    relays: dict[str, Any]
    via: str  #: The endpoint that rank 0 sent it to.
    ready: bool = False


class RankWork(BaseMessage, frozen=True, tag=71):
    """Rank 0 → followers: the next thing that happens, in the one order that all ranks see."""

    index: Count
    kind: Name  #: ``start``, ``chunk``, ``done``, ``failed``, ``abort``, ``admin``, ``nothing``, ``close``
    request_id: str = ""
    owner: str = ""  #: The owner of ``attempt``: two coordinators may use one request id at the same time.
    attempt: Count = 0
    body: Body | None = None


class RankFailed(BaseMessage, frozen=True, tag=72):
    """Follower → rank 0: computing this request failed here."""

    rank: Count
    request_id: str
    owner: str
    attempt: Count
    error: str


class RankQuestion(BaseMessage, frozen=True, tag=73):
    """Coordinator → rank 0 → the follower of this rank: a profiler message for it. Answered by `RankAnswer`."""

    rank: Count
    incarnation: Name  #: The follower's name at the coordinator, which knows no more of it.
    question: ProfilerStart | ProfilerStop | ProfilerRead
    asker: Name = ""  #: The coordinator; rank 0 fills it in.


class RankAnswer(BaseMessage, frozen=True, tag=74):
    """Follower → rank 0, which passes the answer on to the coordinator that asked."""

    asker: Name
    answer: ProfilerReply | AdminReply


# --- between a prefill and a decode instance --------------------------------------------------------------------


class KVAsk(BaseMessage, frozen=True, tag=75):
    """Decode → prefill: compute a prompt, and send its KV blocks to the sender. It opens the room."""

    room: Room
    source: Name  #: The decode stage.
    target: Name  #: The prefill stage.
    body: Body
    members: tuple[Member, ...] = ()  #: The same as of `Header`.


class KVPiece(BaseMessage, frozen=True, tag=76):
    """Prefill → decode: some of the blocks."""

    room: Room
    source: Name  #: The prefill stage.
    target: Name  #: The decode stage.
    body: Body


class KVClose(BaseMessage, frozen=True, tag=77):
    """Either → the other: the room is over. ``reason`` None: all has come."""

    room: Room
    target: Name
    reason: Reason | None = None


class KVBeat(BaseMessage, frozen=True, tag=78):
    """Decode → prefill, of all rooms at once: they are wanted still. Those that are not open there are closed."""

    target: Name
    rooms: Annotated[tuple[Room, ...], msgspec.Meta(max_length=KV_BEAT_ROOMS)]


Message: TypeAlias = (
    Submit
    | DataReady
    | Stream
    | Complete
    | Abort
    | Release
    | RelayFailure
    | Consumed
    | Ended
    | HandBack
    | InputComplete
    | ForwardAbort
    | ForwardAbortReply
    | Skip
    | StreamStalled
    | Hello
    | Welcome
    | Rejected
    | Members
    | Ready
    | Beat
    | Deregister
    | Unbound
    | PeerUnreachable
    | Detour
    | ProfilerStart
    | ProfilerStop
    | AdminCall
    | AdminReply
    | ProfilerRead
    | ProfilerReply
    | Ack
    | RankHello
    | RankWork
    | RankFailed
    | RankQuestion
    | RankAnswer
    | KVAsk
    | KVPiece
    | KVClose
    | KVBeat
)
