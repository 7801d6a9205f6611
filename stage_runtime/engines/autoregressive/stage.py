"""An engine core as a stage: the inbox is its input, chunks and results its output. One thread, the stage's own.

The stage is the core's client: it tokenizes what arrives between two steps, and delivers after each. A request whose
consumer lags behind is not waited for: its deltas are joined until its gate opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

from stage_runtime.api import Autoregressive, Generation, StageContext
from stage_runtime.engines import events
from stage_runtime.engines.autoregressive import parameters, prompting
from stage_runtime.engines.autoregressive.busy_loop import BusyLoop, RequestType
from stage_runtime.engines.autoregressive.core import EngineCore, EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.output_processor import (
    OutputProcessor,
    RequestOutput,
    RequestOutputCollector,
)
from stage_runtime.engines.base import Gate, Inbox, Outbox, Work
from stage_runtime.engines.custom import RequestIds
from stage_runtime.engines.running import Yields
from stage_runtime.engines.simple import TakesNoChunks
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.profiler import events as profile
from stage_runtime.rules.autoregressive.requests import Finish
from stage_runtime.rules.autoregressive.scheduling import SchedulerOutput
from stage_runtime.wire.values import StagePayload


class _Answer:
    """One request, from its arrival to its end here."""

    def __init__(self, work: Work, payload: StagePayload, outbox: Outbox, prompt_tokens: int) -> None:
        self.work = work
        self.payload = payload
        self.prompt_tokens = prompt_tokens
        self.collector = RequestOutputCollector(parameters.OutputKind.DELTA)
        self.yields = Yields(work, outbox)
        self.gate: Gate | None = None  #: Its consumer lags behind.
        self.scheduled = False
        self.text = ""  #: All that was given out.


class AutoregressiveEngine:
    """`engines.base.Engine`."""

    ticks = 0
    takes_chunks = False
    takes_admin = False
    concurrency = 1  # threads that wait; how many requests it computes at once is the scheduler's business

    def __init__(self, spec: Autoregressive, core: EngineCore, tokenizer: Any, context: StageContext | None) -> None:
        from stage_runtime.engines.autoregressive.loading import decoder

        self._core = core
        self._tokenizer = tokenizer
        self._prompt = spec.prompt or prompting.default_prompt
        self._deliver = spec.deliver or prompting.default_deliver
        self._defaults = parameters.from_params(
            {key: value for key, value in spec.params.items() if key != "max_tokens"},
            parameters.SamplingParams(max_tokens=int(spec.params.get("max_tokens", 256))),
        )
        self._context = context
        self._processor = OutputProcessor(decoder(tokenizer))
        self._ids = RequestIds()
        self._answers: dict[str, _Answer] = {}
        self._names: dict[Work, str] = {}  #: Read in any thread.
        self._opened: SimpleQueue[str] = SimpleQueue()  #: Requests whose gates are done.
        self._arrived = Event()
        self._outbox: Outbox
        self._inbox: Inbox
        self._loop: BusyLoop

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._core.on_scheduled = self._on_scheduled
        self._loop = BusyLoop(
            self._core,
            self,
            self._on_outputs,
            self._fail,
            wake=self._arrived.set,
            on_idle=(self._report,),
            undelivered=lambda: bool(self._answers),
        )
        inbox.on_abort(self._forget)
        inbox.on_arrival(self._arrived.set)
        self._loop.run_busy_loop()

    # --- what comes in: `busy_loop.InputQueue` --------------------------------------------------------------------

    def get(self, block: bool) -> tuple[RequestType, Any] | None:
        """The next request or abort. It waits for an arrival, a gate that opens, or the inbox's end."""
        while True:
            self._arrived.clear()  # before looking: what comes from here on sets it again
            self._flush_opened()
            while (event := self._inbox.get_nowait()) is not None:
                item = self._on_event(event)
                if item is not None:
                    return item
            if self._inbox.closed:
                self._loop.request_shutdown()
            if not block or self._arrived.is_set():
                return None
            self._wait()
            block = False  # look once; the loop asks again

    def _wait(self) -> None:
        """Until something arrives. What is still to be answered waits for gates."""
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

    def _on_event(self, event: events.Incoming) -> tuple[RequestType, Any] | None:
        match event:
            case events.Start():
                return self._start(event)
            case events.Abort():
                name = self._names.get(event.work)
                if name is None:
                    return None
                self._drop(name)
                self._ids.abort(event.work)
                return RequestType.ABORT, [name]
            case events.ChunkIn():
                self._outbox.fail(event.work, TakesNoChunks(event.chunk.source))
            case events.StreamDone():
                self._outbox.fail(event.work, TakesNoChunks(event.source))
        return None

    def _start(self, event: events.Start) -> tuple[RequestType, Any] | None:
        """Prompt to tokens, checked. Whatever goes wrong fails this request alone."""
        work = event.work
        name = self._ids.of(work)
        try:
            self._emit(profile.SCHEDULER_REQUEST_BUILD_START, work)
            prompt = self._prompt(event.payload)
            params = parameters.from_params(prompt.params, self._defaults)
            tokens = prompting.encode(prompt, self._tokenizer)
            request = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=tokens,
                params=params,
                priority=prompt.priority,
                cache_salt=prompt.cache_salt,
            )
            try:
                prepared = self._core.preprocess_add_request(request)
            except ValueError as error:
                raise InvalidRequest(str(error)) from error
            answer = _Answer(work, event.payload.detach(), self._outbox, len(tokens))
            self._answers[name] = answer
            self._names[work] = name
            self._processor.add_request(name, params, len(tokens), answer.collector)
            self._emit(profile.SCHEDULER_REQUEST_BUILD_END, work)
            if not self._give(name, answer, Generation(begins=True, prompt_tokens=len(tokens))):
                return None
        except BaseException as error:  # SystemExit too: one request's code must not end the engine
            self._outbox.fail(work, error)
            self._drop(name)
            self._ids.end(name)
            return None
        self._emit(profile.SCHEDULER_QUEUE_ENTER, work, prompt_tokens=len(tokens))
        return RequestType.ADD, (request, prepared)

    def _forget(self, work: Work) -> None:
        """Nobody waits for it: the step under way is its last. In any thread; an `Abort` event follows."""
        name = self._names.get(work)
        if name is not None and work.cancelled:
            self._core.aborts_queue.put(name)

    # --- what goes out --------------------------------------------------------------------------------------------

    def _on_scheduled(self, step: SchedulerOutput) -> None:
        for row in step.rows:
            if row.request.generated == 0:
                answer = self._answers.get(row.request.id)
                if answer is not None and not answer.scheduled:
                    answer.scheduled = True
                    self._outbox.began(answer.work)
                    self._emit(profile.SCHEDULER_PREFILL_START, answer.work, cached_tokens=row.request.hit_tokens)

    def _on_outputs(self, outputs: Sequence[EngineCoreOutput]) -> list[str]:
        """Deliver a step's outputs. Returns: the requests that the core must end."""
        processed = self._processor.process_outputs(outputs)
        aborts = list(processed.reqs_to_abort)
        for name in processed.ready:
            if not self._flush(name):
                aborts.append(name)
        self._outbox.settle()
        self._report()
        return aborts

    def _flush_opened(self) -> None:
        """Deliver what was held for readers that have caught up."""
        while True:
            try:
                name = self._opened.get_nowait()
            except Empty:
                return
            answer = self._answers.get(name)
            if answer is not None and answer.gate is not None and answer.gate.done():
                answer.gate = None
                if not self._flush(name):
                    self._core.abort_requests([name])

    def _flush(self, name: str) -> bool:
        """Give out what waits in a collector. False: the request has failed in it."""
        answer = self._answers.get(name)
        if answer is None or answer.gate is not None:
            return True
        output = answer.collector.get_nowait()
        if output is None:
            return True
        if output.finish is Finish.ERROR:
            self._fail(name, RequestError("stage_failed", str(output.reason)))
            return True
        answer.text += output.text
        return self._give(name, answer, _generation(output, answer.text))

    def _give(self, name: str, answer: _Answer, generation: Generation) -> bool:
        """Call the author's ``deliver``. False: it failed."""
        if 0 < generation.completion_tokens == len(generation.tokens):
            self._emit(profile.SCHEDULER_FIRST_EMIT, answer.work)
        try:
            for item in self._deliver(answer.payload, generation):
                gate = answer.yields.take(item)
                if gate is not None and not gate.done():
                    answer.gate = gate
            if generation.finish is not None:
                answer.yields.end()
        except BaseException as error:
            self._fail(name, error)
            return False
        if generation.finish is not None:
            self._drop(name)
            self._ids.end(name)
        elif answer.gate is not None:
            answer.gate.add_done_callback(lambda _gate: self._open(name))
        return True

    def _open(self, name: str) -> None:
        """A gate is done. In any thread."""
        self._opened.put(name)
        self._arrived.set()

    def _fail(self, name: str, error: BaseException) -> None:
        answer = self._answers.get(name)
        if answer is not None:
            self._outbox.fail(answer.work, error)
            self._drop(name)
            self._ids.end(name)

    def _drop(self, name: str) -> None:
        """Nothing more is said of a request here."""
        answer = self._answers.pop(name, None)
        self._processor.abort_requests([name])
        if answer is not None:
            self._names.pop(answer.work, None)

    def _emit(self, event: str, work: Work, **metadata: Any) -> None:
        if self._context is not None:
            self._context.emit(event, work.request_id, **metadata)

    def _report(self) -> None:
        """What `/metrics` shows of this engine."""
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
        }


def _generation(output: RequestOutput, answer: str) -> Generation:
    return Generation(
        text=output.text,
        answer=answer,
        tokens=output.token_ids,
        finish=None if output.finish is None else output.finish.value,
        prompt_tokens=output.prompt_tokens,
        completion_tokens=output.generated,
        cached_tokens=output.cached_tokens,
        logprobs=tuple((one.logprob, one.top) for one in output.logprobs),
    )
