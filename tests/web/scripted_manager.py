"""A request manager in memory: obeys the `RequestManagerApi` protocol, runs a script in place of stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from stage_runtime.coordinator.admitting.terminal_stages import TerminalStagesResult
from stage_runtime.coordinator.events import ChunkEvent, RequestRecord, ResultEvent, StageNeed
from stage_runtime.errors import RequestError
from stage_runtime.metrics import planes
from stage_runtime.metrics.samples import Samples
from stage_runtime.wire.values import OmniRequest

Event = ChunkEvent | ResultEvent
Script = Callable[["ScriptedHandle"], AsyncIterator[Event]]


class ScriptedHandle:
    """One request, played by a script."""

    def __init__(
        self, manager: ScriptedManager, request: OmniRequest, timeout_s: float | None, trace: str | None
    ) -> None:
        self.manager = manager
        self.request = request
        self.timeout_s = timeout_s
        self.trace = trace
        self.preferred: AbstractSet[str] = frozenset()
        self.pulled = 0  #: Events that the reader has taken.
        self.ended = asyncio.Event()
        self.outcome: str | None = None
        self.reason: str | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def instances(self) -> frozenset[str]:
        return frozenset({f"talk-{self.manager.handles.index(self) + 1}"})

    async def events(self) -> AsyncIterator[Event]:
        script = self.manager.script(self)
        try:
            while (event := await self._next(script)) is not None:
                self.pulled += 1
                yield event
            self._end("completed")
        except RequestError as error:
            self._end(error.code)
            raise
        finally:
            self.abort("the reader left")
            await script.aclose()  # type: ignore[attr-defined]

    def abort(self, reason: str) -> bool:
        if self.ended.is_set():
            return False
        self.reason = reason
        self._end("cancelled")
        return True

    async def _next(self, script: AsyncIterator[Event]) -> Event | None:
        """The script's next event, unless the request is ended from elsewhere first."""
        step = asyncio.ensure_future(_step(anext(script)))
        end = asyncio.ensure_future(self.ended.wait())
        try:
            limit_s = self.timeout_s if self.timeout_s is not None else 30.0
            done, _ = await asyncio.wait({step, end}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if step in done:
                return step.result()
            if end in done:
                raise RequestError("cancelled", self.reason or "cancelled", request_id=self.id)
            raise RequestError("deadline", f"not done within {limit_s:g} s", request_id=self.id)
        finally:
            for task in (step, end):
                task.cancel()
            await asyncio.gather(step, end, return_exceptions=True)

    def _end(self, outcome: str) -> None:
        self.outcome = self.outcome or outcome
        self.ended.set()
        self.manager.in_flight.pop(self.id, None)


async def _step(coming: Awaitable[Event]) -> Event | None:
    try:
        return await coming
    except StopAsyncIteration:
        return None


class ScriptedManager:
    """Admits up to ``cap`` requests at once and plays ``script`` for each."""

    def __init__(self, script: Script, *, cap: int = 8) -> None:
        self.script = script
        self.cap = cap
        self.handles: list[ScriptedHandle] = []
        self.in_flight: dict[str, ScriptedHandle] = {}
        self.owned_elsewhere: set[str] = set()  #: Requests of another coordinator.
        self.is_ready = True
        self.why_not: str | None = None  #: No request can be served.
        self.samples: Samples = {}
        self.gauges: Mapping[str, planes.Gauges] = {}
        self.shown: Mapping[str, Any] = {}  #: The counts that `status` shows beside the count in flight.
        self.records: Sequence[RequestRecord] = ()
        self.forgotten: set[str] = set()  #: Requests that were listed, and whose records are gone.
        self.stages: Sequence[StageNeed] = ()

    @property
    def last(self) -> ScriptedHandle:
        return self.handles[-1]

    def check_room(self) -> None:
        if len(self.in_flight) >= self.cap:
            raise RequestError("rate_limited", "too many requests in flight", retry_after_s=2.5)

    async def call_terminal_stages(
        self,
        request: OmniRequest,
        *,
        timeout_s: float | None = None,
        watch: Callable[[Callable[[], object]], None] | None = None,
    ) -> None:
        return None

    def admit(
        self,
        request: OmniRequest,
        *,
        timeout_s: float | None = None,
        trace: str | None = None,
        trace_state: str | None = None,
        hook_result: TerminalStagesResult | None = None,
        prefer: AbstractSet[str] = frozenset(),
    ) -> ScriptedHandle:
        if request.id in self.in_flight:
            raise RequestError("duplicate_request", f"{request.id!r} is in flight", request_id=request.id)
        self.check_room()
        handle = ScriptedHandle(self, request, timeout_s, trace)
        handle.preferred = prefer
        self.handles.append(handle)
        self.in_flight[request.id] = handle
        return handle

    def abort(self, request_id: str, reason: str) -> bool:
        handle = self.in_flight.get(request_id)
        return handle is not None and handle.abort(reason)

    async def forward_abort(self, request_id: str, reason: str) -> bool:
        if request_id not in self.owned_elsewhere:
            return False
        self.owned_elsewhere.remove(request_id)
        return True

    def record(self, request_id: str) -> RequestRecord | None:
        if request_id in self.forgotten:
            return None
        known = next((one for one in self.records if one.id == request_id), None)
        if known is not None:
            return known
        found = next((handle for handle in reversed(self.handles) if handle.id == request_id), None)
        if found is None:
            return None
        state = {None: "running", "completed": "completed", "cancelled": "cancelled"}.get(found.outcome, "failed")
        return RequestRecord(
            id=found.id, kind=found.request.kind, state=state, age_ms=1.0, attempt=1, bindings={"talk": "talk-1"}
        )

    def status(self) -> Mapping[str, Any]:
        return {"in_flight": len(self.in_flight), **self.shown}

    def latest(self, most: int) -> Sequence[RequestRecord]:
        return self.records[:most]

    def needs(self) -> Sequence[StageNeed]:
        return self.stages

    def ready(self) -> bool:
        return self.is_ready

    def problem(self) -> str | None:
        return self.why_not

    def metrics(self) -> Samples:
        return self.samples

    def member_gauges(self) -> Mapping[str, planes.Gauges]:
        return self.gauges


def play(*steps: Event | Exception | asyncio.Event, stage: str = "talk") -> Script:
    """A script of events, errors to raise, and gates to wait for; ends with a result without data if none is given."""

    async def script(_: ScriptedHandle) -> AsyncIterator[Event]:
        for step in steps:
            match step:
                case asyncio.Event():
                    await step.wait()
                case Exception():
                    raise step
                case _:
                    yield step
        if not any(isinstance(step, ResultEvent) for step in steps):
            yield ResultEvent(stage=stage, has_data=False)

    return script


def chunk(data: Any, *, stage: str = "talk", index: int = 0) -> ChunkEvent:
    return ChunkEvent(stage=stage, index=index, data=data)
