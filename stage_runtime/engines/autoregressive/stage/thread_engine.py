"""An engine core as a stage: the inbox is its input, chunks and results its output. One thread, the stage's own.

The stage is the core's client: it tokenizes what arrives between two steps, and delivers after each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any

from stage_runtime.api import Autoregressive, StageContext
from stage_runtime.engines import events
from stage_runtime.engines.autoregressive.connectors import crossing, registry
from stage_runtime.engines.autoregressive.core import engine_operations
from stage_runtime.engines.autoregressive.core.busy_loop import BusyLoop, RequestType
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.stage.answers import Entered, GenerationAnswers
from stage_runtime.engines.autoregressive.stage.growing import FromStream, GrowingPrompts, Grown
from stage_runtime.engines.base import Inbox, Outbox, Work
from stage_runtime.engines.simple import TakesNoChunks
from stage_runtime.errors import refusal
from stage_runtime.kv_transfer import interface
from stage_runtime.kv_transfer.interface import KVTransport, Source
from stage_runtime.rules.autoregressive import balancing
from stage_runtime.rules.autoregressive.requests import Request
from stage_runtime.rules.autoregressive.steps import SchedulerOutput


class AutoregressiveEngine:
    """`engines.base.Engine`."""

    ticks = 0
    takes_admin = True
    concurrency = 1  # threads that wait; how many requests it computes at once is the scheduler's business
    places = 0  # its memory bounds them, not a number

    def __init__(
        self,
        spec: Autoregressive,
        core: EngineCore,
        tokenizer: Any,
        context: StageContext | None,
        sources: Sequence[str] = (),
    ) -> None:
        """sources: upstream stages that stream into this one."""
        self.takes_chunks = spec.stream is not None
        self._core = core
        self._arrived = Event()
        self._answers = GenerationAnswers(
            spec,
            tokenizer,
            context,
            wake=self._arrived.set,
            abort=core.abort_requests,
            check=self._check,
        )
        self._growing = GrowingPrompts(spec.stream, sources, self._answers) if spec.stream and sources else None
        self._items: deque[tuple[RequestType, Any]] = deque()  #: Orders for the loop, made from events that were taken.
        self._outbox: Outbox
        self._inbox: Inbox
        self._loop: BusyLoop

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._answers.outbox = outbox
        self._core.on_scheduled = self._on_scheduled
        self._core.post = self.post
        self._loop = BusyLoop(
            self._core,
            self,
            self._on_outputs,
            self._refuse,
            wake=self._arrived.set,
            on_idle=(self._report,),
            undelivered=lambda: bool(self._answers),
        )
        inbox.on_abort(self._forget)
        inbox.on_arrival(self._arrived.set)
        self._loop.run_busy_loop()

    def post(self, function: Callable[[], None]) -> None:
        """Have it called between two steps. Any thread may call this."""
        self._items.append((RequestType.UTILITY, lambda _core: function()))
        self._arrived.set()

    def connect(self, spec: Autoregressive, loaded: registry.Built, context: StageContext | None) -> None:
        """Called before `run`: the engine gives out blocks, or takes them in, if its stage asks for that.

        Raises: ConfigurationError: it cannot.
        """
        if context is None or not context.kv_role:
            return registry.connect(spec, loaded, registry.Around(self.post))
        transport: KVTransport = context.kv

        def source(request: EngineCoreRequest) -> Source | None:
            origin = self._answers.origin(request.request_id)
            return None if origin is None else interface.source_of(transport, origin)

        def notice(event: str, name: str, **metadata: object) -> None:
            request_id = crossing.request_of(context.kv_role, name, self._answers.origin)
            if request_id is not None:
                context.emit(event, request_id, **metadata)

        around = registry.Around(self.post, context.kv_role, transport, source, notice, context.progress)
        registry.connect(spec, loaded, around)

    # --- what comes in: `busy_loop.InputQueue` --------------------------------------------------------------------

    def get(self, block: bool) -> tuple[RequestType, Any] | None:
        """The next request or abort. It waits for an arrival, a gate that opens, or the inbox's end."""
        while True:
            self._arrived.clear()  # before looking: what comes from here on sets it again
            self._answers.flush_opened()
            self._items.extend((RequestType.ADD, entered) for entered in self._answers.encoded())
            while not self._items and (event := self._inbox.get_nowait()) is not None:
                self._items.extend(self._on_event(event))
            if self._items:
                return self._items.popleft()
            if self._inbox.closed:
                if self._growing is not None:
                    self._growing.close(self._outbox)
                self._loop.request_shutdown()
            if not block or self._arrived.is_set():
                return None
            self._wait()
            block = False  # look once; the loop asks again

    def _wait(self) -> None:
        """Waits until something arrives. Requests that are not answered yet wait for gates meanwhile."""
        parking = self._inbox.parking
        if self._answers:
            with parking.at_gate():
                self._arrived.wait()
            return
        parking.rest()
        try:
            self._arrived.wait()
        finally:
            parking.resume()

    def _check(self, request: EngineCoreRequest) -> Request:
        """A request made ready for the core. Any thread may call it. Raises: ValueError: it cannot be computed here."""
        balancing.check_only(request.data_parallel_rank)
        return self._core.preprocess_add_request(request)

    def _on_event(self, event: events.Incoming) -> list[tuple[RequestType, Any]]:
        if self._growing is not None and isinstance(event, FromStream):
            return [self._item(inputs) for inputs in self._growing.take(event, self._outbox)]
        match event:
            case events.Start():
                return [(RequestType.ADD, entered) for entered in self._answers.start(event.work, event.payload)]
            case events.Abort():
                if self._growing is not None:
                    self._growing.forget(event.work)
                names = self._answers.forget(event.work)
                return [(RequestType.ABORT, names)] if names else []
            case events.Admin():
                return [(RequestType.UTILITY, partial(engine_operations.carry_out, event))]
            case events.ChunkIn():
                self._outbox.fail(event.work, TakesNoChunks(event.chunk.source))
            case events.StreamDone():
                self._outbox.fail(event.work, TakesNoChunks(event.source))
        return []

    def _item(self, inputs: Entered | Grown) -> tuple[RequestType, Any]:
        if not isinstance(inputs, Grown):
            return RequestType.ADD, inputs
        more = inputs.more
        try:
            placed = self._core.preprocess_extension(more)
        except Exception as error:
            self._refuse(inputs.name, error)
            return RequestType.ABORT, [inputs.name]
        return RequestType.EXTEND, (inputs.name, placed, more.last)

    def _refuse(self, name: str, error: BaseException) -> None:
        self._answers.fail(name, refusal(error) if isinstance(error, ValueError) else error)

    def _forget(self, work: Work) -> None:
        """Nobody waits for it: the step under way is its last. Any thread may call this; an `Abort` event follows."""
        if work.cancelled:
            for name in self._answers.names(work):
                self._core.aborts_queue.put(name)

    # --- what goes out --------------------------------------------------------------------------------------------

    def _on_scheduled(self, step: SchedulerOutput) -> None:
        fresh = [row.request for row in step.rows if row.place == 0]
        self._answers.scheduled((request.id, request.hit_tokens) for request in fresh)

    def _on_outputs(self, outputs: Sequence[EngineCoreOutput]) -> list[str]:
        """Deliver a step's outputs. Returns: the requests that the core must end."""
        aborts = self._answers.deliver(outputs)
        self._report()
        return aborts

    def _report(self) -> None:
        """The values of this engine for `/metrics`."""
        scheduler = self._core.scheduler
        pool, stats = scheduler.pool, scheduler.stats
        self._inbox.gauges = {
            "waiting": scheduler.waiting,
            "running": scheduler.running,
            "kv_blocks": pool.capacity,
            "kv_blocks_used": pool.capacity - pool.free,
            "kv_blocks_cached": pool.cached,
            "steps_total": self._core.steps,
            "preemptions_total": stats.preemptions,
            "prompt_tokens_total": stats.prompt_tokens,
            "prefix_hit_tokens_total": stats.hit_tokens,
            "generated_tokens_total": stats.generated_tokens,
            **self._core.gauges(),
        }
