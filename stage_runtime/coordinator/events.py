"""The interface between `coordinator` and `web`: events of a request, its record, and the protocols of both sides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, TypeAlias

import msgspec

from stage_runtime.coordinator.admitting.terminal_stages import TerminalStagesResult
from stage_runtime.metrics import planes
from stage_runtime.metrics.samples import Samples
from stage_runtime.wire.values import OmniRequest


class StageTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one stage's share of a request's time."""

    queue_ms: float
    run_ms: float
    start_ms: float | None = None  #: Its first input has arrived. Times are from the request's admission.
    end_ms: float | None = None  #: Its result is about to be sent on.


class HopTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One message from stage to stage; of a stream its first chunk. The coordinator is the client's side."""

    source: str
    target: str
    kind: str  #: ``payload`` or ``stream``
    start_ms: float
    end_ms: float


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a request's terminal stages have reported."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ChunkEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A terminal stage streamed something to the client; in order per stage."""

    stage: str
    index: int
    data: Any
    modality: str | None = None
    metadata: dict[str, Any] | None = None


class ResultEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A terminal stage has completed. ``has_data`` is False when its function gave no result (chunks only)."""

    stage: str
    data: Any = None
    has_data: bool = True


AnswerEvent: TypeAlias = ChunkEvent | ResultEvent


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a request, in flight or finished lately (`GET /v1/requests/{id}`)."""

    id: str
    kind: str
    state: str  #: ``running``, ``completed``, ``failed``, ``cancelled``
    age_ms: float
    attempt: int  #: 1: the first.
    bindings: dict[str, str]  #: stage -> instance
    waiting_for: tuple[str, ...] = ()  #: Terminal stages that have not completed.
    first_event_ms: float | None = None  #: Admission to the first chunk or result.
    total_ms: float | None = None
    admitted_at: float = 0.0  #: Seconds since the epoch.
    stages: dict[str, StageTiming] = {}
    hops: tuple[HopTiming, ...] = ()  #: Hops in order of their start.
    usage: TokenUsage | None = None  #: So far; what was read of it, if it was cancelled. None: nothing was reported.
    error: dict[str, Any] | None = None


class StageNeed(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the newest pipeline revision, as `/health?stages` shows it."""

    stage: str
    group: str
    needed: bool  #: No request can be served without it.
    instances: int  #: That take requests of the revision now.


class RequestHandleApi(Protocol):
    """One admitted request. Its holder must read it to its end, or `abort` it."""

    @property
    def id(self) -> str: ...

    @property
    def instances(self) -> frozenset[str]:
        """The instances that it is bound to, or was when it ended; none while it waits for one."""

    def events(self) -> AsyncIterator[ChunkEvent | ResultEvent]:
        """All events; ends after the last terminal's ResultEvent.

        Raises: RequestError: the request failed; nothing follows.
        Closing the iterator early (or cancelling its reader) aborts the request.
        """

    def abort(self, reason: str) -> bool:
        """End it as ``cancelled``; False when it is over already."""


class RequestManagerApi(Protocol):
    """The calls of the web room. Implemented by `coordinator.request_manager`; knows no HTTP."""

    async def call_terminal_stages(
        self,
        request: OmniRequest,
        *,
        timeout_s: float | None = None,
        watch: Callable[[Callable[[], object]], None] | None = None,
    ) -> TerminalStagesResult | None:
        """The result of the author's terminalStagesFn for a request; goes to `admit`.

        watch: is given what to call when the client disconnects meanwhile.
        Raises: RequestError: deadline: it has not answered in the request's time; cancelled: the client has
            disconnected; rate_limited, unavailable.
        """

    def admit(
        self,
        request: OmniRequest,
        *,
        timeout_s: float | None = None,
        trace: str | None = None,
        trace_state: str | None = None,
        hook_result: TerminalStagesResult | None = None,
        prefer: AbstractSet[str] = frozenset(),
    ) -> RequestHandleApi:
        """Take a request and send it off.

        prefer: instances that served the session of the request before, and may have its caches.

        timeout_s: the deadline from now; None: the pipeline's own; capped by it.
        Raises: RequestError: duplicate_request, rate_limited, unavailable, invalid_request; nothing was sent.
        """

    def check_room(self) -> None:
        """Whether `admit` would take another request now: checked before its body is read.

        Raises: RequestError: rate_limited, unavailable.
        """

    def abort(self, request_id: str, reason: str) -> bool:
        """End a request as ``cancelled``. False when no such request is in flight."""

    async def forward_abort(self, request_id: str, reason: str) -> bool:
        """The same as `abort`, by the coordinator that owns the request: in a roll there are two."""

    def record(self, request_id: str) -> RequestRecord | None: ...

    def latest(self, most: int) -> Sequence[RequestRecord]:
        """The newest requests in flight and the last that ended, up to ``most`` of each, newest first; then the last
        ones that failed or were cancelled, which may be among those before.
        """

    def needs(self) -> Sequence[StageNeed]:
        """The stages of the newest revision; none: no pipeline is known."""

    def status(self) -> Mapping[str, Any]:
        """Members, stages, in flight, revisions: what `/status` answers (JSON-ready)."""

    def ready(self) -> bool:
        """`/readyz`: there was a complete set of instances once, or 30 s have passed without it and
        without a frame of another protocol.
        """

    def problem(self) -> str | None:
        """Why no request can be served now, nor soon: what load balancers must know. None: they are served or wait."""

    def metrics(self) -> Samples:
        """Samples of requests, stages and the coordinator's planes."""

    def member_gauges(self) -> Mapping[str, planes.Gauges]:
        """The planes' numbers of each member, by the name of its process, as of its last beat."""
