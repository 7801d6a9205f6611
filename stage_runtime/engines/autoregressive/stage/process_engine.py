"""Engines in processes of their own as a stage: the stage is their client, on an event loop in its thread.

One engine, or several, among which the client's balancer chooses. The coordinator's bindings choose the instance; what
is chosen here is only which engine inside it computes a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from threading import Event
from typing import Any, Final, Protocol

from stage_runtime.api import Autoregressive, StageContext
from stage_runtime.engines import events
from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.data_parallel import DPLBAsyncMPClient
from stage_runtime.engines.autoregressive.connectors import crossing
from stage_runtime.engines.autoregressive.core import engine_operations
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.messages.engine_messages import EngineCoreOutputs, SchedulerStats
from stage_runtime.engines.autoregressive.stage.adapting import EngineAdapters
from stage_runtime.engines.autoregressive.stage.answers import GenerationAnswers
from stage_runtime.engines.autoregressive.stage.engine_rooms import EngineRooms, RoomClient
from stage_runtime.engines.autoregressive.stage.growing import FromStream, GrowingPrompts, Grown
from stage_runtime.engines.autoregressive.stage.traces import EngineTraces
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import Extension
from stage_runtime.engines.base import Inbox, Outbox, Work
from stage_runtime.engines.simple import TakesNoChunks
from stage_runtime.errors import ENGINES_CHANGE, EngineDeadError, InvalidRequest, RequestError, describe
from stage_runtime.kv_transfer.interface import KVTransport
from stage_runtime.profiler.recording.children import children
from stage_runtime.rules.members.adapters import LOAD, UNLOAD

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0  # at whether engines compute; as often as they give signs of life
MOST_ENGINES: Final = 64
SCALE: Final = "scale_engines"
LEAST_TOKENS: Final = "kv_least_tokens"  # the only gauge of which several engines' sum says nothing
REST_S: Final = 5.0  # after a replacement that failed; doubled with each one
MOST_REST_S: Final = 60.0
DRAIN_S: Final = 60.0  # engines finish what is under way, when the stage ends


class EngineClient(Protocol):
    """The part of an engine client that the stage uses. Its calls are made on the loop that it was attached to."""

    reqs_in_flight: dict[str, int]
    stats: dict[int, SchedulerStats]
    on_scheduled: Callable[[Sequence[tuple[str, int]]], None]
    on_stats: Callable[[], None]

    @property
    def dead(self) -> bool: ...
    def attach(self) -> None: ...
    async def add_request_async(self, request: EngineCoreRequest) -> None: ...
    async def extend_request_async(self, request_id: str, more: Extension) -> None: ...
    async def abort_requests_async(self, request_ids: Iterable[str]) -> None: ...
    async def get_output_async(self) -> EngineCoreOutputs: ...
    async def call_each_async(self, method: str, *arguments: Any) -> list[Any]: ...
    async def close(self, *, drain_s: float = 0.0) -> None: ...


class ProcessEngine:
    """`engines.base.Engine`."""

    takes_admin = True
    concurrency = 1
    places = 0

    def __init__(
        self,
        spec: Autoregressive,
        client: EngineClient,
        tokenizer: Any,
        context: StageContext | None,
        sources: Sequence[str] = (),
    ) -> None:
        """client: not attached to a loop yet. sources: upstream stages that stream into this one."""
        self._rooms: EngineRooms | None = None
        self.takes_chunks = spec.stream is not None
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()
        self._answers = GenerationAnswers(spec, tokenizer, context, wake=self._wake, abort=self._abort)
        self._growing = GrowingPrompts(spec.stream, sources, self._answers) if spec.stream and sources else None
        self._outputs_taken = 0  #: Messages of engines that were taken.
        self._replacing: set[asyncio.Task[None]] = set()
        self._failures = 0  #: Replacements in a row that failed.
        self._rests_until = 0.0  #: No engine is replaced before this time of `time.monotonic`.
        self._operating: set[asyncio.Task[None]] = set()
        self._scaling = asyncio.Lock()
        self._adapters = EngineAdapters(client) if isinstance(client, AsyncMPClient) else None
        self._outbox: Outbox
        self._inbox: Inbox

    def pair(self, client: RoomClient, transport: KVTransport, role: str, context: StageContext) -> None:
        """Called before `run`: the engines give out blocks, or take them in. client: that of this engine."""

        def notice(event: str, name: str, **metadata: object) -> None:
            request_id = crossing.request_of(role, name, self._answers.origin)
            if request_id is not None:
                context.emit(event, request_id, **metadata)

        self._rooms = EngineRooms(transport, client, role, notice=notice)

    @property
    def ticks(self) -> int:
        """Steps of the engines, and what came of them: their progress, for the watchdog."""
        return self._outputs_taken + sum(one.steps for one in list(self._client.stats.values()))

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        """Raises: EngineDeadError: no engine is left. All requests have failed, or fail by that."""
        self._inbox, self._outbox = inbox, outbox
        self._answers.outbox = outbox
        with asyncio.Runner() as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._client.on_scheduled = self._answers.scheduled
        self._client.on_stats = self._report
        self._client.attach()
        if self._rooms is not None:
            self._rooms.attach(self._loop)
        traces = EngineTraces(self._client, self._loop) if isinstance(self._client, AsyncMPClient) else None
        if traces is not None:
            children.add(traces)
        reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _task: self._arrived.set())
        self._inbox.on_abort(self._forget)
        self._inbox.on_arrival(self._wake)
        try:
            while not reader.done():
                self._arrived.clear()  # before looking: what comes from here on sets it again
                self._answers.flush_opened()
                for request, _prepared in self._answers.encoded():
                    await self._add(request)
                while (event := self._inbox.get_nowait()) is not None:
                    await self._on_event(event)
                self._report()
                if self._inbox.closed and self._growing is not None:
                    self._growing.close(self._outbox)
                if self._inbox.closed and not self._answers:
                    return
                await self._wait()
            reader.result()
        finally:
            reader.cancel()
            if traces is not None:
                children.remove(traces)
            self._loop = None
            if self._rooms is not None:
                self._rooms.detach()
            with contextlib.suppress(asyncio.CancelledError, EngineDeadError):
                await reader
            await asyncio.gather(*self._replacing)  # or their processes would have no owner
            async with self._scaling:  # as for replacements
                draining = self._client.reqs_in_flight and not self._client.dead
                await self._client.close(drain_s=DRAIN_S if draining else 0.0)
            await asyncio.gather(*self._operating)  # each is answered

    async def _wait(self) -> None:
        """Waits until something arrives. Requests that no engine can compute wait for gates, or other stages' rows."""
        parking = self._inbox.parking
        if not self._answers:
            parking.rest()
            try:
                await self._arrived.wait()
            finally:
                parking.resume()
            return
        while not self._arrived.is_set():
            held = self._all_held
            with parking.at_gate() if held else contextlib.nullcontext():
                while self._all_held is held and not self._arrived.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY_S):
                            await self._arrived.wait()

    @property
    def _all_held(self) -> bool:
        """No engine has anything to compute, as far as is known: not older than a sign of life."""
        return len(self._client.reqs_in_flight) <= sum(one.held for one in self._client.stats.values())

    def _wake(self) -> None:
        """Look again. Any thread may call this."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just been closed
                loop.call_soon_threadsafe(self._arrived.set)

    # --- what comes in --------------------------------------------------------------------------------------------

    async def _on_event(self, event: events.Incoming) -> None:
        if self._growing is not None and isinstance(event, FromStream):
            for entry in self._growing.take(event, self._outbox):
                await (self._extend(entry) if isinstance(entry, Grown) else self._add(entry[0]))
            return
        match event:
            case events.Start():
                for request, _prepared in self._answers.start(event.work, event.payload):
                    await self._add(request)
            case events.Abort():
                if self._growing is not None:
                    self._growing.forget(event.work)
                names = self._answers.forget(event.work)
                if names:
                    self._abort(names)
            case events.Admin():
                self._operate(event)
            case events.ChunkIn():
                self._outbox.fail(event.work, TakesNoChunks(event.chunk.source))
            case events.StreamDone():
                self._outbox.fail(event.work, TakesNoChunks(event.source))

    def _operate(self, event: events.Admin) -> None:
        """Ask every engine. Requests do not wait for their answers."""

        async def ask() -> None:
            try:
                if event.operation == SCALE:
                    event.reply(await self._scale(event.arguments))
                    return
                if event.operation in (LOAD, UNLOAD):
                    event.reply(await self._adapt(event))
                    return
                arguments = engine_operations.checked(event)
                results = await self._client.call_each_async(event.operation, *arguments)
                event.reply(engine_operations.joined(results))
            except Exception as error:
                event.reply(error)

        task = asyncio.create_task(ask())
        self._operating.add(task)
        task.add_done_callback(self._operating.discard)

    async def _adapt(self, event: events.Admin) -> Any:
        """Load or unload an adapter in every engine, or in none; those that are started later have what these have.

        Raises: RequestError, UtilityFailed: nothing is changed then.
        """
        arguments = engine_operations.checked(event)
        if self._adapters is None:
            raise InvalidRequest(f"{event.operation}: adapters are for engine='own'")
        if self._busy:
            raise RequestError("unavailable", f"{event.operation}: {ENGINES_CHANGE}")
        return await self._adapters.carry_out(event.operation, arguments)

    async def _scale(self, arguments: dict[str, Any]) -> int:
        """How many engines there are afterwards. Raises: InvalidRequest, ConfigurationError: nothing is changed."""
        client, engines = self._client, arguments.get("engines")
        if not isinstance(client, DPLBAsyncMPClient):
            raise InvalidRequest(f"{SCALE} is for a stage whose data_parallel_size is 2 or more")
        if set(arguments) != {"engines"} or type(engines) is not int or not 1 <= engines <= MOST_ENGINES:
            raise InvalidRequest(f"{SCALE}: expected engines, from 1 to {MOST_ENGINES}, got {arguments!r:.80}")
        if self._busy:
            raise RequestError("unavailable", f"{SCALE}: {ENGINES_CHANGE}")
        async with self._scaling:
            await client.scale_async(engines)
            if self._adapters is not None:
                await self._adapters.align()
        return engines

    async def _add(self, request: EngineCoreRequest) -> None:
        """A fault of the request fails it alone; that engines are dead fails all, by `_read`."""
        try:
            if self._rooms is not None:
                request = self._rooms.bound(request, self._answers.origin(request.request_id))
            await self._client.add_request_async(request)
        except Exception as error:
            self._answers.fail(request.request_id, _of_request(error))

    async def _extend(self, grown: Grown) -> None:
        """Sends more of a request's prompt to its engine; an error fails that request alone, as in `_add`."""
        try:
            await self._client.extend_request_async(grown.name, grown.more)
        except Exception as error:
            self._answers.fail(grown.name, _of_request(error))
            self._abort([grown.name])

    def _abort(self, names: Any) -> None:
        loop = self._loop
        if loop is not None:
            loop.create_task(self._client.abort_requests_async(names)).add_done_callback(_log_failure)

    def _forget(self, work: Work) -> None:
        """Nobody waits for it. Any thread may call this; an `Abort` event follows."""
        self._wake()

    # --- what goes out --------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Raises: EngineDeadError."""
        while True:
            self._take(await self._client.get_output_async())

    def _take(self, outputs: EngineCoreOutputs) -> None:
        self._outputs_taken += 1
        for refused in outputs.refused:
            self._answers.fail(refused.request_id, RequestError(refused.code, refused.message, param=refused.param))
        if outputs.outputs:
            aborts = self._answers.deliver(outputs.outputs)
            if aborts:
                self._abort(aborts)
        client = self._client
        if isinstance(client, DPLBAsyncMPClient) and client.lost and not self._busy and self._is_rested:
            task = asyncio.create_task(self._replace(client))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)
        self._arrived.set()  # the report, and the end of what is drained

    @property
    def _busy(self) -> bool:
        """Engines are being started or ended."""
        return bool(self._replacing) or self._scaling.locked()

    @property
    def _is_rested(self) -> bool:
        """Each try to start an engine loads a model, beside those that serve."""
        return time.monotonic() >= self._rests_until

    async def _replace(self, client: DPLBAsyncMPClient) -> None:
        """Start engines in place of those that have ended, while the others serve."""
        while client.lost:
            rank = min(client.lost)
            try:
                await client.replace_async(rank)
            except Exception as error:
                self._failures += 1
                rest_s = min(REST_S * 2 ** min(self._failures - 1, 10), MOST_REST_S)
                self._rests_until = time.monotonic() + rest_s
                problem = "engine %d could not be replaced, the stage goes on without it, and tries again in %.0f s: %s"
                log.error(problem, rank, rest_s, describe(error))
                return
            self._failures = 0
            log.warning("engine %d was replaced", rank)
            if self._adapters is not None:
                await self._adapters.align()

    def _report(self) -> None:
        """The values of all engines of this instance for `/metrics`."""
        stats = list(self._client.stats.values())
        self._inbox.gauges = {
            "waiting": sum(one.waiting for one in stats),
            "running": sum(one.running for one in stats),
            "kv_blocks": sum(one.kv_blocks for one in stats),
            "kv_blocks_used": sum(one.kv_blocks_used for one in stats),
            "kv_blocks_cached": sum(one.kv_blocks_cached for one in stats),
            "steps_total": sum(one.steps for one in stats),
            "preemptions_total": sum(one.preemptions for one in stats),
            "prompt_tokens_total": sum(one.prompt_tokens for one in stats),
            "prefix_hit_tokens_total": sum(one.prefix_hit_tokens for one in stats),
            "generated_tokens_total": sum(one.generated_tokens for one in stats),
            **{
                name: (max if name == LEAST_TOKENS else sum)(one.parts.get(name, 0) for one in stats)
                for name in set().union(*(one.parts for one in stats))
            },
        }


def _of_request(error: Exception) -> Exception:
    """The error that a client sees."""
    if isinstance(error, EngineDeadError):
        return RequestError("stage_failed", f"the engine has ended: {error}")
    if type(error) is ValueError:
        return InvalidRequest(str(error))
    return error


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("an abort failed: %s", describe(error))
